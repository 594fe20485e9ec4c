"""Runs a module and writes what cProfile saw: `python -m aiokv.bench.profiled FOLDER MODULE ARGUMENTS...`."""

from __future__ import annotations

import cProfile
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Run the module with the rest of the arguments; the profile is named after the node."""
    folder, module, *rest = arguments
    sys.argv = [module, *rest]
    profile = cProfile.Profile()
    try:
        profile.runcall(runpy.run_module, module, run_name="__main__", alter_sys=True)
    finally:
        profile.dump_stats(Path(folder) / f"{os.environ.get('AIOKV_NAME') or os.getpid()}.pstats")


if __name__ == "__main__":
    main(sys.argv[1:])
