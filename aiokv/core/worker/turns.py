"""Which of a worker's calls wait for their turn: calls of a key keep their order, and a key has so many open pushes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from aiokv.errors import CallTimeoutError, MembershipError

if TYPE_CHECKING:
    from aiokv.core.worker.call import Call
    from aiokv.core.worker.directory import Directory
    from aiokv.errors import AiokvError
    from aiokv.types import Key, TensorSpec


class Turns:
    """The calls of one worker that are not sent yet, in their order under each of their keys.

    Args:
        directory: what is known of the keys.
        max_open_pushes: how many pushes of one key may be under way; calls that would push more of it wait here.
    """

    __slots__ = ("_directory", "_is_last", "_last", "_most", "waiting")

    def __init__(self, directory: Directory, max_open_pushes: int) -> None:
        self._directory = directory
        self._most = max_open_pushes
        self.waiting: dict[Key, deque[Call]] = {}
        """Under each key its calls; the first one may be sent already, and only keep the others from it."""
        self._last: int | None = None
        """The clock beyond which nothing is pushed; None: there is no such clock."""
        self._is_last = False
        """Whether that is so for good; otherwise what is beyond waits."""

    @property
    def are_pushing(self) -> bool:
        """Whether a call that pushes waits."""
        return any(call.pushes for calls in self.waiting.values() for call in calls)

    @property
    def is_limited(self) -> bool:
        """Whether there is a clock beyond which nothing is pushed."""
        return self._last is not None

    @property
    def tensors(self) -> list[tuple[Key, TensorSpec]]:
        """All tensors of the calls that wait."""
        return [tensor for calls in self.waiting.values() for call in calls for tensor in call.tensors]

    def next_clock(self) -> int:
        """Return the clock of the first push after all that the user has made so far."""
        held = [
            self._directory.counts.counted(key) + sum(call.pushes for call in calls)
            for key, calls in self.waiting.items()
        ]
        return max([self._directory.counts.clock, *held]) + 1

    # --- waiting ---

    def hold(self, call: Call) -> None:
        """Let a call wait behind those of its keys that wait already."""
        for key in call.keys:
            self.waiting.setdefault(key, deque()).append(call)

    def hold_others(self, call: Call) -> None:
        """Let the other calls of its keys wait for a call whose turn has come."""
        for key in call.keys:
            self.waiting.setdefault(key, deque()).appendleft(call)

    def release(self, call: Call) -> list[Key]:
        """Take a call out of those that wait, or that others wait for; return its keys."""
        keys = call.keys
        for key in keys:
            waiting = self.waiting[key]
            waiting.remove(call)
            if not waiting:
                del self.waiting[key]
        return keys

    def obstacle(self, call: Call) -> Key | None:
        """Return a key because of which a call can't be sent yet."""
        if self.waiting:
            # Calls of a key stay in their order.
            for key, _ in call.tensors:
                first = self.waiting.get(key)
                if first and first[0] is not call:
                    return key
        if call.transfer is None or not call.pushes:
            return None
        if self._last is not None and not self._is_last and self._is_beyond(call):
            return call.tensors[0][0]
        return self._directory.full(call.tensors, self._most, len(call.transfer.rows))

    def late(self, call: Call) -> AiokvError:
        """Return what a call fails with that has waited for its turn too long."""
        if self._last is not None and not self._is_last:
            text = f"{call.what}: no word from the scheduler within {call.timeout:.3g} s whether this worker leaves"
            return CallTimeoutError(text, key=call.held)
        text = (
            f"{call.what}: not sent within {call.timeout:.3g} s, because {self._most} pushes of key {call.held!r} "
            "are not answered yet, or calls before this one wait for that"
        )
        return CallTimeoutError(text, key=call.held)

    # --- the last clock ---

    def limit(self, last: int | None, *, for_good: bool) -> bool:
        """Push nothing beyond a clock, for good or until there is another limit; return whether it is another one."""
        if (last, for_good) == (self._last, self._is_last):
            return False
        self._last, self._is_last = last, for_good
        return True

    def _is_beyond(self, call: Call) -> bool:
        """Tell whether a call would push something beyond the limit."""
        if self._last is None or not call.pushes:
            return False
        return self._directory.counts.next_clock([key for key, _ in call.tensors]) > self._last

    def refusal(self, call: Call) -> AiokvError | None:
        """Return why a call whose turn has come will never be sent, if that is so."""
        if not self._is_last or not self._is_beyond(call):
            return None
        text = f"{call.what}: this worker leaves after step {self._last}, and nobody waits for what it pushes then"
        return MembershipError(text)
