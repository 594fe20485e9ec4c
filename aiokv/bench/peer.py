"""The other processes of `limits`: `python -m aiokv.bench.peer MODE NUMBER ...`.

    pingpong BYTES               receive so many bytes, send them back, again and again
    duplex CHUNK                 send back whatever has come, at most CHUNK bytes at a time
    server WORKERS BYTES ROUNDS  add the workers' arrays chunk by chunk, send each sum to all: a server without aiokv
    worker PORT BYTES ROUNDS     push and pull on it; print the seconds of each round as JSON

The first three print the port at which they listen, and end when the connections are closed or the rounds are over.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from aiokv.bench.sockets import accept, connect, listen, pieces, receive_all

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

CHUNK = 1 << 20
"""Bytes that the bare server adds and sends at a time."""


def say(text: object) -> None:
    """Write a line for the process that started this one."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _listen_for(count: int) -> list[socket.socket]:
    with listen() as listener:
        say(listener.getsockname()[1])
        return [accept(listener) for _ in range(count)]


def ping_pong(nbytes: int) -> None:
    """Send every message back when all of it has come."""
    memory = memoryview(bytearray(nbytes))
    [connection] = _listen_for(1)
    with connection, contextlib.suppress(EOFError, ConnectionError):
        while True:
            receive_all(connection, memory)
            connection.sendall(memory)


def duplex(chunk: int) -> None:
    """Send every piece back while the next is arriving."""
    memory = memoryview(bytearray(chunk))
    [connection] = _listen_for(1)
    with connection, contextlib.suppress(ConnectionError):
        while received := connection.recv_into(memory):
            connection.sendall(memory[:received])


class BareServer:
    """Adds up what the workers send, with a thread for each: no framing, no keys, no errors handled.

    Args:
        connections: one for each worker.
        nbytes: bytes of each worker's array of float32.
        rounds: how often each worker sends its array.
    """

    def __init__(self, connections: Sequence[socket.socket], nbytes: int, rounds: int) -> None:
        self._connections, self._nbytes, self._rounds = connections, nbytes, rounds
        self._arrays = [np.zeros(nbytes // 4, np.float32) for _ in connections]
        self._sum = np.zeros(nbytes // 4, np.float32)
        self._together = threading.Barrier(len(connections))

    def run(self) -> None:
        """Serve all rounds, or until a worker has closed its connection."""
        threads = [threading.Thread(target=self._serve, args=(index,)) for index in range(len(self._connections))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self, index: int) -> None:
        received, result = self._arrays[index].data.cast("B"), self._sum.data.cast("B")
        connection = self._connections[index]
        try:
            for _ in range(self._rounds):
                for piece in pieces(self._nbytes, CHUNK):
                    receive_all(connection, received[piece])
                    self._together.wait()
                    self._add(piece, index)
                    self._together.wait()
                    connection.sendall(result[piece])
        except (EOFError, ConnectionError, threading.BrokenBarrierError):
            self._together.abort()

    def _add(self, piece: slice, index: int) -> None:
        """Add this thread's share of a chunk."""
        count = len(self._arrays)
        start, length = piece.start // 4, (piece.stop - piece.start) // 4
        share = slice(start + length * index // count, start + length * (index + 1) // count)
        if count == 1:
            np.copyto(self._sum[share], self._arrays[0][share])
            return
        np.add(self._arrays[0][share], self._arrays[1][share], out=self._sum[share])
        for array in self._arrays[2:]:
            self._sum[share] += array[share]


def bare_server(workers: int, nbytes: int, rounds: int) -> None:
    """Run a server."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connection) for connection in _listen_for(workers)]
        BareServer(connections, nbytes, rounds).run()


def exchange(connection: socket.socket, source: memoryview, target: memoryview) -> None:
    """Send all of one memory, and meanwhile fill the other.

    Raises:
        EOFError: the other end has closed the connection.
        OSError: the connection is broken, or nothing came in time.
    """

    def send() -> None:
        # What goes wrong here goes wrong for the receiving side too, and that is where it is reported.
        with contextlib.suppress(OSError):
            connection.sendall(source)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    receive_all(connection, target)
    sender.join()


def worker(port: int, nbytes: int, rounds: int) -> None:
    """Push and pull on a bare server."""
    source, target = np.ones(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
    times = []
    with connect(port) as connection:
        for _ in range(rounds):
            start = time.perf_counter()
            exchange(connection, source.data.cast("B"), target.data.cast("B"))
            times.append(time.perf_counter() - start)
    say(json.dumps(times))


_MODES: dict[str, Callable[..., None]] = {
    "pingpong": ping_pong,
    "duplex": duplex,
    "server": bare_server,
    "worker": worker,
}


def main(arguments: Sequence[str]) -> None:
    """Run one mode."""
    mode, *numbers = arguments
    _MODES[mode](*map(int, numbers))


if __name__ == "__main__":
    main(sys.argv[1:])
