"""Learning-rate schedules as typed data: pure functions of the number of the update.

A schedule turns the rule's `learning_rate`, its base, into the rate of update number n. Updates are numbered from 1, so
n = 1 is the first that is made and n = 0 is before it. Nothing is remembered between calls: a resumed job, or one that
asks for an earlier update, gets the same rates. After its last update a schedule keeps its final rate.

    factor        base * factor^k, k of the boundaries step, 2 step, ... lie below n: the first `step` updates have base
    multifactor   the same with boundaries that are given one by one
    step          base * factor^floor(n / step): update number `step` is the first with the lower rate
    poly          from base to final_lr by (1 - progress)^power
    cosine        from base to final_lr by half a wave of a cosine (Loshchilov & Hutter 2017, without restarts)
    linear        from base to final_lr in a straight line
    onecycle      up from base / div_factor to base, then down to base / div_factor / final_div_factor
                  (Smith & Topin 2018)

All but the last can begin with a warm-up of `warmup_steps`: updates with n < warmup_steps have a rate between
`warmup_begin_lr` and base. `factor`, `multifactor` and `step` count their boundaries from the very beginning, warm-up
included; `poly`, `cosine` and `linear` begin when the warm-up is over and end at `max_update`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec

from aiokv.errors import OptimizerError
from aiokv.optim.checks import (
    AT_LEAST_0,
    COUNT,
    MORE_THAN_0,
    POSITIVE_COUNT,
    Range,
    check_choice,
    check_names,
    check_numbers,
    to_int,
    wrong,
)

_FACTOR = Range("a number in (0, 1]", low=math.ulp(0.0), below=math.nextafter(1.0, 2.0))


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of all schedules."""

    ranges: ClassVar[Mapping[str, Range]] = {}

    @property
    def owner(self) -> str:
        """What messages call it."""
        return f"schedule {self.__struct_config__.tag!r}"

    def __post_init__(self) -> None:
        check_numbers(self.owner, self, self.ranges)

    def rate(self, base: float, num_update: int) -> float:
        """Return the learning rate of an update, given the rule's own and the update's number, from 1 on."""
        raise NotImplementedError


class _WarmedUp(Schedule, frozen=True, kw_only=True):
    """Base of the schedules that can begin with a warm-up.

    Args:
        warmup_steps: updates with a smaller number have the rate of the warm-up; 0 for none.
        warmup_begin_lr: the rate at n = 0.
        warmup_mode: "linear" from there to base, or "constant".
    """

    ranges = {"warmup_steps": COUNT, "warmup_begin_lr": AT_LEAST_0}

    warmup_steps: int = 0
    warmup_begin_lr: float = 0.0
    warmup_mode: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.owner, self, "warmup_mode", ("linear", "constant"))

    def rate(self, base: float, num_update: int) -> float:
        """See `Schedule.rate`."""
        if num_update >= self.warmup_steps:
            return self.after_warmup(base, num_update)
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (base - self.warmup_begin_lr) * num_update / self.warmup_steps

    def after_warmup(self, base: float, num_update: int) -> float:
        """Return the rate of an update that is not in the warm-up."""
        raise NotImplementedError


class Factor(_WarmedUp, tag="factor", frozen=True, kw_only=True):
    """Multiply by `factor` after every `step` updates: when the number of the update exceeds a multiple of `step`.

    Args:
        step: updates between two drops.
        factor: more than 0, at most 1.
        stop_factor_lr: the rate is never dropped below this one.
    """

    ranges = _WarmedUp.ranges | {"step": POSITIVE_COUNT, "factor": _FACTOR, "stop_factor_lr": AT_LEAST_0}

    step: int
    factor: float = 1.0
    stop_factor_lr: float = 1e-8

    def after_warmup(self, base: float, num_update: int) -> float:
        """See `Schedule.rate`."""
        drops = max(0, num_update - 1) // self.step
        return max(base * self.factor**drops, min(base, self.stop_factor_lr))


class MultiFactor(_WarmedUp, tag="multifactor", frozen=True, kw_only=True):
    """Multiply by `factor` at each of `steps`: when the number of the update exceeds it.

    Args:
        steps: increasing whole numbers.
        factor: more than 0, at most 1.
    """

    ranges = _WarmedUp.ranges | {"factor": _FACTOR}

    steps: tuple[int, ...]
    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        steps: Any = self.steps
        counts = [to_int(step) for step in steps] if isinstance(steps, tuple | list) else []
        increasing = all(step < after for step, after in itertools.pairwise(counts))
        if not counts or not increasing or not all(map(POSITIVE_COUNT.has, counts)):
            raise wrong(self.owner, "steps", "a list of increasing whole numbers >= 1", steps)
        msgspec.structs.force_setattr(self, "steps", tuple(counts))

    def after_warmup(self, base: float, num_update: int) -> float:
        """See `Schedule.rate`."""
        return base * float(self.factor ** bisect.bisect_left(self.steps, num_update))


class StepDecay(_WarmedUp, tag="step", frozen=True, kw_only=True):
    """Multiply by `factor` at every `step` updates: update number `step` is the first with the lower rate.

    Args:
        step: updates between two drops.
        factor: more than 0, at most 1.
    """

    ranges = _WarmedUp.ranges | {"step": POSITIVE_COUNT, "factor": _FACTOR}

    step: int
    factor: float = 0.1

    def after_warmup(self, base: float, num_update: int) -> float:
        """See `Schedule.rate`."""
        return base * float(self.factor ** (num_update // self.step))


class _Decay(_WarmedUp, frozen=True, kw_only=True):
    """Base of the schedules that go from base to `final_lr` and stay there.

    Args:
        max_update: the number of the first update with the final rate; more than `warmup_steps`.
        final_lr: the last rate.
    """

    ranges = _WarmedUp.ranges | {"max_update": POSITIVE_COUNT, "final_lr": AT_LEAST_0}

    max_update: int
    final_lr: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_update <= self.warmup_steps:
            expected = f"more than warmup_steps ({self.warmup_steps})"
            raise wrong(self.owner, "max_update", expected, self.max_update)

    def after_warmup(self, base: float, num_update: int) -> float:
        """See `Schedule.rate`."""
        progress = min(1.0, (num_update - self.warmup_steps) / (self.max_update - self.warmup_steps))
        return self.final_lr + (base - self.final_lr) * self.left(progress)

    def left(self, progress: float) -> float:
        """Return which part of the way to the final rate is left, from 1 at progress 0 to 0 at progress 1."""
        raise NotImplementedError


class Poly(_Decay, tag="poly", frozen=True, kw_only=True):
    """Go down by a power of the part of the way that is left.

    Args:
        power: more than 0.
    """

    ranges = _Decay.ranges | {"power": MORE_THAN_0}

    power: float = 2.0

    def left(self, progress: float) -> float:
        """Return which part of the way is left."""
        return float((1.0 - progress) ** self.power)


class Cosine(_Decay, tag="cosine", frozen=True, kw_only=True):
    """Go down by half a wave of a cosine."""

    def left(self, progress: float) -> float:
        """Return which part of the way is left."""
        return _half_wave(progress)


class Linear(_Decay, tag="linear", frozen=True, kw_only=True):
    """Go down in a straight line."""

    def left(self, progress: float) -> float:
        """Return which part of the way is left."""
        return 1.0 - progress


class OneCycle(Schedule, tag="onecycle", frozen=True, kw_only=True):
    """Go up from a small rate to base, then down to a far smaller one. It is its own warm-up.

    Args:
        rise_updates: the number of the update with the highest rate, which is base.
        max_update: the number of the first update with the last rate; more than `rise_updates`.
        div_factor: base over the rate at n = 0.
        final_div_factor: the rate at n = 0 over the last one.
        anneal: "cosine" or "linear".
    """

    ranges = {
        "rise_updates": POSITIVE_COUNT,
        "max_update": POSITIVE_COUNT,
        "div_factor": MORE_THAN_0,
        "final_div_factor": MORE_THAN_0,
    }

    rise_updates: int
    max_update: int
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    anneal: str = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.owner, self, "anneal", ("cosine", "linear"))
        if self.max_update <= self.rise_updates:
            raise wrong(self.owner, "max_update", f"more than rise_updates ({self.rise_updates})", self.max_update)

    def rate(self, base: float, num_update: int) -> float:
        """See `Schedule.rate`."""
        first = base / self.div_factor
        if num_update <= self.rise_updates:
            return self._between(first, base, num_update / self.rise_updates)
        progress = (num_update - self.rise_updates) / (self.max_update - self.rise_updates)
        return self._between(base, first / self.final_div_factor, min(1.0, progress))

    def _between(self, start: float, end: float, progress: float) -> float:
        left = _half_wave(progress) if self.anneal == "cosine" else 1.0 - progress
        return end + (start - end) * left


def _half_wave(progress: float) -> float:
    return (1.0 + math.cos(math.pi * progress)) / 2.0


AnySchedule = Factor | MultiFactor | StepDecay | Poly | Cosine | Linear | OneCycle
"""What a rule's `schedule` is decoded as."""

SCHEDULES: Mapping[str, type[Schedule]] = MappingProxyType(
    {str(kind.__struct_config__.tag): kind for kind in (Cosine, Factor, Linear, MultiFactor, OneCycle, Poly, StepDecay)}
)
"""All schedules, by the name in their data."""


def make_schedule(data: Any) -> AnySchedule:
    """Validate a schedule that is given as data, such as {"name": "factor", "step": 100, "factor": 0.5}.

    Raises:
        OptimizerError: unknown name, unknown or missing parameter, wrong type or a value out of its range.
    """
    known = ", ".join(SCHEDULES)
    if not isinstance(data, Mapping):
        raise OptimizerError(
            f"a schedule must be a dict with a name, got {data!r}", expected=f"name: {known}", got=repr(data)
        )
    params = dict(data)
    name = params.pop("name", None)
    kind = SCHEDULES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise OptimizerError(f"unknown schedule {name!r}; known: {known}", expected=known, got=repr(name))
    owner = f"schedule {name!r}"
    check_names(owner, kind, params)
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in params:
            raise OptimizerError(f"{owner} needs {field.name!r}", expected=field.name, got=", ".join(params))
    made = kind(**params)
    assert isinstance(made, AnySchedule)
    return made
