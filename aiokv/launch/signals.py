"""Signals that ask a process to end, delivered to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

END_AT_ONCE: Final = signal.Signals(getattr(signal, "SIGUSR1", signal.SIGTERM))
"""Asks a server to end without handing over what it has. Before it is handled it ends a process without a word, and no
shell has its jobs ignore it; SIGINT and SIGHUP lack one or the other."""

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
"""Not every system has all of them."""


@contextlib.contextmanager
def handle_signals(callback: Callable[[int], None], *more: int) -> Iterator[None]:
    """Call back in the running loop, with the signal's number, when this process is asked to end.

    `more` are signals that do so besides.

    A signal that the process was started to ignore (as `nohup` does with SIGHUP) stays ignored. Outside the main
    thread, where Python allows no handlers, nothing is handled.
    """
    loop = asyncio.get_running_loop()
    numbers = dict.fromkeys([getattr(signal, name) for name in _NAMES if hasattr(signal, name)] + [*more])
    previous: dict[int, Any] = {}
    try:
        for number in numbers:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN and _install(loop, number, callback):
                previous[number] = before
        yield
    finally:
        for number, before in previous.items():
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if before is None else before)


def _install(loop: asyncio.AbstractEventLoop, number: int, callback: Callable[[int], None]) -> bool:
    try:
        loop.add_signal_handler(number, callback, number)
    except NotImplementedError:
        # Windows: a plain handler wakes the loop.
        signal.signal(number, lambda signum, _frame: loop.call_soon_threadsafe(callback, signum))
    except (ValueError, RuntimeError):
        return False
    return True
