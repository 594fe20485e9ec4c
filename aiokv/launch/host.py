"""A node on this host, for a launcher on another one: `python -m aiokv.launch.host`, with an `Order` on stdin.

When stdin ends, whoever has started this is gone, or wants it to end: so nothing is left here, whatever has become of
the launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import msgspec

from aiokv.errors import ConfigError
from aiokv.launch import scratch
from aiokv.launch.base import asking
from aiokv.launch.remote import Order
from aiokv.launch.signals import END_AT_ONCE
from aiokv.types import Role

GRACE = 2.0
"""Seconds that a node has to end when it is asked to."""


def run(order: Order) -> int:
    """Run a node until it ends, or stdin does; return its exit code, as a shell says it."""
    own = {scratch.RESIDUAL_FOLDER: scratch.make(order.scratch)} if order.scratch else {}
    node = subprocess.Popen(
        order.command,
        cwd=order.folder if os.path.isdir(order.folder) else None,
        env=os.environ | order.environ | own,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    role = order.environ.get("AIOKV_ROLE")
    ask = signal.SIGTERM if role is None else asking(Role(role))
    threading.Thread(target=_end_with_stdin, args=(node, ask), daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, END_AT_ONCE):
        signal.signal(number, lambda number, _frame: _signal(node, signal.SIGTERM if number == signal.SIGTERM else ask))
    code = node.wait()
    _signal(node, signal.SIGKILL)
    return 128 - code if code < 0 else code


def _end_with_stdin(node: subprocess.Popen[bytes], ask: signal.Signals) -> None:
    while os.read(0, 4096):
        pass
    _signal(node, ask)
    with contextlib.suppress(subprocess.TimeoutExpired):
        node.wait(GRACE)
    _signal(node, signal.SIGKILL)


def _signal(node: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(node.pid, number)


def main() -> None:
    """Read the order, and carry it out."""
    # Not through a buffer: what follows the line is for the thread that waits for the end.
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("error: stdin has ended before it said what to run")
        line += byte
    order = msgspec.json.decode(line, type=Order)
    if not order.command:
        scratch.remove(order.scratch)
        return
    try:
        sys.exit(run(order))
    except ConfigError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {order.command[0]}: {error.strerror or error}")


if __name__ == "__main__":
    main()
