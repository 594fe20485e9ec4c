"""In which order frames leave: by priority, and first come first served within one. Does no I/O."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

FAIR_SHARE: Final = 16
"""After so many frames that overtook others, one of the lowest priority goes: urgent ones slow the others down, but do
not stop them.
"""


class SendQueue(Generic[T]):
    """Frames that wait to be written."""

    def __init__(self) -> None:
        self._classes: dict[int, deque[T]] = {}
        self._order: list[int] = []
        """The priorities that have frames, ascending."""
        self._overtook = 0

    def __bool__(self) -> bool:
        return bool(self._order)

    def __len__(self) -> int:
        return sum(len(frames) for frames in self._classes.values())

    def __iter__(self) -> Iterator[T]:
        for priority in reversed(self._order):
            yield from self._classes[priority]

    def add(self, frame: T, priority: int) -> None:
        """Put a frame behind those of its priority."""
        frames = self._classes.get(priority)
        if frames is None:
            frames = self._classes[priority] = deque()
            self._order = sorted(self._classes)
        frames.append(frame)

    def peek(self) -> T:
        """Return the frame that goes next, and leave it there.

        Raises:
            IndexError: there is none.
        """
        return self._classes[self._next()][0]

    def take(self) -> T:
        """Return the frame that goes next.

        Raises:
            IndexError: there is none.
        """
        priority = self._next()
        if len(self._order) > 1:
            self._overtook = (self._overtook + 1) % (FAIR_SHARE + 1)
        frames = self._classes[priority]
        frame = frames.popleft()
        if not frames:
            del self._classes[priority]
            self._order.remove(priority)
        return frame

    def _next(self) -> int:
        """Return the priority whose turn it is: after its fair share of urgent frames, the lowest."""
        return self._order[0 if self._overtook == FAIR_SHARE else -1]

    def clear(self) -> None:
        """Forget all frames."""
        self._classes.clear()
        self._order.clear()
