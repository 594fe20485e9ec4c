"""The backends that a test of the arithmetic runs on.

The simulator replaces CUDA for a whole process, and a device keeps threads and memory: `test_kernel_cuda.py` starts a
process in which a variable is set, and there the tests run on CUDA and on nothing else.
"""

from __future__ import annotations

import os

import pytest

from aiokv.kernels import Backend, get_backend

BACKENDS = os.environ.get("KERNEL_TESTS_BACKENDS", "reference cpu").split()


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return get_backend(request.param)
