"""The CUDA kernels in Numba's simulator, in a process of its own: the simulator replaces CUDA when Numba is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ARITHMETIC = Path(__file__).with_name("test_kernel_arithmetic.py")


@pytest.mark.timeout(300)
def test_the_arithmetic_in_the_simulator() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--no-cov", str(ARITHMETIC)],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"in the simulator:\n{done.stdout}", pytrace=False)
    # Tests that were all skipped would end well, too.
    assert re.search(r"^\d+ passed in ", done.stdout, re.MULTILINE), done.stdout
