"""Checked arithmetic: what a backend's kernels are called through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aiokv.errors import OptimizerError, SumOverflowError
from aiokv.kernels import checks, noise, reference, rows
from aiokv.kernels.plan import COMPENSATION, Plan, plan_update, prepare
from aiokv.optim import Assign, OwnRule, Step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokv.kernels.reference import Array, Scalar
    from aiokv.optim import Norms, Optimizer


class Kernels(Protocol):
    """What a backend's module has. Its arguments are checked and not empty.

    Where a weight has a `master`, a copy in the precision of the computation, that is read instead of the weight and
    updated as well. `out` may be `total`.
    """

    def accumulate(self, target: Array, source: Array, /) -> None:
        """Add floats to others of the same dtype, or low precisions to float32."""
        ...

    def add_integers(self, target: Array, source: Array, /) -> bool:
        """Add integers; return False, with the target as it was, when a sum is out of range."""
        ...

    def update(
        self,
        plan: Plan,
        weight: Array,
        total: Array,
        out: Array,
        state: Sequence[Array],
        inputs: Sequence[Array],
        numbers: Sequence[Scalar],
        master: Array | None,
        /,
    ) -> None:
        """Write the new weight to `out`, computed in the dtype of the numbers, and bring the state up to date."""
        ...

    def norms(
        self,
        plan: Plan,
        weight: Array,
        total: Array,
        state: Sequence[Array],
        inputs: Sequence[Array],
        numbers: Sequence[Scalar],
        lanes: Sequence[Array],
        /,
    ) -> None:
        """Add the squares of what a plan computes to lanes, one array of float64 for each result."""
        ...


class Backend:
    """Checked arithmetic on one-dimensional arrays in the host's memory. It keeps no state: any thread may call it.

    All arrays of a call have the same length, possibly 0, and are contiguous. An array that is written overlaps no
    other one.

    They need not be whole tensors. A rule without `norm_phases` treats each element, or row, by itself, so a chunk of a
    tensor is updated as the tensor would be. A lazy update, of the rows alone that got a gradient, is one of arrays
    into which those rows of the weight and of the state were gathered, and which are scattered back.
    """

    def __init__(self, name: str, kernels: Kernels) -> None:
        self._name = name
        self._kernels = kernels

    def __repr__(self) -> str:
        return f"Backend({self._name!r})"

    @property
    def name(self) -> str:
        """Who computes: "reference", "cpu" or "cuda"."""
        return self._name

    def accumulate(self, target: Array, source: Array) -> None:
        """Add `source` to `target`, elementwise.

        Both have the same dtype, any of `aiokv.types.ITEM_SIZES`, or the target is float32 and the source float16 or
        bfloat16: a long sum of those is exact, or nearly so, only in a higher precision.

        Raises:
            SpecMismatchError: an array is not as the class says, or the dtypes don't go together.
            SumOverflowError: a sum of integers is out of range; the target is as it was.
        """
        checks.check_first("target", target)
        checks.check_memory("source", source)
        wide = checks.is_low(source.dtype) and target.dtype == checks.FLOAT32
        checks.check_like("source", source, target.size, source.dtype if wide else target.dtype, "target")
        checks.check_written("target", target, [("source", source)])
        if not target.size:
            return
        if target.dtype.kind not in "iu":
            self._kernels.accumulate(target, source)
        elif not self._kernels.add_integers(target, source):
            raise SumOverflowError(f"a sum of {target.dtype} is out of range; nothing was added")

    def compensate(self, gradient: Array, weight: Array, read: Array, lamda: float) -> None:
        """Make of a gradient that was computed where the weight was `read` about that where it is now, in place.

        That is g + lamda * g^2 * (weight - read), elementwise, in the gradient's precision (Zheng et al., 2017).

        Args:
            gradient: in the dtype of the weight, or in float32 for a lower precision.
            weight: as it is now.
            read: as it was, in the dtype of the weight.
            lamda: how much of the difference is compensated.

        Raises:
            SpecMismatchError: an array is not as the class says, or has another dtype than it should.
        """
        checks.check_first("weight", weight)
        checks.check_like("read", read, weight.size, weight.dtype, "weight")
        precision = checks.precision_for(weight.dtype)
        checks.check_like("gradient", gradient, weight.size, precision, "weight")
        checks.check_written("gradient", gradient, [("weight", weight), ("read", read)])
        if weight.size:
            numbers = (precision.type(lamda),)
            self._kernels.update(COMPENSATION, weight, gradient, gradient, (), (read,), numbers, None)

    def new_state(self, rule: Optimizer, weight: Array, *, row_size: int = 1) -> dict[str, Array]:
        """Return what the rule keeps between the updates of `weight`, as it is before the first one.

        The arrays have the weight's length, or an element for each row, and are as precise as the computation: float32
        for float16 and bfloat16. With `multi_precision`, "master" is the weight in that precision.

        Args:
            rule: whose state.
            weight: as it is before the first update.
            row_size: elements per row, for a rule that is `by_row`; the weight has whole rows.

        Raises:
            SpecMismatchError: the rule can't update arrays of that dtype, or they are not whole rows.
            OptimizerError: no backend knows the rule.
        """
        if not isinstance(rule, Assign | OwnRule):
            plan_update(rule)
            checks.precision_for(weight.dtype)
        layout = checks.state_layout(rule, weight, row_size)
        return {
            name: weight.astype(dtype) if name == "master" else np.zeros(size, dtype)
            for name, (dtype, size) in layout.items()
        }

    def update(
        self,
        rule: Optimizer,
        weight: Array,
        total: Array,
        state: Mapping[str, Array],
        step: Step,
        *,
        out: Array | None = None,
        norms: Norms = (),
        read: Array | None = None,
        offset: int = 0,
        row_size: int = 1,
    ) -> None:
        """Write what `weight` becomes by one step of `rule`, and bring `state` up to date in place.

        float32 and float64 are computed in their own precision; float16 and bfloat16 are computed in float32 and
        rounded once, when the new weight is written. The rule's parameters are rounded to the precision of the
        computation first.

        Args:
            rule: what to do.
            weight: it stays as it is.
            total: the sum of the contributions, in the dtype of the weight, or in float32 for a lower precision.
            state: from `new_state`, then used in every update of this weight.
            step: from the rule's `step_for`.
            out: where the new weight goes, in the dtype of the weight; over `total` when it is not given.
            norms: what all calls of `norms` gave, a tuple for each phase, added over the chunks of the tensor.
            read: the weight that the worker had read before it made its contribution, for a rule that `reads_weight`;
                the weight itself when it is not given.
            offset: where in its tensor the first element lies, for a rule that `draws_noise`.
            row_size: elements per row, for a rule that is `by_row`.

        Raises:
            SpecMismatchError: an array is not as the class says, or has another dtype than it should.
            OptimizerError: the state is another rule's, norms are missing, the count is less than 1, no backend knows
                the rule, or a parameter is not in its range any longer when it is rounded.
        """
        _check_arguments(rule, weight, total, state, out, row_size)
        checks.check_norms(rule, norms, rule.norm_phases)
        if out is None:
            out = total
        if isinstance(rule, Assign):
            if out is not total:
                out[...] = total
            return
        precision = checks.precision_for(weight.dtype)
        _check_count(step)
        if rule.divides_by_rate and not precision.type(step.learning_rate):
            out[...] = weight
            return
        if isinstance(rule, OwnRule):
            _update_own(rule, weight, total, out, state, step)
            return
        prepared = prepare(rule, "update", precision)
        plan, numbers = prepared.plan, prepared.numbers(step, tuple(norms))
        if not weight.size:
            return
        inputs = []
        if rule.reads_weight:
            inputs.append(_read_weight(weight, state, read))
        if rule.draws_noise:
            inputs.append(noise.draw(step.seed, offset, weight.size, precision))
        if rule.by_row:
            gradient = _gradient(rule, state.get("master", weight), total, step, precision)
            inputs.append(rows.add_row_means(state["history"], gradient, row_size))
        kept = [state[name] for name in plan.state]
        self._kernels.update(plan, weight, total, out, kept, inputs, numbers, state.get("master"))

    def norms(
        self,
        rule: Optimizer,
        phase: int,
        weight: Array,
        total: Array,
        state: Mapping[str, Array],
        step: Step,
        gathered: Norms = (),
    ) -> tuple[float, ...]:
        """Return the sums of squares that a phase before an update needs of these elements.

        All are as in `update`, and nothing is changed. Sums over the chunks of a tensor are added in the order of the
        chunks; they differ with where a tensor is cut, as rounded sums do. Squares are added in float64, in an order
        that does not depend on the backend: that of `reference.LANES`, then the lanes in theirs.

        Args:
            rule: it has more than `phase` norm phases.
            phase: 0, then 1, and so on.
            weight: the chunk.
            total: the sum of its contributions.
            state: what the rule keeps for it.
            step: of the update to be made.
            gathered: the sums over all chunks of each phase before, a tuple for each.

        Raises:
            SpecMismatchError: an array is not as it should be.
            OptimizerError: as in `update`, or the rule has no such phase.
        """
        if not 0 <= phase < rule.norm_phases:
            raise OptimizerError(
                f"optimizer {rule.name!r} has {rule.norm_phases} norm phases, there is no phase {phase}",
                expected=rule.norm_phases,
                got=phase,
            )
        checks.check_first("weight", weight)
        checks.check_total(total, weight)
        checks.check_state(rule, weight, state, 1)
        checks.check_norms(rule, gathered, phase)
        _check_count(step)
        prepared = prepare(rule, str(phase), checks.precision_for(weight.dtype))
        plan, numbers = prepared.plan, prepared.numbers(step, tuple(gathered))
        lanes = [np.zeros(reference.LANES) for _ in range(rule.norm_counts[phase])]
        if weight.size:
            kept = [state[name] for name in plan.state]
            self._kernels.norms(plan, state.get("master", weight), total, kept, (), numbers, lanes)
        with np.errstate(all="ignore"):
            return tuple([float(np.add.accumulate(lane)[-1]) for lane in lanes])

    def warm_up(self, rule: Optimizer, dtype: str) -> None:
        """Compile, or load from the cache, what sums and updates of that dtype need, so that the first ones don't wait.

        It may take seconds: call it in a thread while an event loop runs. Called again, it returns at once.

        Raises:
            SpecMismatchError: the rule can't update arrays of that dtype.
            OptimizerError: no backend knows the rule, or a parameter is out of range in the precision of that dtype.
        """
        weight, step = np.ones(1, dtype), Step(1, 0.5)
        for summed in dict.fromkeys((weight.dtype, checks.FLOAT32 if checks.is_low(weight.dtype) else weight.dtype)):
            total = np.ones(1, summed)
            state = self.new_state(rule, weight)
            self.accumulate(total, weight)
            norms: list[tuple[float, ...]] = []
            for phase in range(rule.norm_phases):
                norms.append(self.norms(rule, phase, weight, total, state, step, norms))
            out = None if summed == weight.dtype else np.ones(1, dtype)
            self.update(rule, weight, total, state, step, out=out, norms=norms)
        if rule.compensation:
            self.compensate(np.ones(1, checks.precision_for(weight.dtype)), weight, weight.copy(), rule.compensation)


def _check_arguments(
    rule: Optimizer, weight: Array, total: Array, state: Mapping[str, Array], out: Array | None, row_size: int
) -> None:
    checks.check_first("weight", weight)
    checks.check_total(total, weight)
    name, written = ("total", total) if out is None else ("out", out)
    others = [("weight", weight), *state.items()]
    if out is not None:
        others.append(("total", total))
    checks.check_like(name, written, weight.size, weight.dtype, "weight")
    checks.check_written(name, written, others)
    checks.check_state(rule, weight, state, row_size)


def _check_count(step: Step) -> None:
    if step.count < 1:
        raise OptimizerError(f"updates are counted from 1, got {step.count}", expected="at least 1", got=step.count)


def _read_weight(weight: Array, state: Mapping[str, Array], read: Array | None) -> Array:
    if read is None:
        return state.get("master", weight)
    checks.check_like("read", read, weight.size, weight.dtype, "weight")
    return read


def _gradient(rule: Optimizer, weight: Array, total: Array, step: Step, precision: np.dtype[Any]) -> Array:
    """Return the gradient as a rule's arithmetic gets it."""
    prepared = prepare(rule, "gradient", precision)
    return reference.gradient(prepared.plan, weight, total, prepared.numbers(step, ()))


def _update_own(rule: OwnRule, weight: Array, total: Array, out: Array, state: Mapping[str, Array], step: Step) -> None:
    """Update by a rule of a user's own, which NumPy computes on every backend."""
    precision = checks.precision_for(weight.dtype)
    kept: dict[str, Any] = dict(state)
    current = kept.pop("master", weight).astype(precision)
    gradient = _gradient(rule, current, total, step, precision)
    with np.errstate(all="ignore"):
        new = rule.compute(current, gradient, kept, step)
        if not isinstance(new, np.ndarray) or new.shape != current.shape or new.dtype != precision:
            got = f"{new.dtype}{list(new.shape)}" if isinstance(new, np.ndarray) else type(new).__name__
            expected = f"{precision}[{current.size}]"
            raise OptimizerError(
                f"optimizer {rule.name!r} must compute {expected}, got {got}", expected=expected, got=got
            )
        if "master" in state:
            state["master"][...] = new
        out[...] = new
