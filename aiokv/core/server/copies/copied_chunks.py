"""What a server sends its standby of a chunk: an update that it makes, what is open, or all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from aiokv.core.effects import Apply, ApplyRows, StoredCopy, StoredSlots, StoredSum
from aiokv.core.keys import BUNDLE_START
from aiokv.core.server.rounds.chunk import NONE
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.effects import Payload
    from aiokv.core.server.catalog import Catalog
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.updates import Contribution
    from aiokv.optim import Optimizer
    from aiokv.types import Rank


def can_follow(chunk: Chunk, rule: Optimizer) -> bool:
    """Tell whether the sum of an update is enough to make it elsewhere.

    Of a sum of integers that does not fit nothing is seen in its bytes, and some rules look at earlier values.
    """
    return "float" in chunk.spec.dtype and not rule.reads_weight


def is_changing(chunk: Chunk, *, has_parts: bool) -> bool:
    """Tell whether a chunk can't be copied as it is now.

    `has_parts` says that the standby has the contributions to the update that is being made, as far as workers have
    gone on: they are in a sum already, though the store may not have begun with it.
    """
    if chunk.applying and not (chunk.policy.waits or has_parts):
        return True
    return chunk.is_busy or (chunk.rounds is not None and not chunk.rounds.is_in_order(chunk))


def update_of(chunk: Chunk, effect: Apply | ApplyRows, number: int) -> tuple[m.Replicate, Payload | None]:
    """Return an update, and where its sum, or its contributions, are."""
    apply = effect.update if isinstance(effect, ApplyRows) else effect
    update = chunk.updates[apply.version]
    ordered = [update.contributions[place] for place in update.folded]
    parts = tuple([(part.rank, part.sequence, part.read_version, part.clock) for part in ordered])
    norms = tuple([tuple(phase) for phase in apply.norms])
    # To compute norms, the sum was divided.
    divisor = 1 if norms else apply.divisor
    head = (number, apply.key, apply.start, apply.version, parts, apply.clock, divisor)
    message = m.Replicate(*head, norms, apply.keep)
    if chunk.rounds is not None:
        # Nothing is done with the next round as long as this one is being made.
        message.round = chunk.rounds.first - 1
    payload: Payload | None = None if apply.slot is None else StoredSum(apply.slot, chunk.nbytes)
    if isinstance(effect, ApplyRows) and effect.slots:
        message.lengths, message.factors = tuple(effect.nbytes), tuple(effect.factors)
        payload = StoredSlots(list(effect.slots), sum(effect.nbytes))
    return message, payload


def contribution_of(chunk: Chunk, part: Contribution) -> tuple[m.CopyContribution, StoredSlots | None]:
    """Return a contribution that is in no update yet, without its number, and where it is."""
    head = (0, chunk.key, chunk.start, part.rank, part.sequence, part.read_version, part.clock, part.nbytes)
    return m.CopyContribution(*head), None if part.slot is None else StoredSlots([part.slot], part.nbytes)


def open_parts(chunk: Chunk) -> list[Contribution]:
    """Return the contributions on which workers go on although they are in no value, those of a rank in their order."""
    parts = [] if chunk.rounds is None or chunk.policy.waits else chunk.rounds.open
    return sorted(parts, key=lambda part: part.sequence)


def copy_of(chunk: Chunk, catalog: Catalog, number: int) -> tuple[m.Copy, StoredCopy]:
    """Return a whole chunk that is not being changed, and where its value and state are."""
    bundle = catalog.bundle_of(chunk.key) if chunk.start == BUNDLE_START else None
    keys, specs = ((chunk.key,), (chunk.spec,)) if bundle is None else (bundle.keys, bundle.specs)
    entries = [entry for key in keys if (entry := catalog.entry(key)) is not None]
    digests = tuple(entry.digest for entry in entries)
    shapes = tuple(spec.shape for spec in specs)
    counts = tuple(_count_of(chunk, rank, count) for rank, count in sorted(chunk.reflected.items()))
    head = (number, keys, shapes, digests, chunk.spec.dtype, chunk.start, chunk.stop, str(chunk.policy))
    message = m.Copy(*head, chunk.group, chunk.version, chunk.since, counts)
    if chunk.rounds is not None:
        # It may be about to make the round before that, and is copied as it is before.
        message.first = chunk.rounds.first - chunk.applying
        message.before = tuple([last for version, last in chunk.rounds.until.items() if version < chunk.version])
    if chunk.former is not None:
        message.former = chunk.former.group[0]
    rows = entries[0].rows
    if rows is not None:
        message.sparse, message.lazy = True, rows.lazy
        message.initializer = msgspec.to_builtins(rows.initializer)
    message.previous = chunk.previous
    kept = chunk.previous if chunk.previous < chunk.version else NONE
    return message, StoredCopy(chunk.key, chunk.start, chunk.version, chunk.nbytes, kept)


def _count_of(chunk: Chunk, rank: Rank, count: int) -> m.RankCount:
    """Return what a chunk knows of a rank."""
    number, counted = chunk.admitted.get(rank, (-1, -1))
    head, joined = (rank, count, chunk.before.get(rank, 0)), counted if number == count else -1
    if chunk.rounds is None:
        return m.RankCount(*head, chunk.clock_at(rank, count), joined=joined)
    return m.RankCount(*head, chunk.rounds.passed.get(rank, 0), chunk.rounds.made.get(rank, 0), joined)
