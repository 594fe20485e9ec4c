"""What is told to devices at once, and what is held back so that launches of one kind become one.

A launch goes out as long as less than `DEPTH` others of its device are not reported: one that runs, and one that is
there when that ends. What goes on with what is under way need not wait for that either, up to `MOST_OPEN`: the update
of a single chunk follows its sum. What else comes while a device is that far behind is held back, with all that depends
on it. When the device has caught up, what is held goes out together, each kind of work in one launch as far as what it
needs allows that. So nothing waits while a device has nothing to do, and many chunks that are ready are few launches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiokv.device.records import Copy, Kind, Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from aiokv.device.records import Effect, Event, Part, Stream

DEPTH = 2
"""Launches of a device that are not reported, from which on others are held back."""

MOST_OPEN = 8
"""From so many on even those that go on with one of them are."""

MOST_PARTS = 256
"""Works that one launch does."""


@dataclass(slots=True)
class _Held:
    """A copy, or a launch that others of its kind may still join; `needs` are the events that it waits for."""

    task: Copy | Launch
    kind: Hashable
    needs: dict[Event, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Issued:
    """How many parts of a launch, or of a copy, are not reported."""

    stream: Stream
    number: int
    left: int


class Dispatch:
    """Decides when copies and launches go out.

    Args:
        tell: takes what goes out, in its order.
        kind_of: of works that are equal by this, several can be done in one launch; None: this one is done alone.
    """

    def __init__(self, tell: Callable[[Effect], None], kind_of: Callable[[object], Hashable]) -> None:
        self._tell = tell
        self._kind_of = kind_of
        self._count = 0
        self._issued: dict[Event, _Issued] = {}
        self._open: dict[int, int] = {}
        """Launches of each device that are not reported."""
        self._held: list[_Held] = []
        """In an order in which all could go out."""
        self._places: dict[Event, int] = {}
        """Where in it each event that is held back is."""

    def copy(self, task: Copy, needs: Iterable[Event]) -> None:
        """Have a copy made when events have happened."""
        held = _Held(task, None, dict.fromkeys(needs))
        if self._earliest(held.needs):
            self._hold(held)
        else:
            self._issue(held)

    def launch(self, stream: Stream, part: Part, needs: Iterable[Event]) -> None:
        """Have work done when events have happened."""
        held = _Held(Launch(stream, [], [part]), self._kind_of(part.work), dict.fromkeys(needs))
        earliest = self._earliest(held.needs)
        most = MOST_OPEN if self._goes_on(held) else DEPTH
        if not earliest and self._open.get(stream.device, 0) < most:
            self._issue(held)
            return
        for place in range(earliest, len(self._held)):
            if self._joins(self._held[place], held):
                self._places[part.event] = place
                return
        self._hold(held)

    def end(self, event: Event) -> None:
        """Take note that an event has been reported."""
        issued = self._issued.pop(event)
        issued.left -= 1
        if not issued.left and issued.stream.kind is Kind.COMPUTE:
            self._open[issued.stream.device] -= 1
        if self._held:
            self._let_go()

    def _earliest(self, needs: Iterable[Event]) -> int:
        """Return the first place behind all that is held back and needed."""
        return 1 + max([self._places.get(event, -1) for event in needs], default=-1)

    def _goes_on(self, held: _Held) -> bool:
        """Tell whether something needs what its own stream is doing."""
        found = [self._issued[event].stream for event in held.needs if event in self._issued]
        return held.task.stream in found

    @staticmethod
    def _joins(other: _Held, held: _Held) -> bool:
        """Let a launch join another one, if it may."""
        if held.kind is None or other.kind != held.kind or not isinstance(other.task, Launch):
            return False
        assert isinstance(held.task, Launch)
        if other.task.stream != held.task.stream or len(other.task.parts) >= MOST_PARTS:
            return False
        other.task.parts += held.task.parts
        other.needs |= held.needs
        return True

    def _hold(self, held: _Held) -> None:
        for event in _events(held.task):
            self._places[event] = len(self._held)
        self._held.append(held)

    def _let_go(self) -> None:
        """Let go what is held of devices that have caught up, and what waits for nothing else that is held."""
        has_room = {device for device, count in self._open.items() if count < DEPTH}
        held, self._held, self._places = self._held, [], {}
        for each in held:
            stream = each.task.stream
            behind = stream.kind is Kind.COMPUTE and stream.device not in has_room
            if behind or self._earliest(each.needs):
                self._hold(each)
            else:
                self._issue(each)

    def _issue(self, held: _Held) -> None:
        """Let go, after the newest event of each other stream that is needed: a stream keeps its order."""
        task = held.task
        newest: dict[Stream, tuple[int, Event]] = {}
        for event in held.needs:
            before = self._issued.get(event)
            if before is not None and before.stream != task.stream:
                newest[before.stream] = max((before.number, event), newest.get(before.stream, (0, 0)))
        task.waits = [event for _, event in newest.values()]
        events = _events(task)
        self._count += 1
        issued = _Issued(task.stream, self._count, len(events))
        self._issued |= dict.fromkeys(events, issued)
        if task.stream.kind is Kind.COMPUTE:
            self._open[task.stream.device] = self._open.get(task.stream.device, 0) + 1
        self._tell(task)

    # --- for tests ---

    def validate(self) -> None:
        """Check that what is held back waits for something that will be reported.

        Raises:
            AssertionError: an invariant is broken.
        """
        for place, each in enumerate(self._held):
            stream = each.task.stream
            behind = stream.kind is Kind.COMPUTE and self._open.get(stream.device, 0) >= DEPTH
            assert behind or self._earliest(each.needs), "what could go out has gone out"
            assert self._earliest(each.needs) <= place, "what is needed is in front"


def _events(task: Copy | Launch) -> list[Event]:
    return [task.event] if isinstance(task, Copy) else [part.event for part in task.parts]
