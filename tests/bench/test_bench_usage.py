"""What the system says about other processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from aiokv.bench.usage import cpu_seconds, peak_rss_mib


def test_cpu_time_is_that_of_the_process() -> None:
    times = os.times()
    assert cpu_seconds(os.getpid()) == pytest.approx(times.user + times.system, abs=0.5)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep no peak that everybody may read")
def test_peak_memory_stays_when_the_memory_is_given_back() -> None:
    code = "x = bytes(range(256)) * (64 << 12); del x; print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        peak = peak_rss_mib(process.pid)
        process.communicate(b"\n")
    assert 64 < peak < 128


@pytest.mark.parametrize("figure", [cpu_seconds, peak_rss_mib])
def test_process_that_is_gone_has_no_figures(figure: type) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    with pytest.raises(ProcessLookupError, match=f"process {process.pid} has ended"):
        figure(process.pid)
