"""The arithmetic in one pass over memory: compiled by Numba, without the interpreter's lock.

Without `fastmath` LLVM neither reorders nor fuses operations, so that every bit is as in `reference`. Numba has no
half-precision numbers on the CPU: to the kernels float16 is uint16, which `_number` and `_element` turn to numbers and
back with the processor's own instructions. A processor that has none leaves float16 to `reference`.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import config
from numba.extending import intrinsic

from aiokv.kernels import reference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiokv.kernels.reference import Array, Scalar


def _can_cache() -> bool:
    """Tell whether there is a folder where compiled code can be kept for the next process."""
    try:
        njit(cache=True)(_can_cache)
    except RuntimeError:
        # Numba says so when no folder can be written, as in a container with a read-only file system.
        return False
    return True


def _has_half_precision() -> bool:
    """Tell whether the code that Numba makes may use instructions that convert float16."""
    if platform.machine().lower() in {"aarch64", "arm64"}:
        return True
    # Numba can be told to compile for another processor than this one.
    features: str | None = config.CPU_FEATURES
    return "+f16c" in (binding.get_host_cpu_features().flatten() if features is None else features)


_CACHE = _can_cache()
HALF_PRECISION = _has_half_precision()


def _intrinsic(describe: Callable[..., Any]) -> Any:
    """Make a function for compiled code of one that gives its signature and what emits its instructions."""
    return intrinsic(describe)


@_intrinsic
def _number(_context: Any, element: Any) -> Any:
    """Return an element as a number to compute with: float16, given as uint16, becomes float32."""
    if element != types.uint16:
        return element(element), lambda _context, _builder, _signature, args: args[0]

    def widen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(element), widen


@_intrinsic
def _element(_context: Any, number: Any, like: Any) -> Any:
    """Return a number as an element of the same type as `like`: the inverse of `_number`, rounded to nearest even."""
    if like != types.uint16:
        return number(number, like), lambda _context, _builder, _signature, args: args[0]

    def narrow(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return like(number, like), narrow


@njit(nogil=True, cache=_CACHE, error_model="numpy")
def _accumulate(target: Array, source: Array) -> None:
    for i in range(target.size):
        target[i] += source[i]


@njit(nogil=True, cache=_CACHE, error_model="numpy")
def _accumulate_half(target: Array, source: Array) -> None:
    # A float32 has more than twice the digits of a float16, so that rounding twice gives what rounding once would.
    for i in range(target.size):
        target[i] = _element(_number(target[i]) + _number(source[i]), target[i])


@njit(nogil=True, cache=_CACHE, error_model="numpy")
def _sgd(weight: Array, total: Array, scalars: tuple[Scalar, ...]) -> None:
    learning_rate, wd, rescale_grad = scalars
    for i in range(weight.size):
        w = _number(weight[i])
        g = rescale_grad * _number(total[i]) + wd * w
        total[i] = _element(w - learning_rate * g, weight[i])


@njit(nogil=True, cache=_CACHE, error_model="numpy")
def _sgd_with_momentum(weight: Array, total: Array, momentum_state: Array, scalars: tuple[Scalar, ...]) -> None:
    learning_rate, momentum, wd, rescale_grad = scalars
    for i in range(weight.size):
        w = _number(weight[i])
        g = rescale_grad * _number(total[i]) + wd * w
        m = momentum * momentum_state[i] - learning_rate * g
        momentum_state[i] = m
        total[i] = _element(w + m, weight[i])


@njit(nogil=True, cache=_CACHE, error_model="numpy")
def _adam(weight: Array, total: Array, mean: Array, variance: Array, scalars: tuple[Scalar, ...]) -> None:
    rate, beta1, rest1, beta2, rest2, epsilon, wd, rescale_grad = scalars
    for i in range(weight.size):
        w = _number(weight[i])
        g = rescale_grad * _number(total[i]) + wd * w
        m = beta1 * mean[i] + rest1 * g
        v = beta2 * variance[i] + rest2 * (g * g)
        mean[i] = m
        variance[i] = v
        total[i] = _element(w - rate * m / (np.sqrt(v) + epsilon), weight[i])


KERNELS: Mapping[str, Callable[..., None]] = {"adam": _adam, "sgd": _sgd, "sgd_with_momentum": _sgd_with_momentum}


def accumulate(target: Array, source: Array) -> None:
    """Add `source` to `target`."""
    if target.dtype != np.float16:
        _accumulate(target, source)
    elif HALF_PRECISION:
        _accumulate_half(target.view(np.uint16), source.view(np.uint16))
    else:
        reference.accumulate(target, source)


def update(kernel: str, weight: Array, total: Array, state: Sequence[Array], scalars: tuple[Scalar, ...]) -> None:
    """Write the new weight over `total`, computed in the dtype of the state and the scalars."""
    if weight.dtype != np.float16:
        KERNELS[kernel](weight, total, *state, scalars)
    elif HALF_PRECISION:
        KERNELS[kernel](weight.view(np.uint16), total.view(np.uint16), *state, scalars)
    else:
        reference.update(kernel, weight, total, state, scalars)
