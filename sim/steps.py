"""The steps of a worker: what is kept of each, and how thousands of them are kept in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, overload

from aiokv.core.records import Record


class Step(Record, gc=False):
    """A worker computed from `start` to `computed`, and waited for the servers until `end`."""

    start: float
    computed: float
    end: float
    answered: bool = True
    """False for a last step whose push failed, or that a fault cut short."""
    communicated: float = 0.0
    """Seconds of its waiting in which messages from or to it were under way."""
    stalled: float = 0.0
    """Seconds before `computed` in which it waited for parameters."""
    paused: float = 0.0
    """Seconds before `computed` in which it was stopped."""
    cancelled: bool = False
    """It was abandoned at `computed`, because its gradient would have been dropped; nothing was pushed."""
    number: int = 0
    """Of its push, where workers join and leave."""
    halted: float = 0.0
    """Seconds of its waiting in which it was stopped, and nothing was under way."""

    @property
    def work(self) -> float:
        """Seconds in which it computed."""
        return self.computed - self.start - self.stalled - self.paused

    @property
    def waiting(self) -> float:
        """Seconds in which it waited, was not stopped, and nothing of it was under way."""
        return self.end - self.computed + self.stalled - self.communicated - self.halted

    @property
    def is_plain(self) -> bool:
        """Whether its times and `communicated` say all of it."""
        is_odd = self.cancelled or self.number or self.stalled or self.paused or self.halted
        return self.answered and not is_odd


WIDTH: Final = 4
"""Numbers of a plain step: start, computed, end, communicated."""


class Steps(Sequence[Step]):
    """The steps of a worker in their order, as a row of numbers each.

    Objects that are kept would lie between those that are used again for every step, and with thousands of workers the
    memory in use would no longer fit into a cache. Only steps of which there is more to say are kept as they are. The
    others are made when somebody reads them: who changes one has to put it back.
    """

    __slots__ = ("_numbers", "_odd")

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self._numbers = array("d")
        self._odd: dict[int, Step] = {}
        """Those that are not plain."""
        for step in steps:
            self.append(step)

    def append(self, step: Step) -> None:
        """Put one behind the others."""
        if not step.is_plain:
            self._odd[len(self)] = step
        self._numbers.extend((step.start, step.computed, step.end, step.communicated))

    @property
    def answered(self) -> int:
        """How many were answered."""
        return len(self) - sum(not step.answered for step in self._odd.values())

    @property
    def pushed(self) -> int:
        """How many were not abandoned."""
        return len(self) - sum(step.cancelled for step in self._odd.values())

    def __len__(self) -> int:
        return len(self._numbers) // WIDTH

    def __iter__(self) -> Iterator[Step]:
        numbers = iter(self._numbers)
        rows = zip(numbers, numbers, numbers, numbers, strict=True)
        for index, (start, computed, end, communicated) in enumerate(rows):
            yield self._odd.get(index) or Step(start, computed, end, True, communicated)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        # As of a list: counted from the end if it is negative, and `IndexError` when there is none.
        place = range(len(self))[index]
        found = self._odd.get(place)
        if found is not None:
            return found
        start, computed, end, communicated = self._numbers[place * WIDTH : (place + 1) * WIDTH]
        return Step(start, computed, end, True, communicated)

    def __setitem__(self, index: int, step: Step) -> None:
        place = range(len(self))[index]
        self._odd.pop(place, None)
        if not step.is_plain:
            self._odd[place] = step
        row = array("d", (step.start, step.computed, step.end, step.communicated))
        self._numbers[place * WIDTH : (place + 1) * WIDTH] = row
