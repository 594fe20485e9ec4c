"""Small keys that are decided and sent together: one message, one contribution, one version for all of them.

While every worker uses them together, the keys of a bundle are one chunk, so what they cost does not depend on how many
they are. When somebody uses one of them alone, the bundle is divided for good: each key becomes a chunk of its own,
with the state that the bundle had; open contributions are cut, and who waited for the bundle waits for all its keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs

from aiokv.core.effects import Divide, Effect, Split
from aiokv.core.server.rounds.chunk import Chunk
from aiokv.core.server.rounds.updates import Update, Waiter

if TYPE_CHECKING:
    from aiokv.types import Key, Slot, TensorSpec

NewSlot = Callable[[], "Slot"]


@dataclass(slots=True, eq=False)
class Bundle:
    """Keys in a fixed order. `chunk` is set while they are one chunk."""

    number: int
    keys: tuple[Key, ...]
    specs: tuple[TensorSpec, ...]
    chunk: Chunk | None


def split_slot(slot: Slot | None, chunks: list[Chunk], new_slot: NewSlot) -> tuple[list[Slot | None], list[Effect]]:
    """Cut a slot into one for each chunk; the slots, and what makes them."""
    if slot is None:
        return [None] * len(chunks), []
    parts: list[tuple[Slot, int]] = [(new_slot(), chunk.nbytes) for chunk in chunks]
    return [part for part, _ in parts], [Split(slot, parts)]


def divide(bundle: Bundle, new_slot: NewSlot) -> tuple[list[Chunk], list[Effect]]:
    """Make a chunk of each key of a bundle whose chunk is not being updated; the chunks, and what is to be done."""
    whole = bundle.chunk
    assert whole is not None, "a bundle is divided once"
    assert not whole.applying, "its value is about to change"
    chunks = [
        Chunk(key, 0, spec.size, spec, whole.policy, f"key {key!r}", whole.group, whole.version, whole.newest)
        for key, spec in zip(bundle.keys, bundle.specs, strict=True)
    ]
    effects: list[Effect] = [Divide(whole.key, whole.start, [(chunk.key, chunk.size) for chunk in chunks])]
    for chunk in chunks:
        chunk.pushed, chunk.reflected = dict(whole.pushed), dict(whole.reflected)
        chunk.reads = None if whole.reads is None else whole.reads.copy()
        chunk.previous, chunk.clocks = whole.previous, dict(whole.clocks)
        chunk.admitted = dict(whole.admitted)
        chunk.cut, chunk.born = whole.cut, whole.born
    for update in whole.updates.values():
        effects += _divide_update(update, chunks, new_slot)
    for waiter in whole.reading():
        waiter.chunks, waiter.left = chunks, len(chunks)
        for chunk in chunks:
            chunk.read_later(waiter)
    of_key = {chunk.key: chunk for chunk in chunks}
    for waiter in whole.awaiting:
        assert waiter.key is not None, "bundles are read without regard to rounds"
        waiter.chunks = [of_key[waiter.key]]
        of_key[waiter.key].awaiting[waiter] = None
    bundle.chunk = None
    return chunks, effects


def _divide_update(whole: Update, chunks: list[Chunk], new_slot: NewSlot) -> list[Effect]:
    accumulators, effects = split_slot(whole.accumulator, chunks, new_slot)
    updates = [
        Update(whole.version, folded=list(whole.folded), unfolded=list(whole.unfolded), accumulator=slot)
        for slot in accumulators
    ]
    for chunk, update in zip(chunks, updates, strict=True):
        chunk.updates[whole.version] = update
    for rank, contribution in whole.contributions.items():
        slots, more = split_slot(contribution.slot, chunks, new_slot)
        effects += more
        for update, slot in zip(updates, slots, strict=True):
            update.contributions[rank] = structs.replace(contribution, slot=slot)
    for waiter in whole.waiters:
        _wait_for_all(waiter, chunks, updates)
    return effects


def _wait_for_all(waiter: Waiter, chunks: list[Chunk], updates: list[Update]) -> None:
    waiter.chunks, waiter.updates, waiter.left = chunks, tuple(updates), len(chunks)
    for update in updates:
        update.waiters[waiter] = None
