"""Ends a job's nodes when their launcher is killed: a process of its own, which is told who they are.

It also deletes what the launcher would have deleted then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time

GRACE = 2.0
"""Seconds that nodes have to end when they are asked to."""
POLL_SECONDS = 0.02


class Watch:
    """Has a process that outlives this one, and ends what is left of the groups of processes that it was told of."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process. On Windows, where there are no groups, there is none."""
        if sys.platform == "win32":
            return
        pipe, quiet = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", __file__),
            stdin=pipe,
            stdout=quiet,
            stderr=quiet,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Let a group end with this process."""
        self._tell(f"+{group}")

    def remove(self, group: int) -> None:
        """Forget a group: it is gone, and the system may give its number to another one."""
        self._tell(f"-{group}")

    def delete(self, folder: str) -> None:
        """Let a folder be deleted when this process and all groups have ended."""
        self._tell(f"/{folder}")

    def _tell(self, line: str) -> None:
        process = self._process
        if process is not None and process.stdin is not None and process.returncode is None:
            process.stdin.write(os.fsencode(f"{line}\n"))

    async def close(self) -> None:
        """End the process; what it still knows of ends too, and folders are deleted."""
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            await process.wait()


def main() -> None:
    """Read the numbers of groups and the folders until nobody is left who writes them; end these, and delete those."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: dict[int, None] = {}
    folders: list[str] = []
    for line in sys.stdin.buffer:
        said = os.fsdecode(line[1:].rstrip(b"\n"))
        match line[:1]:
            case b"+":
                groups[int(said)] = None
            case b"-":
                groups.pop(int(said), None)
            case _:
                folders.append(said)
    _end(groups)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _end(groups: dict[int, None]) -> None:
    until = time.monotonic() + GRACE
    asked = [group for group in groups if _signal(group, signal.SIGTERM)]
    while asked and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        asked = [group for group in asked if _signal(group, 0)]
    for group in asked:
        _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    """Send a signal to a group; return False if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    main()
