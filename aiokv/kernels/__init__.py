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
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import ConfigError, MissingExtraError, OptimizerError, SpecMismatchError
from aiokv.kernels import reference
from aiokv.types import ITEM_SIZES

if TYPE_CHECKING:
    from aiokv.optim import SGD

__all__ = ["Backend", "get_backend"]

Array = NDArray[Any]

BACKENDS = ("auto", "cpu", "cuda", "reference")

_logger = logging.getLogger(__name__)

_DTYPES = frozenset(np.dtype(name) for name in ITEM_SIZES)
"""In native byte order: `>f4` is not among them on a little-endian machine."""

_COMPUTED_IN: dict[np.dtype[Any], type[np.floating[Any]]] = {
    np.dtype(np.float16): np.float32,
    np.dtype(np.float32): np.float32,
    np.dtype(np.float64): np.float64,
}


class _Kernels(Protocol):
    """What a backend's module has. Its arguments are checked and not empty."""

    def accumulate(self, target: Array, source: Array, /) -> None: ...

    def sgd(
        self,
        weight: Array,
        gradient: Array,
        momentum_state: Array | None,
        out: Array,
        learning_rate: np.floating[Any],
        momentum: np.floating[Any],
        wd: np.floating[Any],
        rescale_grad: np.floating[Any],
        /,
    ) -> None: ...


class Backend:
    """Checked arithmetic on one-dimensional arrays in the host's memory. It keeps no state: any thread may call it.

    All arrays of a call have the same length, possibly 0, and the same dtype, and are contiguous. An array that is
    written overlaps no other one.
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
            SpecMismatchError: an array is not as the class says.
        """
        _check({"target": target, "source": source}, written=["target"])
        if target.size:
            self._kernels.accumulate(target, source)

    def sgd(self, weight: Array, gradient: Array, momentum_state: Array | None, out: Array, rule: SGD) -> None:
        """Write to `out` what `weight` becomes by one step of `rule`, and update `momentum_state` in place.

        float32 and float64 are computed in their own precision; float16 is computed in float32, and each result is
        rounded once, when it is written. The rule's parameters are rounded to the precision of the computation first.

        Args:
            weight: float16, float32 or float64; it stays as it is.
            gradient: the sum of the contributions.
            momentum_state: zeros before the first step. None only when `rule.momentum` is 0: w - learning_rate * g.
            out: where the new weight goes.
            rule: the parameters.

        Raises:
            SpecMismatchError: an array is not as the class says, or not of floats.
            OptimizerError: the rule needs a momentum state, or a parameter is too large for the arrays' precision.
        """
        arrays = {"weight": weight, "gradient": gradient, "out": out}
        written = ["out"]
        if momentum_state is not None:
            arrays["momentum_state"] = momentum_state
            written.append("momentum_state")
        elif rule.momentum:
            raise OptimizerError(
                f"sgd with momentum {rule.momentum} needs a momentum state, got None; pass zeros before the first step",
                expected="array",
                got="None",
            )
        _check(arrays, written=written)
        scalars = _scalars(rule, weight.dtype)
        if weight.size:
            self._kernels.sgd(weight, gradient, momentum_state, out, *scalars)


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


def _check(arrays: dict[str, Array], *, written: list[str]) -> None:
    """Raise SpecMismatchError unless the arrays can be given to a kernel."""
    model_name, model = next(iter(arrays.items()))
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise _mismatch(name, "a NumPy array", type(array).__name__)
        if array.ndim != 1 or not array.flags.c_contiguous:
            got = f"shape {array.shape}, strides {array.strides}"
            raise _mismatch(name, "one-dimensional and C-contiguous; pass a.reshape(-1)", got)
        if array.dtype not in _DTYPES:
            raise _mismatch(name, f"one of {', '.join(ITEM_SIZES)}, in native byte order", f"dtype {array.dtype.str}")
        if array.dtype != model.dtype or array.size != model.size:
            raise _mismatch(name, f"like {model_name}, {_spec(model)}", _spec(array))
    for name in written:
        if not arrays[name].flags.writeable:
            raise _mismatch(name, "writable", "a read-only array")
        for other, array in arrays.items():
            if other != name and np.may_share_memory(arrays[name], array):
                raise _mismatch(name, f"apart from {other} in memory", "arrays that overlap")


def _scalars(rule: SGD, dtype: np.dtype[Any]) -> tuple[np.floating[Any], ...]:
    """Return the rule's parameters in the precision in which arrays of that dtype are computed."""
    kind = _COMPUTED_IN.get(dtype)
    if kind is None:
        raise _mismatch("weight", f"one of {', '.join(map(str, _COMPUTED_IN))} for sgd", f"dtype {dtype}")
    largest = float(np.finfo(kind).max)
    params = {name: getattr(rule, name) for name in ("learning_rate", "momentum", "wd", "rescale_grad")}
    for name, value in params.items():
        if abs(value) > largest:
            raise OptimizerError(
                f"sgd on {dtype} arrays: {name} must be at most {largest}, got {value}", expected=largest, got=value
            )
    return tuple(kind(value) for value in params.values())


def _spec(array: Array) -> str:
    return f"{array.dtype}[{array.size}]"


def _mismatch(name: str, expected: str, got: str) -> SpecMismatchError:
    return SpecMismatchError(f"{name} must be {expected}; got {got}", expected=expected, got=got)
