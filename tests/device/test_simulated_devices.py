"""Servers whose parameters are on devices, in processes of their own: Numba's simulator replaces CUDA when imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aiokv.errors import ConfigError, MissingExtraError
from aiokv.kernels import get_backend

MODULES = sorted(Path(__file__).with_name("simulated").glob("test_*.py"))


def run_tests(module: Path, *, simulated: bool) -> None:
    """Run a module in another process; fail with all its output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--timeout", "120", module],
        env=os.environ | {"DEVICE_TESTS": "1", "NUMBA_ENABLE_CUDASIM": str(int(simulated))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    # Where all tests were skipped the process would end well, too.
    if done.returncode != 0 or not re.search(r"^\d+ passed(, \d+ skipped)? in ", done.stdout, re.MULTILINE):
        pytest.fail(f"the tests of servers on devices, exit code {done.returncode}:\n{done.stdout}", pytrace=False)


@pytest.mark.timeout(330)
@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.stem))
def test_servers_in_the_simulator(module: Path) -> None:
    run_tests(module, simulated=True)


@pytest.mark.gpu
@pytest.mark.timeout(330)
@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.stem))
def test_servers_on_a_device(module: Path) -> None:
    try:
        get_backend("cuda")
    except (ConfigError, MissingExtraError) as error:
        pytest.skip(str(error))
    run_tests(module, simulated=False)
