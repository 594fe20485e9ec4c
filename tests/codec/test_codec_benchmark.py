"""The benchmark of the codecs runs, and says how small each payload is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "codec.py"


def test_the_benchmark_prints_a_row_for_each_backend() -> None:
    command = [sys.executable, str(BENCHMARK), "--sizes", "4096", "--codecs", "2bit", "fp8", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    rows = [(row["codec"], row["backend"], row["ratio"]) for row in json.loads(done.stdout)]
    fp8 = round(4096 / 1028, 2)
    assert rows == [("2bit", "reference", 16.0), ("2bit", "cpu", 16.0), ("fp8", "reference", fp8), ("fp8", "cpu", fp8)]
