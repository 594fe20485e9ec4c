"""The arithmetic on a CUDA device, compiled by numba-cuda; runs in Numba's simulator too (NUMBA_ENABLE_CUDASIM=1).

Arrays lie in the host's memory: each call copies them to the device, and the results back. Every bit is as in
`reference`, except in the payload of a NaN.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import cuda
from numba.core import config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiokv.kernels.reference import Array, Scalar

SIMULATED: bool = bool(config.ENABLE_CUDASIM)

# A kernel strides over its grid, so that any launch covers any length. Numba warns of fewer than 128 blocks, and idle
# ones cost next to nothing; but in the simulator every thread is a thread of Python.
THREADS, MIN_BLOCKS, MAX_BLOCKS = (32, 1, 2) if SIMULATED else (256, 128, 2048)


def missing() -> list[str]:
    """Say what is needed to run on a device and is not there; nothing in the simulator."""
    if SIMULATED:
        return []
    found = []
    if error := cuda.cuda_error():  # type: ignore[no-untyped-call]
        found.append(f"the NVIDIA driver or a device ({' '.join(str(error).split())})")
    if error := missing_toolkit():
        found.append(f"the CUDA toolkit ({error})")
    return found


def missing_toolkit() -> str | None:
    """Say which library of the CUDA toolkit Numba can't load, None when all are there."""
    from numba.cuda.cuda_paths import get_cuda_paths  # noqa: PLC0415 - the simulator has no such module

    try:
        get_cuda_paths()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return " ".join(str(error).split())
    return None


@cuda.jit
def accumulate_kernel(target: Array, source: Array) -> None:
    """Add elementwise."""
    for i in range(cuda.grid(1), target.size, cuda.gridsize(1)):
        target[i] += source[i]


@cuda.jit
def accumulate_half_kernel(target: Array, source: Array) -> None:
    """Add float16: a float32 has more than twice its digits, so that rounding twice gives what rounding once would."""
    for i in range(cuda.grid(1), target.size, cuda.gridsize(1)):
        target[i] = np.float32(target[i]) + np.float32(source[i])


class Operations(NamedTuple):
    """What the kernels compute with in one precision: each operation rounds its result once."""

    kind: type[Scalar]
    multiply: Callable[[Any, Any], Any]
    add: Callable[[Any, Any], Any]
    divide: Callable[[Any, Any], Any]
    sqrt: Callable[[Any], Any]


def _make_sgd_kernels(operations: Operations) -> tuple[Any, Any]:
    """Return the kernels without and with momentum."""
    kind, multiply, add, _, _ = operations

    @cuda.jit
    def sgd_kernel(weight: Array, total: Array, scalars: tuple[Scalar, ...]) -> None:
        learning_rate, wd, rescale_grad = scalars
        for i in range(cuda.grid(1), weight.size, cuda.gridsize(1)):
            w = kind(weight[i])
            g = add(multiply(rescale_grad, kind(total[i])), multiply(wd, w))
            total[i] = add(w, -multiply(learning_rate, g))

    @cuda.jit
    def sgd_with_momentum_kernel(
        weight: Array, total: Array, momentum_state: Array, scalars: tuple[Scalar, ...]
    ) -> None:
        learning_rate, momentum, wd, rescale_grad = scalars
        for i in range(cuda.grid(1), weight.size, cuda.gridsize(1)):
            w = kind(weight[i])
            g = add(multiply(rescale_grad, kind(total[i])), multiply(wd, w))
            m = add(multiply(momentum, momentum_state[i]), -multiply(learning_rate, g))
            momentum_state[i] = m
            total[i] = add(w, m)

    return sgd_kernel, sgd_with_momentum_kernel


def _make_adam_kernel(operations: Operations) -> Any:
    kind, multiply, add, divide, sqrt = operations

    @cuda.jit
    def adam_kernel(weight: Array, total: Array, mean: Array, variance: Array, scalars: tuple[Scalar, ...]) -> None:
        rate, beta1, rest1, beta2, rest2, epsilon, wd, rescale_grad = scalars
        for i in range(cuda.grid(1), weight.size, cuda.gridsize(1)):
            w = kind(weight[i])
            g = add(multiply(rescale_grad, kind(total[i])), multiply(wd, w))
            m = add(multiply(beta1, mean[i]), multiply(rest1, g))
            v = add(multiply(beta2, variance[i]), multiply(rest2, multiply(g, g)))
            mean[i] = m
            variance[i] = v
            total[i] = add(w, -divide(multiply(rate, m), add(sqrt(v), epsilon)))

    return adam_kernel


# NVVM fuses a product and a sum into one operation that rounds once, and numba-cuda has no option against it.
# Operations with explicit rounding are never fused. Python fuses nothing, and the simulator is Python.
if SIMULATED:
    SINGLE = Operations(np.float32, operator.mul, operator.add, operator.truediv, np.sqrt)
    DOUBLE = SINGLE._replace(kind=np.float64)
else:
    from numba.cuda import libdevice as lib

    SINGLE = Operations(np.float32, lib.fmul_rn, lib.fadd_rn, lib.fdiv_rn, lib.fsqrt_rn)
    DOUBLE = Operations(np.float64, lib.dmul_rn, lib.dadd_rn, lib.ddiv_rn, lib.dsqrt_rn)


def _make_kernels(operations: Operations) -> Mapping[str, Any]:
    sgd, sgd_with_momentum = _make_sgd_kernels(operations)
    return {"adam": _make_adam_kernel(operations), "sgd": sgd, "sgd_with_momentum": sgd_with_momentum}


KERNELS: Mapping[str, Mapping[str, Any]] = {"float32": _make_kernels(SINGLE), "float64": _make_kernels(DOUBLE)}
"""By the precision of the computation, then by name."""


def _geometry(size: int) -> tuple[int, int]:
    """Return blocks and threads per block for an array of that length."""
    return max(MIN_BLOCKS, min(MAX_BLOCKS, -(-size // THREADS))), THREADS


def accumulate(target: Array, source: Array) -> None:
    """Add `source` to `target`."""
    kernel = accumulate_half_kernel if target.dtype == np.float16 else accumulate_kernel
    total = cuda.to_device(target)
    kernel[_geometry(target.size)](total, cuda.to_device(source))
    total.copy_to_host(target)


def update(kernel: str, weight: Array, total: Array, state: Sequence[Array], scalars: tuple[Scalar, ...]) -> None:
    """Write the new weight over `total`, computed in the dtype of the state and the scalars."""
    new = cuda.to_device(total)
    kept = [cuda.to_device(array) for array in state]
    function = KERNELS[scalars[0].dtype.name][kernel]
    function[_geometry(weight.size)](cuda.to_device(weight), new, *kept, scalars)
    new.copy_to_host(total)
    for array, on_device in zip(state, kept, strict=True):
        on_device.copy_to_host(array)
