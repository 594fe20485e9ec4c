"""Values and states that a server holds on to until they are written, while it goes on with others."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from aiokv.errors import AiokvError
    from aiokv.store.memory import ParameterStore, Parts
    from aiokv.store.table import Table
    from aiokv.store.table_copy import TableCopy
    from aiokv.types import Key, Version

    Arrays = dict[str, NDArray[Any]]

S = TypeVar("S")


@dataclass(slots=True)
class Held(Generic[S]):
    """One key, or the part of it that lies in a chunk, as it was; `state` is what else its owner knows of it."""

    state: S
    updates: int
    arrays: Callable[[], Arrays]
    """Gives the arrays, by name; that may take a while, and may be done in a thread."""


class Snapshots(Generic[S]):
    """What is held of a store, by clock. A value is held as it is, since nobody changes it; states are copied.

    Tables are copied a part at a time, by `copy_some`.

    Args:
        store: whose it is.
    """

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        self._held: dict[int, dict[tuple[Key, int], list[Held[S]]]] = {}
        self._values: dict[int, list[Callable[[], None]]] = {}
        self._waiting: dict[int, int] = {}
        """How many chunks are not there yet: they are on devices, or tables that are being copied."""
        self._copying: deque[tuple[int, Table, TableCopy]] = deque()
        """Tables, for which clock, and their copies that are not whole."""
        self._errors: dict[int, AiokvError] = {}
        self._ready: dict[int, Callable[[AiokvError | None], None]] = {}

    def hold(self, clock: int, key: Key, start: int, version: Version, states: list[S]) -> None:
        """Hold on to a chunk, unless that is done; `states` are those of the keys in it, in their order."""
        held = self._held.setdefault(clock, {})
        if (key, start) in held:
            return
        self._waiting[clock] = self._waiting.get(clock, 0) + 1
        if self._store.is_table(key, start):
            table = self._store.table(key, start)
            copy = table.begin_copy()
            held[key, start] = [Held(states[0], table.steps, copy.arrays)]
            self._copying.append((clock, table, copy))
            return
        held[key, start] = []

        def take(parts: Parts) -> None:
            self._waiting[clock] -= 1
            if self._held.get(clock) is not held:
                # Nobody wants it any longer.
                parts.release()
                return
            self._values.setdefault(clock, []).append(parts.release)
            if parts.error is not None:
                self._errors[clock] = parts.error
            else:
                named = zip(states, parts.arrays, strict=True)
                held[key, start] = [Held(state, parts.updates, _given(arrays)) for state, arrays in named]
            self._tell(clock)

        self._store.hold(key, start, version, take)

    @property
    def is_copying(self) -> bool:
        """Whether there is something to do for `copy_some`."""
        return bool(self._copying)

    def copy_some(self, most: int) -> None:
        """Copy the next rows of a table, up to `most` bytes. Not while something else is done with the table."""
        clock, table, copy = self._copying[0]
        copy.advance(most)
        if copy.is_whole:
            self._copying.popleft()
            table.end_copy(copy)
            self._waiting[clock] -= 1
            self._tell(clock)

    def when_ready(self, clock: int, ready: Callable[[AiokvError | None], None]) -> None:
        """Call a function when all is there that is held for a clock, with the error if something can't be had."""
        self._ready[clock] = ready
        self._tell(clock)

    def _tell(self, clock: int) -> None:
        if clock in self._ready and not self._waiting.get(clock):
            self._ready.pop(clock)(self._errors.get(clock))

    def held(self, clock: int) -> list[Held[S]]:
        """Return all that is held for a clock, in the order in which it was."""
        return [one for chunk in self._held.get(clock, {}).values() for one in chunk]

    def release(self, clock: int) -> None:
        """Let go of all that is held for a clock."""
        self._held.pop(clock, None)
        self._errors.pop(clock, None)
        for begun in [begun for begun in self._copying if begun[0] == clock]:
            self._copying.remove(begun)
            self._waiting[clock] -= 1
            begun[1].end_copy(begun[2])
        for release in self._values.pop(clock, []):
            release()


def _given(arrays: Arrays) -> Callable[[], Arrays]:
    return lambda: arrays
