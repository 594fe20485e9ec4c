"""The comparison with the peers: the same work for all, and nothing left out in silence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aiokv.bench.workloads import parse_workload

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "compare.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)


@pytest.mark.parametrize("workload", ["large:1", "small", "resnet50", "latency:4"])
def test_the_peers_move_the_tensors_that_aiokv_moves(workload: str) -> None:
    script = f"import common, json; print(json.dumps(common.shapes_of({workload!r})))"
    done = subprocess.run([sys.executable, "-c", script], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    shapes = [tuple(shape) for shape in json.loads(done.stdout)]
    assert shapes == [tuple(shape) for shape in parse_workload(workload).shapes.values()]


def test_a_missing_peer_is_said_with_the_command_that_makes_it(tmp_path: Path) -> None:
    arguments = ["--peer", "gloo", "--workload", "large:1", "--rounds", "2", "--repeats", "1"]
    done = run(*arguments, "--folder", str(tmp_path))
    assert done.returncode == 1
    assert "setup_peers.py" in done.stdout + done.stderr


def test_an_unknown_peer_or_workload_lists_the_known_ones() -> None:
    assert "mxnet" in run("--peer", "nope").stderr
    assert "resnet50" in run("--peer", "limits", "--workload", "nope").stderr
