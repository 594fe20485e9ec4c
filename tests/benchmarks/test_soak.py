"""The soak program runs, short: many small pushes beside connections that only live, and nothing waits at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def test_nothing_waits_after_many_pushes_beside_idle_connections() -> None:
    command = [sys.executable, str(PROGRAM), "--minutes", "0.1", "--window", "2", "--pause", "0.01"]
    environ = os.environ | {"AIOKV_BACKEND": "reference"}
    done = subprocess.run(
        [*command, "--idle", "40", "--busy", "8"], env=environ, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert (report["idle"], report["busy"], report["waiting"], report["errors"]) == (40, 8, 0, [])
    assert report["pushes"] == sum(window["pushes"] for window in report["windows"]) > 0
