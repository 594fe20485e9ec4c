"""The script of the page about the simulator does what the text around it says."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.pages import DOCS, snippets

if TYPE_CHECKING:
    from pathlib import Path


def test_the_sweep_from_python_compares_all_combinations(tmp_path: Path) -> None:
    [script] = [snippet for snippet in snippets(DOCS / "simulator.md") if "Sweep" in snippet]
    (tmp_path / "compare.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "-W", "error", "compare.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=110)
    assert done.stderr == ""
    steps = dict(re.findall(r"^(.*): ([\d.]+) s ± [\d.]+$", done.stdout, re.MULTILINE))
    settings = [
        f"policy={policy}, network.latency={latency}" for policy in ("bsp", "backup:1") for latency in (0.001, 0.1)
    ]
    assert list(steps) == settings
    bsp, slow_bsp, backup, _ = map(float, steps.values())
    # A round waits twice for the network; the backup worker stands in for the slow one.
    assert slow_bsp > bsp + 0.15 > backup
