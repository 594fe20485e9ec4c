"""What other processes of this machine have used: CPU time and memory, read from the system."""

from __future__ import annotations

from pathlib import Path

import psutil

_MIB = 1 << 20


def cpu_seconds(pid: int) -> float:
    """Return the user and system CPU-seconds that a process has used so far, in steps of about 10 ms.

    Raises:
        ProcessLookupError: there is no such process.
    """
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        raise _gone(pid) from None
    return float(times.user + times.system)


def peak_rss_mib(pid: int) -> float:
    """Return the most memory that a process has had resident so far, in MiB; what it has now where no peak is kept.

    Raises:
        ProcessLookupError: there is no such process.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(kib) / 1024
    except (OSError, StopIteration):
        # Another system than Linux, or a process that has ended.
        pass
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.NoSuchProcess:
        raise _gone(pid) from None
    return float(getattr(memory, "peak_wset", memory.rss)) / _MIB


def _gone(pid: int) -> ProcessLookupError:
    return ProcessLookupError(f"process {pid} has ended")
