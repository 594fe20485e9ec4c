"""`aiokv bench kernels`: all figures in the simulator, with arrays so small that they cost no time."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from aiokv.bench.kernels import kernels_table, parse_kernels

pytest.importorskip("numba_cuda")


def bench_kernels(arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: the simulator replaces CUDA when it is imported."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AIOKV_")}
    return subprocess.run(
        [sys.executable, "-m", "aiokv", "bench", *arguments.split()],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_machine_without_a_device_is_told() -> None:
    ran = bench_kernels("kernels:0.001", NUMBA_DISABLE_CUDA="1", NUMBA_ENABLE_CUDASIM="0")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "this machine lacks the NVIDIA driver or a device" in ran.stderr


def test_there_is_a_figure_for_every_kernel() -> None:
    ran = bench_kernels("kernels:0.0002 --rounds 1 --json", NUMBA_ENABLE_CUDASIM="1")
    assert ran.returncode == 0, ran.stderr
    [line] = ran.stdout.splitlines()
    figures = json.loads(line)["kernels"]
    names = [figure["name"] for figure in figures]
    assert names[0] == "copy on the device"
    assert {"sum of 8 x float32", "adam, a model", "encode 2bit"} <= set(names)
    assert all(set(figure) == {"name", "gbps", "us", "of_copy"} for figure in figures)
    assert all(figure["gbps"] > 0 for figure in figures)


def test_people_get_a_table() -> None:
    figure = {"name": "adam, a model", "gbps": 1234.5, "us": 6.78, "of_copy": 0.912}
    console = Console(file=io.StringIO(), width=100)
    console.print(kernels_table([figure], 256.0))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "kernels on arrays of 67,108,864 elements" in shown
    assert re.search(r"adam, a model\D+1234\.5\D+6\.8\D+91%", shown)


def test_arrays_have_256_mib_unless_told_otherwise() -> None:
    assert (parse_kernels("kernels"), parse_kernels("kernels:0.5"), parse_kernels("limits")) == (256.0, 0.5, None)
