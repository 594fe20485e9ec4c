"""Values and states that a server holds on to until they are written, while it goes on with others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from aiokv.store.states import IDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from aiokv.errors import AiokvError
    from aiokv.store.memory import ParameterStore, Parts
    from aiokv.types import Key, Version

    Arrays = dict[str, NDArray[Any]]

S = TypeVar("S")


@dataclass(slots=True)
class Held(Generic[S]):
    """One key, or the part of it that lies in a chunk, as it was; `state` is what else its owner knows of it."""

    state: S
    updates: int
    arrays: Arrays


class Snapshots(Generic[S]):
    """What is held of a store, by clock. A value is held as it is, since nobody changes it; states are copied.

    Args:
        store: whose it is.
    """

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        self._held: dict[int, dict[tuple[Key, int], list[Held[S]]]] = {}
        self._values: dict[int, list[Callable[[], None]]] = {}
        self._waiting: dict[int, int] = {}
        """How many chunks are not there yet, which are on devices."""
        self._errors: dict[int, AiokvError] = {}
        self._ready: dict[int, Callable[[AiokvError | None], None]] = {}

    def hold(self, clock: int, key: Key, start: int, version: Version, states: list[S]) -> None:
        """Hold on to a chunk, unless that is done; `states` are those of the keys in it, in their order."""
        held = self._held.setdefault(clock, {})
        if (key, start) in held:
            return
        if self._store.is_table(key, start):
            steps = self._store.steps(key, start)
            held[key, start] = [Held(states[0], steps, _rows(self._store, key, start))]
            return
        held[key, start] = []
        self._waiting[clock] = self._waiting.get(clock, 0) + 1

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
                held[key, start] = [Held(state, parts.updates, arrays) for state, arrays in named]
            self._tell(clock)

        self._store.hold(key, start, version, take)

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
        for release in self._values.pop(clock, []):
            release()


def _rows(store: ParameterStore, key: Key, start: int) -> Arrays:
    """Return copies of the rows of a table that were used: updates write in their place."""
    ids, arrays = store.table(key, start).saved()
    order = np.argsort(ids)
    return {name: array[order] for name, array in ({IDS: ids} | arrays).items()}
