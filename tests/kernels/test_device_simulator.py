"""Blocks of threads in Numba's simulator. Only collected where CUDA is, or the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import cuda

from aiokv.kernels.cuda.memory import SIMULATED
from aiokv.kernels.cuda.streaming import make_kernel

pytestmark = pytest.mark.skipif(not SIMULATED, reason="a device has blocks of its own")

THREADS, BLOCKS = 5, 2


def launch(body: str) -> Any:
    """Return what a kernel has written, float64[blocks, threads]; `mine` is a thread's number in its block."""
    lines = ["def kernel(out):", "    mine, block = cuda.threadIdx.x, cuda.blockIdx.x"]
    lines += ["    shared = cuda.shared.array(5, wide)", *[f"    {line}" for line in body.splitlines()]]
    out = cuda.to_device(np.zeros((BLOCKS, THREADS)))
    make_kernel("\n".join(lines), "float64", {})[BLOCKS, THREADS, 0](out)
    return out.copy_to_host()


def test_a_thread_sees_what_others_have_written_before_they_met() -> None:
    body = """\
shared[mine] = mine + 10 * block
for step in range(3):
    cuda.syncthreads()
    found = shared[(mine + 1) % 5]
    cuda.syncthreads()
    shared[mine] = found
out[block, mine] = shared[mine]"""
    expected = [[(mine + 3) % 5 + 10 * block for mine in range(THREADS)] for block in range(BLOCKS)]
    assert launch(body).tolist() == expected


def test_nobody_waits_for_threads_that_have_ended() -> None:
    body = """\
if mine < 3:
    return
cuda.syncthreads()
out[block, mine] = 1"""
    assert launch(body).tolist() == [[0, 0, 0, 1, 1]] * BLOCKS


def test_an_error_of_one_thread_is_that_of_the_launch_and_says_which_it_was() -> None:
    body = """\
if mine == 2:
    out[9, 9] = 1
cuda.syncthreads()"""
    with pytest.raises(IndexError, match=r"tid=\[2, 0, 0\] ctaid=\[0, 0, 0\]"):
        launch(body)
    # The next launch finds everything as it was.
    assert launch("out[block, mine] = 1").tolist() == [[1] * THREADS] * BLOCKS
