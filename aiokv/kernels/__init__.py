"""The arithmetic of updates, behind one wrapper: it checks the arguments, a backend computes.

    reference   NumPy: plain, always there, the oracle of the others
    cpu         Numba: one pass over memory, without the interpreter's lock    pip install "aiokv[cpu]"
    cuda        Numba on a CUDA device, or in Numba's simulator                pip install "aiokv[cuda]"

All give the same bits, except in the payload of a NaN: the same order of operations, each of them rounded. Values that
overflow become inf or nan, integers wrap around; nothing warns. Numba is imported only when a backend needs it.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Protocol

import numpy as np

from aiokv.errors import ConfigError, MissingExtraError, OptimizerError
from aiokv.kernels import checks, reference
from aiokv.kernels.rules import kernel_of, scalars_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokv.kernels.reference import Array, Scalar
    from aiokv.optim import Optimizer

__all__ = ["Backend", "get_backend"]

BACKENDS = ("auto", "cpu", "cuda", "reference")

_logger = logging.getLogger(__name__)


class _Kernels(Protocol):
    """What a backend's module has. Its arguments are checked and not empty."""

    def accumulate(self, target: Array, source: Array, /) -> None: ...

    def update(
        self, kernel: str, weight: Array, total: Array, state: Sequence[Array], scalars: tuple[Scalar, ...], /
    ) -> None: ...


class Backend:
    """Checked arithmetic on one-dimensional arrays in the host's memory. It keeps no state: any thread may call it.

    All arrays of a call have the same length, possibly 0, and are contiguous. An array that is written overlaps no
    other one.
    """

    def __init__(self, name: str, kernels: _Kernels) -> None:
        self._name = name
        self._kernels = kernels

    def __repr__(self) -> str:
        return f"Backend({self._name!r})"

    @property
    def name(self) -> str:
        """Who computes: "reference", "cpu" or "cuda"."""
        return self._name

    def accumulate(self, target: Array, source: Array) -> None:
        """Add `source` to `target`, elementwise, in their dtype: any of `aiokv.types.ITEM_SIZES`.

        Raises:
            SpecMismatchError: an array is not as the class says, or the dtypes differ.
        """
        checks.check_first("target", target)
        checks.check_like("source", source, target.size, target.dtype, "target")
        checks.check_written("target", target, [("source", source)])
        if target.size:
            self._kernels.accumulate(target, source)

    def new_state(self, rule: Optimizer, weight: Array) -> dict[str, Array]:
        """Return what the rule keeps between the updates of `weight`, as it is before the first one.

        The arrays have the weight's length and are as precise as the computation: float32 for float16.

        Raises:
            SpecMismatchError: the rule can't update arrays of that dtype.
            OptimizerError: no backend knows the rule.
        """
        kernel = kernel_of(rule)
        if kernel is None:
            return {}
        precision = checks.precision_for(weight.dtype)
        return {name: np.zeros(weight.size, precision) for name in kernel.state}

    def update(self, rule: Optimizer, weight: Array, total: Array, state: Mapping[str, Array], step: int) -> None:
        """Write over `total` what `weight` becomes by one step of `rule`, and bring `state` up to date in place.

        float32 and float64 are computed in their own precision; float16 is computed in float32 and rounded once, when
        the new weight is written. The rule's parameters are rounded to the precision of the computation first.

        Args:
            rule: what to do.
            weight: it stays as it is.
            total: the sum of the contributions, in the dtype of the weight; afterwards the new weight.
            state: from `new_state`, then used in every update of this weight.
            step: the number of the update with this state, from 1 on.

        Raises:
            SpecMismatchError: an array is not as the class says, or has another dtype than it should.
            OptimizerError: the state is another rule's, `step` is less than 1, no backend knows the rule, or a
                parameter is not in its range any longer when it is rounded.
        """
        kernel = kernel_of(rule)
        checks.check_first("weight", weight)
        checks.check_like("total", total, weight.size, weight.dtype, "weight")
        _check_names(rule, state, () if kernel is None else kernel.state)
        arrays = [("weight", weight), *state.items()]
        checks.check_written("total", total, arrays)
        if kernel is None:
            return
        precision = checks.precision_for(weight.dtype)
        for i, (name, array) in enumerate(arrays[1:], 1):
            checks.check_like(name, array, weight.size, precision, "weight")
            checks.check_written(name, array, arrays[:i])
        if step < 1:
            raise OptimizerError(f"updates are counted from 1, got step {step}", expected="at least 1", got=step)
        scalars = scalars_of(rule, precision, step)
        if weight.size:
            self._kernels.update(kernel.name, weight, total, [state[name] for name in kernel.state], scalars)

    def warm_up(self, rule: Optimizer, dtype: str) -> None:
        """Compile, or load from the cache, what sums and updates of that dtype need, so that the first ones don't wait.

        It may take seconds: call it in a thread while an event loop runs. Called again, it returns at once.

        Raises:
            SpecMismatchError: the rule can't update arrays of that dtype.
            OptimizerError: no backend knows the rule, or a parameter is out of range in the precision of that dtype.
        """
        weight, total = np.ones(1, dtype), np.ones(1, dtype)
        self.accumulate(total, weight)
        self.update(rule, weight, total, self.new_state(rule, weight), 1)


def get_backend(name: str = "auto") -> Backend:
    """Return the backend of that name.

    Args:
        name: "reference", "cpu", "cuda", or "auto": cpu where Numba can be imported, else reference.

    Raises:
        ConfigError: there is no such backend, or this machine lacks what it runs on.
        MissingExtraError: the backend's packages are not installed.
    """
    match name:
        case "auto":
            try:
                return get_backend("cpu")
            except MissingExtraError as error:
                _logger.info("backend 'auto' is 'reference' here: %s", error)
                return get_backend("reference")
        case "reference":
            return Backend(name, reference)
        case "cpu":
            return Backend(name, _import_cpu())
        case "cuda":
            return Backend(name, _import_cuda())
        case _:
            known = ", ".join(BACKENDS)
            raise ConfigError(f"unknown backend {name!r}; known: {known}", expected=known, got=name)


def _import_cpu() -> _Kernels:
    try:
        from aiokv.kernels import cpu  # noqa: PLC0415 - Numba is optional and slow to import
    except ImportError as error:
        raise MissingExtraError(_how_to_install("cpu", error)) from error
    return cpu


def _import_cuda() -> _Kernels:
    try:
        # Without this package `numba.cuda` would be what Numba itself brings, which is deprecated.
        importlib.import_module("numba_cuda")
        from aiokv.kernels import cuda  # noqa: PLC0415 - numba-cuda is optional and slow to import
    except ImportError as error:
        raise MissingExtraError(_how_to_install("cuda", error)) from error
    if missing := cuda.missing():
        raise ConfigError(
            f"backend 'cuda': the Python packages are there, but this machine lacks {' and '.join(missing)}. "
            "Install what is missing, or choose backend 'cpu'",
            expected="a CUDA driver, device and toolkit",
            got=missing,
        )
    return cuda


def _how_to_install(extra: str, error: ImportError) -> str:
    return (
        f'backend {extra!r} needs a package that can\'t be imported ({error}); install it: pip install "aiokv[{extra}]"'
    )


def _check_names(rule: Optimizer, state: Mapping[str, Array], names: Sequence[str]) -> None:
    """Raise OptimizerError unless the state has these names and no others."""
    if state.keys() != set(names):
        expected, got = (", ".join(sorted(each)) or "nothing" for each in (names, state))
        raise OptimizerError(
            f"{rule} keeps {expected}, but the state has {got}; make one with new_state", expected=expected, got=got
        )
