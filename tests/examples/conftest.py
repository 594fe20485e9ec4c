"""How the examples are run: as a user would, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

# The examples are scripts, not a package that gets installed; tests of their functions import them from the checkout.
sys.path.append(str(ROOT))

Completed = subprocess.CompletedProcess[str]


def run(*command: str) -> Completed:
    """Run a command of this Python and return its exit code and output."""
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )


@pytest.fixture
def run_example() -> Callable[..., Completed]:
    """Run `python examples/NAME ARGUMENTS...`."""
    return lambda name, *arguments: run(str(EXAMPLES / name), *arguments)


@pytest.fixture
def run_example_on_cluster() -> Callable[..., Completed]:
    """Run `aiokv run -s 2 -w 2 -- python examples/NAME ARGUMENTS...`."""
    cluster = ("-m", "aiokv", "run", "-s", "2", "-w", "2", "--", sys.executable)
    return lambda name, *arguments: run(*cluster, str(EXAMPLES / name), *arguments)
