"""What all update rules have in common: their parameters, and the numbers of one step. No arrays here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from aiokv.errors import OptimizerError
from aiokv.optim.checks import (
    AT_LEAST_0,
    COUNT,
    FINITE,
    NONE_OR_MORE_THAN_0,
    Range,
    check_flag,
    check_multipliers,
    check_numbers,
    to_float32,
    wrong,
)
from aiokv.optim.schedules import AnySchedule, Schedule, make_schedule

if TYPE_CHECKING:
    from aiokv.types import Key

PRECISIONS: Mapping[str, str] = MappingProxyType(
    {"bfloat16": "float32", "float16": "float32", "float32": "float32", "float64": "float64"}
)
"""In what precision keys of a dtype are updated, by the rules that need floats."""

Norms = Sequence[tuple[float, ...]]
"""For each phase before an update, sums of squares over all elements of a tensor; see `aiokv.optim.layerwise`."""


class Step(msgspec.Struct, frozen=True):
    """What one update of one key is made with, beside the rule's own parameters.

    Attributes:
        count: the number of the update among those of this key with this state, from 1 on: the t of Adam.
        learning_rate: after schedule and multiplier.
        wd: weight decay after its multiplier.
        seed: of the random numbers, for rules that draw some.
    """

    count: int
    learning_rate: float = 1.0
    wd: float = 0.0
    seed: int = 0


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name", dict=True):
    """Base of all update rules. A rule checks its parameters however it is made.

    Attributes:
        arrays: the names of the arrays that are kept between updates; see `keeps`.
        norm_counts: for each phase before an update, of how many arrays the sums of squares are needed; empty for rules
            that treat each element by itself.
        reads_weight: the update uses the weight that the worker had read when it computed its gradient.
        by_row: the rule keeps one number for each row.
        draws_noise: the update uses random numbers.
        divides_by_rate: at a learning rate of 0 the formulas say nothing; the update changes nothing then.
        decays_gradient: wd times the weight is added to the gradient. The other rules have a use of their own for wd.
    """

    arrays: ClassVar[tuple[str, ...]] = ()
    norm_counts: ClassVar[tuple[int, ...]] = ()
    reads_weight: ClassVar[bool] = False
    by_row: ClassVar[bool] = False
    draws_noise: ClassVar[bool] = False
    divides_by_rate: ClassVar[bool] = False
    decays_gradient: ClassVar[bool] = False
    ranges: ClassVar[Mapping[str, Range]] = {}
    flags: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        """What the rule is called."""
        return str(self.__struct_config__.tag)

    @property
    def kernel(self) -> str:
        """The name of the arithmetic, which may depend on the parameters."""
        return self.name

    @property
    def norm_phases(self) -> int:
        """How often sums of squares of whole tensors have to be gathered before an update can be made."""
        return len(self.norm_counts)

    @property
    def compensation(self) -> float:
        """The factor with which each contribution is compensated for what was changed since it was computed.

        It is for contributions of which several make an update; 0: they are taken as they are.
        """
        return 0.0

    @property
    def by_key(self) -> bool:
        """Whether keys are updated one by one also where they lie together: what is done depends on the key."""
        return bool(self.norm_counts or self.by_row or self.draws_noise)

    @property
    def keeps(self) -> tuple[str, ...]:
        """The names of the arrays that are kept between updates, which may depend on the parameters."""
        return self.arrays

    @functools.cached_property
    def derived(self) -> dict[Any, Any]:
        """What was computed from the parameters and may be used again, such as a plan of the arithmetic."""
        return {}

    def check_dtype(self, key: Key, dtype: str) -> None:
        """Refuse a key whose values the rule can't update.

        Raises:
            OptimizerError: the rule is for floats and the key has another dtype, or a parameter is not in its range
                any longer when it is rounded to the precision in which the key is updated.
        """

    def check_precision(self, precision: str) -> None:
        """Refuse to compute in a precision, float32 or float64, that can't hold the parameters.

        Raises:
            OptimizerError: a parameter is not in its range any longer when it is rounded.
        """

    def step_for(self, key: Key, *, count: int, num_update: int) -> Step:
        """Return the numbers of one update.

        Args:
            key: whose.
            count: the number of the update among those of this key, from 1 on.
            num_update: what the schedule sees: the highest count of all keys, from 1 on, this update included.

        Raises:
            OptimizerError: a number is less than 1.
        """
        _check_count("count", count)
        _check_count("num_update", num_update)
        return Step(count)

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """Return what the arithmetic takes beside arrays, by the names that it has there.

        Args:
            step: from `step_for`.
            rounded: rounds to the precision of the computation.
            norms: the sums of squares of the phases before, for a rule with norm phases.
        """
        del step, rounded, norms
        return {}

    def __post_init__(self) -> None:
        check_numbers(f"optimizer {self.name!r}", self, self.ranges)
        for flag in self.flags:
            check_flag(f"optimizer {self.name!r}", self, flag)


class FloatRule(Optimizer, frozen=True, kw_only=True):
    """Base of the rules that compute with floats.

    The gradient is the sum of the contributions times `rescale_grad`, each element then limited to `clip_gradient` in
    size. Every parameter that is a number is finite; an int becomes a float.

    Args:
        rescale_grad: what the sum is multiplied by, usually one over the number of samples in it.
        clip_gradient: the largest size of an element of the gradient, more than 0; None for no limit.
        multi_precision: keep a float32 copy of float16 and bfloat16 weights, update that, and hand out its rounded
            values. Without it a step that is too small for the low precision is lost.
    """

    ranges = {"rescale_grad": FINITE, "clip_gradient": NONE_OR_MORE_THAN_0}
    flags = (*Optimizer.flags, "multi_precision")

    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    multi_precision: bool = False

    def check_dtype(self, key: Key, dtype: str) -> None:
        """Refuse a key that does not hold floats, or is updated in a precision that can't hold the parameters."""
        if dtype not in PRECISIONS:
            raise OptimizerError(
                f"optimizer {self.name!r} updates floats, but key {key!r} has {dtype}: make it floats, or policy sum",
                key=key,
                expected="float",
                got=dtype,
            )
        self.check_precision(PRECISIONS[dtype])

    def check_precision(self, precision: str) -> None:
        """Refuse a precision that can't hold the parameters."""
        if precision != "float64" and self._too_fine is not None:
            param, expected = self._too_fine
            raise wrong(f"optimizer {self.name!r}", param, expected, getattr(self, param))

    @functools.cached_property
    def _too_fine(self) -> tuple[str, str] | None:
        """The first parameter that float32 can't hold, and what it would have to be."""
        for param, allowed in self.ranges.items():
            value = getattr(self, param)
            if value is not None and not allowed.whole and not allowed.has(to_float32(value)):
                return param, f"{allowed.expected} when it is rounded to float32"
        return None


class LearningRule(FloatRule, frozen=True, kw_only=True):
    """Base of the rules that have a learning rate.

    The rate of an update is `learning_rate`, or what `schedule` makes of it, times the key's number in `lr_mult`.

    Args:
        learning_rate: at least 0.
        wd: weight decay, at least 0.
        lr_mult: for some keys, what their rate is multiplied by, at least 0; 1 for all others.
        wd_mult: the same for wd.
        schedule: how the rate changes with the number of updates; a record of `aiokv.optim.schedules` or its data.
        begin_num_update: what is added to the number of updates that the schedule sees, as when earlier ones were made
            by another job. The t of Adam and its like counts the updates of the state that is there, and no others.
    """

    ranges = FloatRule.ranges | {"learning_rate": AT_LEAST_0, "wd": AT_LEAST_0, "begin_num_update": COUNT}

    learning_rate: float = 0.01
    wd: float = 0.0
    lr_mult: Any = ()
    wd_mult: Any = ()
    schedule: AnySchedule | None = None
    begin_num_update: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = f"optimizer {self.name!r}"
        check_multipliers(owner, self, "lr_mult")
        check_multipliers(owner, self, "wd_mult")
        if self.schedule is not None and not isinstance(self.schedule, Schedule):
            msgspec.structs.force_setattr(self, "schedule", make_schedule(self.schedule))

    @property
    def by_key(self) -> bool:
        """See `Optimizer.by_key`: multipliers are for single keys."""
        return bool(self.lr_mult or self.wd_mult) or super().by_key

    @functools.cached_property
    def _multipliers(self) -> tuple[dict[Key, float], dict[Key, float]]:
        return dict(self.lr_mult), dict(self.wd_mult)

    def step_for(self, key: Key, *, count: int, num_update: int) -> Step:
        """Return the numbers of one update. See `Optimizer.step_for`."""
        _check_count("count", count)
        lr_mult, wd_mult = self._multipliers
        rate = self.learning_rate_at(num_update) * lr_mult.get(key, 1.0)
        return Step(count, rate, self.wd * wd_mult.get(key, 1.0))

    def learning_rate_at(self, num_update: int) -> float:
        """Return the rate of update `num_update`, from 1 on, before any multiplier."""
        _check_count("num_update", num_update)
        if self.schedule is None:
            return self.learning_rate
        return self.schedule.rate(self.learning_rate, self.begin_num_update + num_update)


def _check_count(name: str, count: int) -> None:
    if count < 1:
        raise OptimizerError(f"updates are counted from 1, got {name} {count}", expected="at least 1", got=count)
