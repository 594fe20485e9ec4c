"""Calls that count as a whole, on a server with a standby: which of them wait until it has what they push."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.server.copies.followed_calls import called, pushes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.core.effects import StoredSlots
    from aiokv.core.server.rounds.whole_call import CallName, WholeCall
    from aiokv.wire import messages as m


class CopiedCalls:
    """The calls that wait, and those that do no longer."""

    def __init__(self) -> None:
        self._waiting: dict[CallName, tuple[WholeCall, int | None]] = {}
        """By which message all of a call is there; None: it is not sent yet."""
        self.there: list[WholeCall] = []
        """Those that wait no longer; whoever goes on with them takes them out."""

    def add(self, call: WholeCall) -> None:
        """Let a call wait until its pushes are sent, and there."""
        self._waiting[call.name] = (call, None)

    def pushes(self) -> Iterator[tuple[m.CopyPush, StoredSlots | None]]:
        """Yield the pushes of all that wait, without their numbers, and their payloads."""
        for call, _ in list(self._waiting.values()):
            yield from pushes_of(call)

    def sent(self, push: m.CopyPush) -> None:
        """Take note of the number with which a push is sent."""
        name = called(push)
        self._waiting[name] = (self._waiting[name][0], push.number)

    def send_again(self) -> None:
        """Take note that nothing counts as sent of what is not there."""
        self._waiting = {name: (call, None) for name, (call, _) in self._waiting.items()}

    def acknowledged(self, number: int) -> None:
        """Let those go on of which all is there, with the messages up to a number."""
        for name, (call, need) in list(self._waiting.items()):
            if need is not None and need <= number:
                del self._waiting[name]
                self.there.append(call)

    def give_up(self) -> None:
        """Let all go on: there is no standby to wait for."""
        self.there += [call for call, _ in self._waiting.values()]
        self._waiting.clear()
