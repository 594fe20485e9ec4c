"""`aiokv bench kernels`: all figures in the simulator, with arrays so small that they cost no time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from aiokv.bench.kernels import parse_kernels

pytest.importorskip("numba_cuda")


def bench_kernels(arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: the simulator replaces CUDA when it is imported."""
    # Simulated threads are slow when they are traced.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("AIOKV_", "COVERAGE_"))}
    return subprocess.run(
        [sys.executable, "-m", "aiokv", "bench", *arguments.split()],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_a_machine_without_a_device_is_told() -> None:
    ran = bench_kernels("kernels:0.001", NUMBA_DISABLE_CUDA="1", NUMBA_ENABLE_CUDASIM="0")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "this machine lacks the NVIDIA driver or a device" in ran.stderr


@pytest.mark.parametrize("as_json", [True, False])
def test_there_is_a_figure_for_every_kernel(as_json: bool) -> None:
    ran = bench_kernels("kernels:0.0002 --rounds 1" + " --json" * as_json, NUMBA_ENABLE_CUDASIM="1")
    assert ran.returncode == 0, ran.stderr
    if not as_json:
        assert "adam, a model" in ran.stdout
        return
    [line] = ran.stdout.splitlines()
    figures = json.loads(line)["kernels"]
    names = [figure["name"] for figure in figures]
    assert names[0] == "copy on the device"
    assert {"sum of 8 x float32", "adam, a model", "encode 2bit"} <= set(names)
    assert all(set(figure) == {"name", "gbps", "us", "of_copy"} for figure in figures)
    assert all(figure["gbps"] > 0 for figure in figures)


def test_arrays_have_256_mib_unless_told_otherwise() -> None:
    assert (parse_kernels("kernels"), parse_kernels("kernels:0.5"), parse_kernels("limits")) == (256.0, 0.5, None)
