"""The arithmetic on a CUDA device, compiled by numba-cuda; runs in Numba's simulator too (NUMBA_ENABLE_CUDASIM=1).

Arrays lie in the host's memory: each call copies them to the device, and the results back. Every bit is as in
`reference`, except in the payload of a NaN.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda
from numba.core import config

if TYPE_CHECKING:
    from aiokv.kernels.reference import Array, Scalar

Binary = Callable[[Any, Any], Any]

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


def _make_sgd_kernels(kind: type[Scalar], multiply: Binary, add: Binary) -> tuple[Any, Any]:
    """Return the kernels without and with momentum that compute in `kind`."""

    @cuda.jit
    def sgd_kernel(
        weight: Array, gradient: Array, out: Array, learning_rate: Scalar, wd: Scalar, rescale_grad: Scalar
    ) -> None:
        for i in range(cuda.grid(1), weight.size, cuda.gridsize(1)):
            w = kind(weight[i])
            g = add(multiply(rescale_grad, kind(gradient[i])), multiply(wd, w))
            out[i] = add(w, -multiply(learning_rate, g))

    @cuda.jit
    def sgd_with_momentum_kernel(
        weight: Array,
        gradient: Array,
        momentum_state: Array,
        out: Array,
        learning_rate: Scalar,
        momentum: Scalar,
        wd: Scalar,
        rescale_grad: Scalar,
    ) -> None:
        for i in range(cuda.grid(1), weight.size, cuda.gridsize(1)):
            w = kind(weight[i])
            g = add(multiply(rescale_grad, kind(gradient[i])), multiply(wd, w))
            m = add(multiply(momentum, kind(momentum_state[i])), -multiply(learning_rate, g))
            momentum_state[i] = m
            out[i] = add(w, m)

    return sgd_kernel, sgd_with_momentum_kernel


# NVVM fuses a product and a sum into one operation that rounds once, and numba-cuda has no option against it.
# Operations with explicit rounding are never fused. Python fuses nothing, and the simulator is Python.
if SIMULATED:
    SGD_KERNELS = {
        "float32": _make_sgd_kernels(np.float32, operator.mul, operator.add),
        "float64": _make_sgd_kernels(np.float64, operator.mul, operator.add),
    }
else:
    from numba.cuda import libdevice

    SGD_KERNELS = {
        "float32": _make_sgd_kernels(np.float32, libdevice.fmul_rn, libdevice.fadd_rn),
        "float64": _make_sgd_kernels(np.float64, libdevice.dmul_rn, libdevice.dadd_rn),
    }


def _geometry(size: int) -> tuple[int, int]:
    """Return blocks and threads per block for an array of that length."""
    return max(MIN_BLOCKS, min(MAX_BLOCKS, -(-size // THREADS))), THREADS


def accumulate(target: Array, source: Array) -> None:
    """Add `source` to `target`."""
    kernel = accumulate_half_kernel if target.dtype == np.float16 else accumulate_kernel
    total = cuda.to_device(target)
    kernel[_geometry(target.size)](total, cuda.to_device(source))
    total.copy_to_host(target)


def sgd(
    weight: Array,
    gradient: Array,
    momentum_state: Array | None,
    out: Array,
    learning_rate: Scalar,
    momentum: Scalar,
    wd: Scalar,
    rescale_grad: Scalar,
) -> None:
    """Write the new weight to `out`, computed in the dtype of the scalars."""
    without, with_momentum = SGD_KERNELS[learning_rate.dtype.name]
    geometry = _geometry(weight.size)
    w, g = cuda.to_device(weight), cuda.to_device(gradient)
    new = cuda.device_array(weight.size, weight.dtype)
    if momentum_state is None:
        without[geometry](w, g, new, learning_rate, wd, rescale_grad)
    else:
        m = cuda.to_device(momentum_state)
        with_momentum[geometry](w, g, m, new, learning_rate, momentum, wd, rescale_grad)
        m.copy_to_host(momentum_state)
    new.copy_to_host(out)
