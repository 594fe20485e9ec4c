"""The arithmetic on a CUDA device, compiled by numba-cuda; also runs in Numba's simulator (NUMBA_ENABLE_CUDASIM=1).

The arrays lie in host memory: every call copies them to the device and its results back. Imported only by
`aiokv.kernels.get_backend`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda
from numba.core import config
from numpy.typing import NDArray

if not config.ENABLE_CUDASIM:
    from numba.cuda import libdevice

Array = NDArray[Any]
Scalar = np.floating[Any]
Binary = Callable[[Any, Any], Any]

# A kernel strides over the grid, so any launch covers any length. Numba warns below 128 blocks; idle ones cost next to
# nothing on a device. In the simulator each thread of a block is a thread of Python.
THREADS, MIN_BLOCKS, MAX_BLOCKS = (32, 1, 2) if config.ENABLE_CUDASIM else (256, 128, 2048)


def missing() -> str | None:
    """Say what this process lacks to run on a device: the driver, a device or the toolkit; None when it has all."""
    ...


@cuda.jit
def accumulate_kernel(target: Array, source: Array) -> None:
    """Add elementwise."""
    for i in range(cuda.grid(1), target.size, cuda.gridsize(1)):
        target[i] += source[i]


def make_sgd_kernels(kind: type[Scalar], multiply: Binary, add: Binary):
    @cuda.jit
    def plain(weight: Array, gradient: Array, out: Array, learning_rate: Scalar, wd: Scalar, rescale_grad: Scalar) -> None:
        for i in range(cuda.grid(1), weight.size, cuda.gridsize(1)):
            w = kind(weight[i])
            g = add(multiply(rescale_grad, kind(gradient[i])), multiply(wd, w))
            out[i] = add(w, -multiply(learning_rate, g))

    @cuda.jit
    def with_momentum(weight, gradient, state, out, learning_rate, momentum, wd, rescale_grad) -> None:
        for i in range(cuda.grid(1), weight.size, cuda.gridsize(1)):
            w = kind(weight[i])
            g = add(multiply(rescale_grad, kind(gradient[i])), multiply(wd, w))
            m = add(multiply(momentum, kind(state[i])), -multiply(learning_rate, g))
            state[i] = m
            out[i] = add(w, m)

    return plain, with_momentum
if config.ENABLE_CUDASIM:
    SGD = {k: make_sgd_kernels(k, operator.mul, operator.add) for k in (np.float32, np.float64)}
else:
    SGD = {
      np.float32: make_sgd_kernels(np.float32, libdevice.fmul_rn, libdevice.fadd_rn),
      np.float64: make_sgd_kernels(np.float64, libdevice.dmul_rn, libdevice.dadd_rn),
    }
