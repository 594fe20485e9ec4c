"""What the machine can do without aiokv, in the units of the benchmark: the sums, the loopback, a bare server."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np

from aiokv.bench.peer import exchange
from aiokv.bench.sockets import PATIENCE, connect, receive_all
from aiokv.bench.workloads import MIB
from aiokv.errors import AiokvError, ConfigError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from types import TracebackType

DEFAULT_MIB = 64.0
DEFAULT_ROUNDS = 15

_GB = 1e9
_MAX_MIB = 4096
_WARMUP = 3
_ADD_BYTES = 256 << 10
"""Two arrays of this size fit into the second-level cache of any recent core."""
_ADD_PASSES = 200
_DUPLEX_CHUNK = 512 << 10
_LATENCY_BYTES = 4
_LATENCY_ROUNDS_PER_ROUND = 200


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured; each is the median of the rounds. GB/s over a socket count bytes sent and received."""

    add_gbps: float
    pingpong_gbps: float
    duplex_gbps: float
    latency_us: float
    bare_server_gbps_1w: float
    bare_server_gbps_2w: float
    mib: float
    rounds: int

    def to_json(self) -> str:
        """Write one line of JSON."""
        return msgspec.json.encode(self).decode()


LABELS = {
    "add_gbps": "add in place, in cache: GB/s of the array that is added",
    "pingpong_gbps": "sockets, one way after the other: GB/s sent + received",
    "duplex_gbps": "sockets, both ways at once: GB/s sent + received",
    "latency_us": "sockets, round trip of 4 bytes: us",
    "bare_server_gbps_1w": "bare server of 1 worker: GB/s sent + received",
    "bare_server_gbps_2w": "bare server of 2 workers, which adds: GB/s sent + received, each",
}
"""What each figure is."""


def parse_limits(text: str) -> float | None:
    """Return the MiB of `limits` or `limits:MIB`; None when the text names something else.

    Raises:
        ConfigError: what follows the colon is not a size.
    """
    name, colon, number = text.partition(":")
    if name != "limits":
        return None
    if not colon:
        return DEFAULT_MIB
    try:
        mib = float(number)
    except ValueError:
        mib = math.nan
    if not 0 < mib <= _MAX_MIB:
        expected = f"a number of MiB up to {_MAX_MIB}"
        raise ConfigError(f"{text!r} needs {expected} behind the colon, got {number!r}", expected=expected, got=number)
    return mib


def measure_limits(
    *, mib: float = DEFAULT_MIB, rounds: int = DEFAULT_ROUNDS, on_progress: Callable[[str], None] = lambda name: None
) -> Limits:
    """Measure all of them, one after the other.

    Args:
        mib: size of the messages in MiB.
        rounds: how often each is timed.
        on_progress: called with the label of what is measured next.

    Raises:
        AiokvError: a process that was started for it failed, or did not answer.
    """
    nbytes = max(int(mib * MIB) // 4, 1) * 4
    moved = 2 * nbytes / _GB
    measurements: dict[str, Callable[[], float]] = {
        "add_gbps": lambda: _ADD_PASSES * _ADD_BYTES / _GB / _add_seconds(rounds),
        "pingpong_gbps": lambda: moved / _ping_pong_seconds(nbytes, rounds),
        "duplex_gbps": lambda: moved / _duplex_seconds(nbytes, rounds),
        "latency_us": lambda: 1e6 * _ping_pong_seconds(_LATENCY_BYTES, rounds * _LATENCY_ROUNDS_PER_ROUND),
        "bare_server_gbps_1w": lambda: moved / _bare_server_seconds(1, nbytes, rounds),
        "bare_server_gbps_2w": lambda: moved / _bare_server_seconds(2, nbytes, rounds),
    }
    figures = {}
    for name, measure in measurements.items():
        on_progress(LABELS[name])
        try:
            figures[name] = measure()
        except (OSError, EOFError) as error:
            raise AiokvError(f"could not measure {name}: {error}") from error
    return Limits(**figures, mib=nbytes / MIB, rounds=rounds)


# --- the measurements ---


def _median(operation: Callable[[], object], rounds: int) -> float:
    """Return the median of the seconds that an operation takes, when it has warmed up."""
    times = []
    for number in range(_WARMUP + rounds):
        start = time.perf_counter()
        operation()
        if number >= _WARMUP:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _add_seconds(rounds: int) -> float:
    total, array = np.zeros(_ADD_BYTES // 4, np.float32), np.ones(_ADD_BYTES // 4, np.float32)

    def add() -> None:
        for _ in range(_ADD_PASSES):
            np.add(total, array, out=total)

    return _median(add, rounds)


def _ping_pong_seconds(nbytes: int, rounds: int) -> float:
    source, target = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    with Peer("pingpong", nbytes) as peer, peer.connect() as connection:

        def ping() -> None:
            connection.sendall(source)
            receive_all(connection, target)

        return _median(ping, rounds)


def _duplex_seconds(nbytes: int, rounds: int) -> float:
    source, target = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    with Peer("duplex", _DUPLEX_CHUNK) as peer, peer.connect() as connection:
        return _median(lambda: exchange(connection, source, target), rounds)


def _bare_server_seconds(workers: int, nbytes: int, rounds: int) -> float:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Peer("server", workers, nbytes, _WARMUP + rounds))
        port = int(server.read_line())
        peers = [stack.enter_context(Peer("worker", port, nbytes, _WARMUP + rounds)) for _ in range(workers)]
        times = [json.loads(peer.read_line())[_WARMUP:] for peer in peers]
    return statistics.median([float(seconds) for worker in times for seconds in worker])


class Peer:
    """A process that runs `peer`, as a context manager; it has ended afterwards.

    Args:
        mode: what it does.
        numbers: the arguments of the mode.
    """

    def __init__(self, mode: str, *numbers: int) -> None:
        self._mode = mode
        self._command = [sys.executable, "-m", "aiokv.bench.peer", mode, *map(str, numbers)]

    def __enter__(self) -> Self:
        # In a session of its own a Ctrl-C does not reach it, so that it has nothing to say about it.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process:
            self._process.kill()

    def read_line(self) -> str:
        """Return the next line that the process prints.

        Raises:
            AiokvError: the process has ended without printing it.
        """
        assert self._process.stdout is not None, "it was started with a pipe"
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait(PATIENCE)
            raise AiokvError(f"the process for {self._mode!r} ended with exit code {code} before its measurement did")
        return line

    def connect(self) -> socket.socket:
        """Connect to the port that the process prints."""
        return connect(int(self.read_line()))
