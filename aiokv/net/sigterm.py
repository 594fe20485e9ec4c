"""What a process that is asked to end calls first, if its user wants that."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any, Final

from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

ASKED: Final = signal.Signals(getattr(signal, "SIGBREAK", signal.SIGTERM))
"""By this signal `aiokv run`, and most others, ask a process to end. Windows has one of its own for that."""


def check_thread() -> None:
    """Refuse to handle signals where that can't be.

    Raises:
        ConfigError: this is not the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        text = "leave_on_sigterm: only the main thread can handle signals; call plan_leave from a handler of your own"
        raise ConfigError(text, expected="the main thread", got=threading.current_thread().name)


class OnSigterm:
    """Calls back the first time that this process is asked to end; from then on what was there before is there again.

    So a second signal does what it would have done without this. To be made in the main thread, in which it calls back.

    Args:
        callback: is called between any two instructions of the program, so it should do no more than tell a loop.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._closed = False
        self._before: Any = signal.signal(ASKED, self._received)

    def _received(self, number: int, frame: object) -> None:
        del frame
        self._restore()
        if self._closed:
            # Another thread has closed it, which could not restore anything.
            signal.raise_signal(number)
        else:
            self._closed = True
            self._callback()

    def _restore(self) -> None:
        # What others have put in its place since stays.
        if signal.getsignal(ASKED) == self._received:
            signal.signal(ASKED, signal.SIG_DFL if self._before is None else self._before)

    def close(self) -> None:
        """Call back no longer. Can be called twice, and from any thread."""
        self._closed = True
        if threading.current_thread() is threading.main_thread():
            self._restore()
