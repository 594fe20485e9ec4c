"""What an optimisation does under a run's updates: real arithmetic, after the fact, in the order that was simulated.

When steps end does not depend on the values, so this may come after the run.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec
import numpy as np

from aiokv.core.keys import BUNDLE_START
from aiokv.core.merging import Merging
from aiokv.optim import make_optimizer
from sim.problems import make_problem
from sim.updating import Updater, robust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from aiokv.types import Version
    from sim.problems import Floats
    from sim.record import Run, UpdateRecord
    from sim.scenario import Scenario
    from sim.tokens import Token

    Gradient = Callable[[float, Token], float]

Value = TypeVar("Value", "float", "Floats")

NEVER: Final = math.inf
"""Time until something that did not happen."""


def descend(run: Run, gradient: Gradient, *, start: float, rate: float) -> list[float]:
    """Return the parameter at each version of a run's only chunk, from 0 on.

    Each gradient is computed at the version that its worker had read, and each update follows the mean of its
    gradients.

    Args:
        run: says which gradients are in which update, and how stale they are.
        gradient: of a parameter and the gradient's token.
        start: the parameter at version 0.
        rate: the learning rate.
    """

    def follow(value: float, parts: list[float], read: list[float], update: UpdateRecord) -> float:
        return value - rate * math.fsum(parts) / len(parts)

    versions = _Versions(gradient, follow, start, _oldest(run.updates))
    return [start, *(versions.make(update) for update in run.updates)]


class _Versions(Generic[Value]):
    """The parameters at each version of a chunk, from those at version 0 on.

    Args:
        gradient: of the parameters that its worker had read and its token.
        follow: makes the next parameters of those that are there, an update's gradients, those that each of them was
            computed from, and its record.
        start: the parameters at version 0.
        oldest: how stale gradients are at most; None: all parameters are kept.
    """

    def __init__(
        self,
        gradient: Callable[[Value, Token], Value],
        follow: Callable[[Value, list[Value], list[Value], UpdateRecord], Value],
        start: Value,
        oldest: int | None = None,
    ) -> None:
        self._gradient: Callable[[Value, Token], Value] = gradient
        self._follow: Callable[[Value, list[Value], list[Value], UpdateRecord], Value] = follow
        # Only what may still be used is kept: parameters may be large.
        self.values: deque[Value] = deque([start], maxlen=None if oldest is None else oldest + 1)

    def make(self, update: UpdateRecord) -> Value:
        """Return the parameters after the next update."""
        values = self.values
        read = [values[-1 - staleness] for staleness in update.staleness]
        parts = [self._gradient(value, token) for value, token in zip(read, update.tokens, strict=True)]
        new = self._follow(values[-1], parts, read, update)
        values.append(new)
        return new


def _oldest(updates: Sequence[UpdateRecord]) -> int:
    return max((staleness for update in updates for staleness in update.staleness), default=0)


# --- the workload of a scenario ---


@dataclass(slots=True)
class Curve:
    """How good the parameters were during a run, from the start on, at which there are no updates."""

    times: list[float]
    """Seconds."""
    updates: list[int]
    losses: list[float]
    parameters: Floats
    """At the end."""


class Learning(msgspec.Struct, frozen=True):
    """What came of a workload; NaN where there is none."""

    loss: float
    """After the last update."""
    time_to_target_s: float
    """When the loss was at most the target for the first time; infinite if it never was."""
    updates_to_target: float
    """After how many updates."""


def learns(scenario: Scenario) -> bool:
    """Say whether the workers of a scenario optimise something."""
    return scenario.learning.workload != "none"


def learned(run: Run) -> Learning:
    """Return what came of a run's workload."""
    if not learns(run.scenario):
        return Learning(math.nan, math.nan, math.nan)
    curve, target = curve_of(run), run.scenario.learning.target_loss
    if target is None:
        return Learning(curve.losses[-1], math.nan, math.nan)
    for time, updates, loss in zip(curve.times, curve.updates, curve.losses, strict=True):
        if loss <= target:
            return Learning(curve.losses[-1], time, float(updates))
    return Learning(curve.losses[-1], NEVER, NEVER)


def curve_of(run: Run) -> Curve:
    """Return the losses of a run whose scenario has a workload; they are computed when they are first asked for.

    The parameters follow the first chunk of the first tensor: its updates, and how stale their gradients are.

    Raises:
        ConfigError: the workload can't be made.
        MissingExtraError: it needs a package that is not installed.
    """
    if run.curve is None:
        # Parameters that diverge show it in their losses.
        with np.errstate(all="ignore"):
            run.curve = _curve(run)
    return run.curve


def _curve(run: Run) -> Curve:
    section, workload = run.scenario.learning, _Workload(run)
    updates = [update for update in run.updates if workload.is_followed(update)]
    versions, loss = workload.versions(_oldest(updates)), workload.problem.loss
    curve = Curve([0.0], [0], [float(loss(workload.problem.start))], workload.problem.start)
    for update in updates:
        curve.parameters = versions.make(update)
        if update.version % section.loss_every == 0 or update is updates[-1]:
            curve.times.append(update.time)
            curve.updates.append(update.version)
            curve.losses.append(float(loss(curve.parameters)))
    return curve


class Losses:
    """The losses that workers measure while a run goes on.

    Args:
        run: whose scenario has a workload; what has happened in it so far.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._workload = _Workload(run)
        self._versions = self._workload.versions(None)
        self._seen = 0
        self._losses: dict[Version, float] = {}

    def at(self, version: Version) -> float:
        """Return the loss at a version of the parameters."""
        if version not in self._losses:
            # Parameters that diverge show it in their losses.
            with np.errstate(all="ignore"):
                for update in self._run.updates[self._seen :]:
                    if self._workload.is_followed(update):
                        self._versions.make(update)
                self._seen = len(self._run.updates)
                values = self._versions.values
                # Of another chunk there may be a newer one.
                self._losses[version] = float(self._workload.problem.loss(values[min(version, len(values) - 1)]))
        return self._losses[version]


class _Workload:
    """What the workers of a run optimise, and how its updates change the parameters."""

    def __init__(self, run: Run) -> None:
        scenario, section = run.scenario, run.scenario.learning
        self.problem = make_problem(section, seed=run.seed, workers=scenario.cluster.workers)
        self._poisoned = run.poisoned
        self._key = scenario.tensors[0].key
        self._updater = Updater(make_optimizer(section.optimizer, section.params), self._key, self.problem.start)
        merging = Merging(section.reduction, section.staleness_rate)
        self._merge = _merger(merging, scenario.cluster.workers, self._updater.compensation)

    def is_followed(self, update: UpdateRecord) -> bool:
        """Tell whether an update is one of the parameters."""
        # Until it is used alone, a small tensor may be the first one of a bundle.
        return update.key == self._key and update.start in {0, BUNDLE_START}

    def versions(self, oldest: int | None) -> _Versions[Floats]:
        """Return the parameters at each version; `oldest` as there."""
        return _Versions(self._gradient, self._follow, self.problem.start, oldest)

    def _gradient(self, parameters: Floats, token: Token) -> Floats:
        worker, push = token
        if token in self._poisoned:
            return np.full_like(parameters, np.nan)
        return self.problem.gradient(parameters, int(worker.rpartition("-")[2]), push)

    def _follow(self, parameters: Floats, parts: list[Floats], read: list[Floats], update: UpdateRecord) -> Floats:
        merged = self._merge(parts, update.staleness, parameters, read)
        new = self._updater.update(parameters, merged, read[0] if len(read) == 1 else parameters)
        # Others may still have read it.
        new.flags.writeable = False
        return new


def _merger(
    merging: Merging, workers: int, lamda: float
) -> Callable[[list[Floats], list[int], Floats, list[Floats]], Floats]:
    """Return what makes one array of an update's gradients.

    It takes them, their staleness, the parameters, and those that each of them was computed from.
    """
    rate = merging.rate

    def merge(parts: list[Floats], staleness: list[int], now: Floats, read: list[Floats]) -> Floats:
        if rate is not None:
            parts = [rate(tau) * part for tau, part in zip(staleness, parts, strict=True)]
        if lamda and len(parts) > 1:
            # Each by itself; the rule does it with a single one.
            parts = [part + lamda * part * part * (now - own) for part, own in zip(parts, read, strict=True)]
        if merging.robust is not None:
            return robust(parts, merging.robust)
        total: Floats = np.sum(parts, axis=0)
        return total / merging.divisor(len(parts), workers)

    return merge


def loss_columns(run: Run) -> dict[str, list[Any]]:
    """Return the losses that were computed, when, and after how many updates; nothing without a workload."""
    if not learns(run.scenario):
        return {}
    curve = curve_of(run)
    return {"time_s": curve.times, "updates": curve.updates, "loss": curve.losses}


def loss_rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yield one entry for each loss that was computed."""
    columns = loss_columns(run)
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))
