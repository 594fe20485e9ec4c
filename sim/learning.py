"""What an optimisation does under a run's updates: real arithmetic, after the fact, in the order that was simulated.

When steps end does not depend on the values, so this may come after the run.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import numpy as np

from aiokv.core.bundle import BUNDLE_START
from aiokv.core.merging import Merging
from aiokv.optim import make_optimizer
from sim.problems import make_problem
from sim.updating import Updater, robust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sim.problems import Floats
    from sim.record import Run, Token, UpdateRecord
    from sim.scenario import Scenario

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

    return [start, *_versions(run.updates, gradient, follow, start)]


def _versions(
    updates: Sequence[UpdateRecord],
    gradient: Callable[[Value, Token], Value],
    follow: Callable[[Value, list[Value], list[Value], UpdateRecord], Value],
    start: Value,
) -> Iterator[Value]:
    """Yield the parameters after each update of a chunk.

    Args:
        updates: of the chunk, in the order of versions.
        gradient: of the parameters that its worker had read and its token.
        follow: makes the next parameters of those that are there, an update's gradients, those that each of them was
            computed from, and its record.
        start: the parameters at version 0.
    """
    oldest = max((staleness for update in updates for staleness in update.staleness), default=0)
    # Only what may still be used is kept: parameters may be large.
    values = deque([start], maxlen=oldest + 1)
    for update in updates:
        read = [values[-1 - staleness] for staleness in update.staleness]
        parts = [gradient(value, token) for value, token in zip(read, update.tokens, strict=True)]
        values.append(follow(values[-1], parts, read, update))
        yield values[-1]


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
    scenario, section = run.scenario, run.scenario.learning
    problem = make_problem(section, seed=run.seed, workers=scenario.cluster.workers)
    key = scenario.tensors[0].key
    # Until it is used alone, a small tensor may be the first one of a bundle.
    updates = [update for update in run.updates if update.key == key and update.start in {0, BUNDLE_START}]
    updater = Updater(make_optimizer(section.optimizer, section.params), key, problem.start)
    merging = Merging(section.reduction, section.staleness_rate)
    merge = _merger(merging, scenario.cluster.workers, updater.compensation)

    def gradient(parameters: Floats, token: Token) -> Floats:
        worker, push = token
        if token in run.poisoned:
            return np.full_like(parameters, np.nan)
        return problem.gradient(parameters, int(worker.rpartition("-")[2]), push)

    def follow(parameters: Floats, parts: list[Floats], read: list[Floats], update: UpdateRecord) -> Floats:
        moved = [parameters - own for own in read]
        new = updater.update(
            parameters, merge(parts, update.staleness, moved), read[0] if len(read) == 1 else parameters
        )
        # Others may still have read it.
        new.flags.writeable = False
        return new

    parameters = problem.start
    curve = Curve([0.0], [0], [float(problem.loss(parameters))], parameters)
    for update, parameters in zip(updates, _versions(updates, gradient, follow, problem.start), strict=True):
        if update.version % section.loss_every == 0 or update is updates[-1]:
            curve.times.append(update.time)
            curve.updates.append(update.version)
            curve.losses.append(float(problem.loss(parameters)))
    curve.parameters = parameters
    return curve


def _merger(merging: Merging, workers: int, lamda: float) -> Callable[[list[Floats], list[int], list[Floats]], Floats]:
    """Return what makes one array of an update's gradients, their staleness, and how far the parameters have moved."""
    rate = merging.rate

    def merge(parts: list[Floats], staleness: list[int], moved: list[Floats]) -> Floats:
        if rate is not None:
            parts = [rate(tau) * part for tau, part in zip(staleness, parts, strict=True)]
        if lamda and len(parts) > 1:
            # Each by itself; the rule does it with a single one.
            parts = [part + lamda * part * part * by for part, by in zip(parts, moved, strict=True)]
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
