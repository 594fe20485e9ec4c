"""The simulator says what a real cluster does: mean step times within 7 %, mean staleness within 5 %."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "real_vs_simulated.py"


def run(*arguments: str, timeout: float = 50) -> dict[str, Any]:
    command = [sys.executable, str(PROGRAM), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    assert not done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_both_clusters_take_the_same_steps_under_each_policy() -> None:
    document = run("--workers", "2", "--steps", "4", "--shift", "0.002", "--scale", "0.002")
    assert document["constants"]["message"] > 0
    rows = document["results"]
    assert [row["policy"] for row in rows] == ["asp", "bsp", "ssp:2", "backup:1", "k_async:2", "k_batch_async:2"]
    for row in rows:
        assert min(row["real"]["step"], row["simulated"]["step"]) > 0.002


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_six_policies_with_4_and_8_workers_are_as_simulated() -> None:
    rows = run("--workers", "4", "8", "--steps", "60", timeout=280)["results"]
    assert len(rows) == 12
    assert [row for row in rows if abs(row["step_error"]) > 0.07 or abs(row["staleness_error"]) > 0.05] == []
