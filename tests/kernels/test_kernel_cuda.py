"""The arithmetic on CUDA, in processes of their own: Numba's simulator replaces CUDA when it is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aiokv.errors import ConfigError, MissingExtraError
from aiokv.kernels import get_backend

FOLDER = Path(__file__).parent

# In processes that take about as long as each other.
MODULES = {
    "arithmetic": [FOLDER / f"test_kernel_{name}.py" for name in ("arithmetic", "golden", "norms", "sums")],
    "devices": sorted(FOLDER.glob("test_device_*.py")),
}


def run_tests(modules: list[Path], *, simulated: bool) -> None:
    """Run modules in another process; fail with all its output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--timeout", "300", *modules],
        env=os.environ | {"KERNEL_TESTS_BACKENDS": "cuda", "NUMBA_ENABLE_CUDASIM": str(int(simulated))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    # Where all tests were skipped the process would end well, too.
    if done.returncode != 0 or not re.search(r"^\d+ passed(, \d+ skipped)? in ", done.stdout, re.MULTILINE):
        pytest.fail(f"the tests of the arithmetic on CUDA, exit code {done.returncode}:\n{done.stdout}", pytrace=False)


@pytest.mark.timeout(630)
@pytest.mark.parametrize("modules", MODULES.values(), ids=MODULES)
def test_the_arithmetic_in_the_simulator(modules: list[Path]) -> None:
    run_tests(modules, simulated=True)


@pytest.mark.gpu
@pytest.mark.timeout(630)
@pytest.mark.parametrize("modules", MODULES.values(), ids=MODULES)
def test_the_arithmetic_on_a_device(modules: list[Path]) -> None:
    try:
        get_backend("cuda")
    except (ConfigError, MissingExtraError) as error:
        pytest.skip(str(error))
    run_tests(modules, simulated=False)
