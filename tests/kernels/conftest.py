"""The backends that a test of the arithmetic runs on.

The simulator replaces CUDA for a whole process, so it has its own: `test_cuda_simulator.py` starts one in which the
variable is set, and there the tests run on nothing else.
"""

from __future__ import annotations

import os

import pytest

from aiokv.errors import ConfigError, MissingExtraError
from aiokv.kernels import Backend, get_backend

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


@pytest.fixture(
    scope="session",
    params=["cuda"] if SIMULATED else ["reference", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param != "cuda" or SIMULATED:
        return get_backend(request.param)
    try:
        return get_backend("cuda")
    except (ConfigError, MissingExtraError) as error:
        pytest.skip(f"no CUDA device: {error}")
