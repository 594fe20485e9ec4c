"""What it costs to import the package."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_package_needs_neither_torch_nor_numba_nor_the_network() -> None:
    script = "import sys, aiokv.data; print({'torch', 'numba', 'asyncio', 'aiokv.net'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.strip() == "set()"
