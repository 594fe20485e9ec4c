"""Row-sparse keys on a server: what a message about rows must be, chunks of rows, and pushes that come in pieces.

A row-sparse key is a table of which only some rows have been used. Its chunks are ranges of rows, one on each server.
Every push of a round goes to all of them, with no rows where it has none, so each chunk decides its rounds by itself,
as those of dense keys do. Contributions wait in their slots and are summed all at once, in the order of their ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from aiokv.core.effects import ApplyRows, Effect, JoinRows, Refuse, Send, StoredRows, freed
from aiokv.core.server.rounds.chunk import Chunk
from aiokv.core.tables import check_sparse, check_table, row_bytes
from aiokv.errors import AiokvError, OptimizerError, ProtocolError, SpecMismatchError
from aiokv.initializers import Initializer, make_initializer
from aiokv.types import ROW_ID_BYTES, TensorSpec, Version
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.effects import Apply
    from aiokv.core.merging import Rate
    from aiokv.core.roster import Roster
    from aiokv.core.server.catalog import Catalog
    from aiokv.core.server.creation import Creation
    from aiokv.core.server.rounds.rounds import Rounds
    from aiokv.core.server.rounds.updates import Update
    from aiokv.core.stimuli import Received
    from aiokv.optim import Optimizer
    from aiokv.types import Key, Peer, Rank, Slot

WithRows = m.InitRows | m.PushRows

MAX_VALUE_BYTES = 64 * 1024 * 1024
"""Longest answer."""


def check_norms(key: Key, rule: Optimizer) -> None:
    """Refuse a rule that needs the norm of a whole tensor, which a table does not have.

    Raises:
        OptimizerError: names key and rule.
    """
    if rule.norm_phases:
        raise OptimizerError(
            f"optimizer {rule.name!r} needs norms of whole tensors, but key {key!r} is row-sparse",
            key=key,
            expected="a rule that treats rows by themselves",
            got=rule.name,
        )


@dataclass(slots=True)
class RowOptions:
    """What is said of a row-sparse key when it is initialised; see `messages.InitRows`."""

    lazy: bool
    initializer: Initializer


def options_of(message: m.InitRows) -> RowOptions:
    """Return the options of an init.

    Raises:
        ConfigError: the initializer can't be.
    """
    return RowOptions(message.lazy, make_initializer(message.initializer, message.dtype))


def check_options(key: Key, known: RowOptions | None, given: RowOptions | None) -> None:
    """Compare another init with the first one.

    Raises:
        SpecMismatchError: the storage differs, or how rows are updated or made.
    """
    check_sparse(key, is_sparse=known is not None, wanted=given is not None)
    if known != given:
        text = f"key {key!r} was initialized with {known}, not {given}"
        raise SpecMismatchError(text, key=key, expected=str(known), got=str(given))


class RowChunk(Chunk, eq=False):
    """Rows [start, stop) of a row-sparse key. `spec` is that of the whole key."""

    is_dense = False

    def nbytes_of(self, message: m.Push | m.PushBundle | m.PushRows) -> int:
        """Return how long the payload of a push is."""
        assert isinstance(message, m.PushRows), "the storage was checked"
        return message.count * (ROW_ID_BYTES + row_bytes(self.spec))

    def stored(self, rows: bytes, version: Version) -> StoredRows:
        """Return the payload of an answer with some rows of a value that the store has."""
        nbytes = len(rows) // ROW_ID_BYTES * row_bytes(self.spec)
        return StoredRows(self.key, self.start, version, rows, nbytes)

    def fold(self, update: Update, first_missing: Rank | None, rate: Rate | None, lamda: float = 0.0) -> list[Effect]:
        """Leave all contributions where they are until the last one is there."""
        del rate, lamda  # `completed` gets the rate too, and rules that look at what was read take no rows
        if first_missing is None:
            update.folded, update.unfolded = sorted(update.contributions), []
        return []

    def completed(self, update: Update, apply: Apply, rate: Rate | None) -> ApplyRows:
        """Return what multiplies and sums the contributions and makes the next version."""
        slots: list[Slot] = []
        factors: list[float] = []
        nbytes: list[int] = []
        for place, behind in zip(update.folded, apply.staleness, strict=True):
            contribution = update.contributions[place]
            if contribution.slot is not None:
                slots.append(contribution.slot)
                contribution.slot = None
                nbytes.append(contribution.nbytes)
                if rate is not None:
                    factors.append(rate(behind))
        return ApplyRows(apply, slots, factors, nbytes)


# --- messages with rows ---


def check_rows(received: Received, message: WithRows | m.PullRows) -> None:
    """Check lengths and row ids of a message.

    Raises:
        SpecMismatchError: there is no such spec, or a row id outside of the chunk.
        ProtocolError: a wrong length, or row ids that are not increasing.
    """
    key, start, stop = message.key, message.start, message.stop
    spec = TensorSpec(message.shape, message.dtype)
    check_table(key, spec)
    if not 0 <= start <= stop <= spec.shape[0]:
        raise ProtocolError(f"key {key!r}: rows {start} to {stop} are no part of {spec}")
    if isinstance(message, m.PullRows):
        count, rest = divmod(len(message.rows), ROW_ID_BYTES)
        if rest or count * row_bytes(spec) > MAX_VALUE_BYTES:
            raise ProtocolError(f"key {key!r}: {len(message.rows)} bytes of row ids, or too many rows at once")
    else:
        count = message.count
        wanted = count * (ROW_ID_BYTES + row_bytes(spec))
        fits = 0 <= message.first <= message.first + count <= message.total and (count or not message.total)
        if not fits or received.nbytes != wanted:
            raise ProtocolError(
                f"key {key!r}: {received.nbytes} bytes for {count} rows, after {message.first} of {message.total}"
            )
    if not count:
        return
    if received.span is None:
        raise ProtocolError(f"key {key!r}: row ids must be increasing")
    low, high = received.span
    if low < start or high >= stop:
        row = low if low < start else high
        text = f"key {key!r}: row {row} is not one of {start} to {stop - 1}"
        raise SpecMismatchError(text, key=key, expected=f"{start} <= row < {stop}", got=row)


class Tables:
    """The part of a `Coordinator` that deals with messages about rows.

    Args:
        catalog: the server's keys.
        creation: takes inits that are whole.
        rounds: takes pushes that are whole.
    """

    def __init__(self, catalog: Catalog, creation: Creation, rounds: Rounds) -> None:
        self._catalog = catalog
        self._creation = creation
        self._rounds = rounds
        self._pieces: dict[tuple[Peer, Key, int], list[Received]] = {}
        """The first rows of contributions that come in several messages."""

    def received(
        self, received: Received, message: WithRows | m.PullRows, rank: Rank, roster: Roster, now: float
    ) -> list[Effect]:
        """Take a message of a rank.

        Raises:
            AiokvError: it can't be; nothing is taken.
        """
        check_rows(received, message)
        if isinstance(message, m.PullRows):
            return self._rounds.pull(received, message, rank, [self._catalog.lookup(message)], now)
        is_last = message.first + message.count == message.total
        if self._has_come(message, rank):
            if not is_last:
                return [*freed(received.slot), Send(received.peer, received.request, m.Done())]
            return self._take(received, message, rank, roster, now)
        try:
            effects = self._add(received, message)
        except ProtocolError as error:
            given_up = self._give_up((received.peer, message.key, message.start))
            return [*given_up, *freed(received.slot), Refuse(received.peer, received.request, error)]
        if not is_last:
            # It is answered when the last one has come: if the connection ends before that, all of them come again.
            return effects
        whole, joined = self._join(received, message)
        assert isinstance(whole.message, WithRows), "it is as the last one"
        return effects + joined + self._take(whole, whole.message, rank, roster, now)

    def _has_come(self, message: WithRows, rank: Rank) -> bool:
        """Tell whether all of a contribution has come before; perhaps over a connection that has ended."""
        chunk = self._catalog.find(message.key, message.start)
        if isinstance(message, m.InitRows):
            return chunk is not None
        return chunk is not None and chunk.has(rank, message.sequence)

    def _take(self, whole: Received, message: WithRows, rank: Rank, roster: Roster, now: float) -> list[Effect]:
        try:
            if isinstance(message, m.InitRows):
                return self._creation.init(whole, message, rank, roster, now)
            chunk = self._catalog.lookup(message)
            return self._rounds.push(whole, message, rank, chunk.alone, now)
        except AiokvError as error:
            return [*freed(whole.slot), Refuse(whole.peer, whole.request, error)]

    def _add(self, received: Received, message: WithRows) -> list[Effect]:
        """Put a message to those before it; free what was never completed.

        Raises:
            ProtocolError: it does not go on where they end.
        """
        place = (received.peer, message.key, message.start)
        effects = self._give_up(place) if not message.first and place in self._pieces else []
        pieces = self._pieces.setdefault(place, [])
        rows = sum(_count(piece) for piece in pieces)
        if rows != message.first:
            raise ProtocolError(f"key {message.key!r}: {message.first} rows should have come before, got {rows}")
        if pieces and _span(pieces[-1])[1] >= _span(received)[0]:
            raise ProtocolError(f"key {message.key!r}: row ids must be increasing")
        pieces.append(received)
        return effects

    def _give_up(self, place: tuple[Peer, Key, int]) -> list[Effect]:
        """Answer and free what will not be completed any more; its last message was, or will be, refused."""
        pieces = self._pieces.pop(place)
        answers: list[Effect] = [Send(piece.peer, piece.request, m.Done()) for piece in pieces]
        return answers + [effect for piece in pieces for effect in freed(piece.slot)]

    def _join(self, received: Received, message: WithRows) -> tuple[Received, list[Effect]]:
        """Return a contribution as if it had come in one message, and what makes it so."""
        pieces = self._pieces.pop((received.peer, message.key, message.start))
        if len(pieces) == 1:
            return received, []
        answers: list[Effect] = [Send(piece.peer, piece.request, m.Done()) for piece in pieces[:-1]]
        slot = self._rounds.new_slot()
        parts = [piece.slot for piece in pieces if piece.slot is not None]
        spec = TensorSpec(message.shape, message.dtype)
        whole = msgspec.structs.replace(message, first=0, count=message.total)
        nbytes = sum(piece.nbytes for piece in pieces)
        joined = JoinRows(slot, parts, row_bytes(spec))
        return msgspec.structs.replace(received, message=whole, slot=slot, nbytes=nbytes), [*answers, joined]

    def forget_peer(self, peer: Peer) -> list[Effect]:
        """Free what a connection that is over has not completed."""
        names = [name for name in self._pieces if name[0] == peer]
        return [effect for name in names for piece in self._pieces.pop(name) for effect in freed(piece.slot)]

    @property
    def open_slots(self) -> list[Slot]:
        """The slots of contributions that are not whole."""
        return [piece.slot for pieces in self._pieces.values() for piece in pieces if piece.slot is not None]


def _count(piece: Received) -> int:
    assert isinstance(piece.message, WithRows), "only these are kept"
    return piece.message.count


def _span(received: Received) -> tuple[int, int]:
    assert received.span is not None, "it was checked"
    return received.span
