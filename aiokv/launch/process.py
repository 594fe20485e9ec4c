"""One node as a process here: started in a group of its own, read line by line, ended with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any, cast

from aiokv.launch.output import LineSplitter, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

POLL_SECONDS = 0.02
KILL_SECONDS = 1.0
"""How long the system may take to remove killed processes."""

_STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}


class NodeProcess(asyncio.SubprocessProtocol):
    """A running node.

    Args:
        name: the node's name, handed to the callbacks.
        on_line: called with name, stream and a whole line.
        on_exit: called with name and exit code (negative: the signal that killed it) when the process has ended. What
            it started itself may live on until `end` is done, and lines may follow.
        ask: the signal that asks the process to end. Windows knows one only.
    """

    def __init__(
        self,
        name: str,
        on_line: Callable[[str, Stream, bytes], None],
        on_exit: Callable[[str, int], None],
        *,
        ask: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.name = name
        self.last_error_line = ""
        self.closed = asyncio.Event()
        """Set when the process has ended and its streams are read to their ends."""
        self._on_line = on_line
        self._on_exit = on_exit
        self._ask = ask
        self._splitters = {fd: LineSplitter() for fd in _STREAMS}
        self._exited = asyncio.Event()
        self._group_gone = False
        self._transport: asyncio.SubprocessTransport | None = None

    async def start(self, command: Sequence[str], environ: Mapping[str, str], told: bytes | None = None) -> None:
        """Start the process, once.

        Args:
            command: its command line.
            environ: its environment.
            told: what it reads from stdin, which then stays open as long as this process lives; None: nothing.

        Raises:
            OSError: the program can't be started.
        """
        transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: self,
            *command,
            stdin=subprocess.DEVNULL if told is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environ),
            **_own_group(),
        )
        if told is not None:
            stdin = cast("asyncio.WriteTransport", transport.get_pipe_transport(0))
            stdin.write(told)

    # --- called by the loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport."""
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        """Pass whole lines on."""
        self._lines(fd, self._splitters[fd].feed(cast("bytes", data)))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Pass on what the stream ended with."""
        if fd in self._splitters:
            self._lines(fd, self._splitters[fd].close())

    def process_exited(self) -> None:
        """Pass the exit code on."""
        self._exited.set()
        code = self._transport.get_returncode() if self._transport else None
        self._on_exit(self.name, 0 if code is None else code)

    def connection_lost(self, exc: Exception | None) -> None:
        """Say that nothing more will come."""
        self.closed.set()

    def _lines(self, fd: int, lines: list[bytes]) -> None:
        for line in lines:
            if fd == 2 and line.strip():  # noqa: PLR2004 - the number of stderr
                self.last_error_line = line.decode(errors="replace").strip()
            self._on_line(self.name, _STREAMS[fd], line)

    # --- the end ---

    @property
    def pid(self) -> int:
        """The process id, which is also the number of its group."""
        return self._transport.get_pid() if self._transport else 0

    async def end(self, *, settle: float, grace: float) -> bool:
        """End the process and all that it started: wait, ask, kill.

        Args:
            settle: seconds to wait before asking.
            grace: seconds to wait after asking, before killing.

        Returns:
            True when it ended without being killed.
        """
        if await self._ends_within(settle):
            return True
        self._signal(self._ask)
        if await self._ends_within(grace):
            return True
        self.kill()
        await self._ends_within(KILL_SECONDS)
        return False

    def kill(self) -> None:
        """Kill the process and all that it started."""
        self._signal(None)

    def close(self) -> None:
        """Let go of the process and its streams; kill what is left of it."""
        self.kill()
        if self._transport:
            self._transport.close()

    def _signal(self, ask: signal.Signals | None) -> None:
        # A group that is gone is never signalled again: the system may have given its number to somebody else.
        if not self._group_gone and self.pid:
            self._group_gone = not _signal_group(self.pid, ask)

    async def _ends_within(self, seconds: float) -> bool:
        deadline = asyncio.get_running_loop().time() + seconds
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), seconds)
        while not self._ended():
            if asyncio.get_running_loop().time() >= deadline:
                return False
            # The group's other processes are not our children: nobody tells us when they end.
            await asyncio.sleep(POLL_SECONDS)
        return True

    def _ended(self) -> bool:
        if self._exited.is_set() and not self._group_gone:
            self._group_gone = not _group_exists(self.pid)
        return self._exited.is_set() and self._group_gone


if sys.platform == "win32":

    def _own_group() -> dict[str, Any]:
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}

    def _signal_group(pid: int, ask: signal.Signals | None) -> bool:
        try:
            if ask is not None:
                os.kill(pid, signal.CTRL_BREAK_EVENT)
            else:
                subprocess.run(["taskkill", "/T", "/F", "/PID", str(pid)], capture_output=True, check=False)
        except OSError:
            return False
        return True

    def _group_exists(pid: int) -> bool:
        # Windows keeps no list of a group's processes; the tree is ended through its first process.
        return False

else:

    def _own_group() -> dict[str, Any]:
        # A session of its own is out of reach of the terminal's Ctrl-C: the launcher decides what that means.
        return {"start_new_session": True}

    def _signal_group(pid: int, ask: signal.Signals | None) -> bool:
        try:
            os.killpg(pid, ask or signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _group_exists(pid: int) -> bool:
        try:
            os.killpg(pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        import psutil  # noqa: PLC0415 - only when a node leaves processes behind

        # Dead processes count too until their new parent collects them, which in a container may be never.
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                    return True
        return False
