"""Update rules in double precision, for what simulated workers optimise.

The servers' own arithmetic (`aiokv.kernels`) is none of the simulator's; parameters, schedules and counts are those of
`aiokv.optim`, so a rule is written as for a cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiokv.errors import OptimizerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiokv.optim import Optimizer
    from aiokv.types import Key
    from sim.problems import Floats

    Numbers = Mapping[str, float]
    State = dict[str, Floats]
    Change = Callable[[Floats, State, Numbers], Floats]
    """Returns by how much parameters change, from the gradient, what is kept, which it renews, and the numbers."""


def _plain(gradient: Floats, state: State, numbers: Numbers) -> Floats:
    return -numbers["learning_rate"] * gradient


def _heavy_ball(gradient: Floats, state: State, numbers: Numbers) -> Floats:
    state["momentum"] = numbers["decay"] * state["momentum"] - numbers["learning_rate"] * gradient
    return state["momentum"]


def _nesterov(gradient: Floats, state: State, numbers: Numbers) -> Floats:
    return numbers["decay"] * _heavy_ball(gradient, state, numbers) - numbers["learning_rate"] * gradient


def _adam(gradient: Floats, state: State, numbers: Numbers) -> Floats:
    state["mean"] = numbers["beta1"] * state["mean"] + numbers["rest1"] * gradient
    state["variance"] = numbers["beta2"] * state["variance"] + numbers["rest2"] * gradient * gradient
    change: Floats = -numbers["rate"] * state["mean"] / (np.sqrt(state["variance"]) + numbers["epsilon"])
    return change


CHANGES: Final[Mapping[str, Change]] = {
    "sgd": _plain,
    "sgd_with_momentum": _heavy_ball,
    "nag_with_momentum": _nesterov,
    "adam": _adam,
    # What they follow is compensated before.
    "dcasgd": _plain,
    "dcasgd_with_momentum": _heavy_ball,
}
"""By the name of the rule's arithmetic."""


def check_rule(rule: Optimizer) -> None:
    """Refuse a rule that is not computed here.

    Raises:
        OptimizerError: names those that are.
    """
    if rule.kernel not in CHANGES:
        known = "adam, dcasgd, nag, sgd"
        raise OptimizerError(
            f"the simulator computes {known}, with or without momentum; {rule.name!r} runs on servers only",
            expected=known,
            got=rule.name,
        )


class Updater:
    """A rule with what it keeps for one key.

    Args:
        rule: which; see `check_rule`.
        key: whose multipliers count.
        start: the parameters at version 0.
    """

    def __init__(self, rule: Optimizer, key: Key, start: Floats) -> None:
        self._rule: Any = rule
        self._key = key
        self._change = CHANGES[rule.kernel]
        self._state = {name: np.zeros_like(start) for name in rule.keeps}
        self._count = 0

    @property
    def compensation(self) -> float:
        """The factor with which each of several contributions is compensated for what was changed meanwhile."""
        return float(self._rule.compensation)

    def update(self, weight: Floats, total: Floats, read: Floats) -> Floats:
        """Return the new parameters.

        Args:
            weight: the parameters.
            total: the contributions of the update, reduced.
            read: the parameters that the contribution was computed from, for `dcasgd`; the present ones for several.
        """
        self._count += 1
        rule = self._rule
        step = rule.step_for(self._key, count=self._count, num_update=self._count)
        gradient = rule.rescale_grad * total
        if rule.clip_gradient is not None:
            gradient = np.clip(gradient, -rule.clip_gradient, rule.clip_gradient)
        gradient += step.wd * weight
        numbers = rule.numbers(step, float, ())
        if rule.reads_weight:
            gradient += numbers["lamda"] * gradient * gradient * (weight - read)
        return weight + self._change(gradient, self._state, numbers)


TRIMMED: Final = 4
"""One of so many contributions is left out at each end, at least one if there are three."""


def robust(parts: Sequence[Floats], reduction: str) -> Floats:
    """Return the "median" or the "trimmed_mean" of each element, as servers do."""
    if reduction == "median":
        middle: Floats = np.median(parts, axis=0)
        return middle
    number = len(parts)
    cut = max(1, number // TRIMMED) if number > 2 else 0  # noqa: PLR2004 - of two none can be left out
    mean: Floats = np.sort(parts, axis=0)[cut : number - cut].mean(axis=0)
    return mean
