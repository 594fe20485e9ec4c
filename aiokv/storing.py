"""A server's effects on its memory, carried out: what the server on the network and the store in this process share."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from aiokv.checkpoint.saving import ARRAYS, LEFT, STEPS
from aiokv.checkpoint.tensorfile import pack, unpack
from aiokv.core import effects as ef
from aiokv.core.stimuli import Applied, Decoded, Normed, Restored
from aiokv.errors import AiokvError, DataError, ProtocolError, UpdateRefusedError
from aiokv.store.states import BEFORE, BEFORE_IDS, VALUE, only, piece_of
from aiokv.store.table import span_of
from aiokv.types import ROW_ID_BYTES
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from aiokv.store.memory import ParameterStore, Stored
    from aiokv.types import Slot

logger = logging.getLogger("aiokv")

DRAWING_BYTES = 4096
"""To draw the first values of a row takes about as long as to copy so many bytes."""


def perform(store: ParameterStore, effect: ef.Effect) -> Applied | Normed | Decoded | Restored | None:
    """Carry out one effect; return the stimulus that it ends in, if it ends in one.

    Raises:
        TypeError: the effect has nothing to do with the store.
    """
    match effect:
        case ef.Apply():
            return _apply(store, effect, None)
        case ef.ApplyRows() | ef.JoinRows():
            begin_rows(store, effect)
            return finish_rows(store, effect, compute_rows(store, effect))
        case ef.Norms():
            return _norms(store, effect)
        case ef.Decode():
            return _decode(store, effect)
        case ef.Restore():
            return _restore(store, effect)
        case _:
            _perform_on_chunks(store, effect)
    return None


def _perform_on_chunks(store: ParameterStore, effect: ef.Effect) -> None:
    match effect:
        case ef.Skip(key, start, version, slot):
            store.skip(key, start, version, slot)
        case ef.Retire(key, start, versions):
            store.retire(key, start, versions)
        case ef.Install(key, start, dtype, size, slot, pieces):
            store.install(key, start, dtype, size, slot, pieces)
        case ef.InstallRows(key, start, _, spec, initializer, lazy, slot):
            store.install_rows(key, start, spec, initializer, slot, lazy=lazy)
        case ef.Divide(key, start, chunks):
            store.divide(key, start, chunks)
        case ef.Forget(key, start):
            store.forget(key, start)
        case ef.Configure():
            store.reset_states()
        case ef.ForgetReplicas(peer):
            store.replicas.forget_peer(peer)
        case _:
            _perform_on_slots(store, effect)


def _decode(store: ParameterStore, effect: ef.Decode) -> Decoded:
    try:
        store.decode(effect.slot, effect.target, effect.codec, effect.dtype, effect.sizes)
    except ProtocolError as error:
        return Decoded(effect.target, error)
    return Decoded(effect.target)


def _perform_on_slots(store: ParameterStore, effect: ef.Effect) -> None:
    match effect:
        case ef.Fold(target, source, dtype):
            store.fold(target, source, dtype)
        case ef.Weigh(slot, dtype, factor):
            store.weigh(slot, dtype, factor)
        case ef.Compensate(slot, dtype, key, start, read, lamda):
            store.compensate(slot, dtype, key, start, read, lamda)
        case ef.Combine(target, sources, dtype, reduction):
            store.combine(target, sources, dtype, reduction)
        case ef.Prepare(codec):
            store.prepare(codec, "reference")
        case ef.Split(slot, parts):
            store.split(slot, parts)
        case ef.Widen(slot, dtype):
            store.widen(slot, dtype)
        case ef.Free(slot):
            store.free(slot)
        case _:
            raise TypeError(f"not for a store: {effect!r}")


def span(store: ParameterStore, message: m.Message, slot: Slot | None) -> tuple[int, int] | None:
    """Return the lowest and the highest row id that came with a message; see `aiokv.core.stimuli.Received`."""
    if isinstance(message, m.PullRows):
        whole = len(message.rows) // ROW_ID_BYTES * ROW_ID_BYTES
        return span_of(np.frombuffer(message.rows[:whole], np.int64))
    if isinstance(message, m.InitRows | m.PushRows) and slot is not None:
        return span_of(store.row_ids(slot, message.count))
    return None


def _apply(store: ParameterStore, update: ef.Apply, slots: list[Slot] | None, factors: Sequence[float] = ()) -> Applied:
    key, start, version = update.key, update.start, update.version
    how = (update.rule, update.clock, update.divisor)
    error: AiokvError | None = None
    store.count_staleness(update.staleness)
    try:
        if slots is None:
            store.apply(key, start, version, update.slot, *how, update.norms, update.read, keep=update.keep)
        else:
            store.apply_rows(key, start, version, slots, *how, factors, keep=update.keep)
    except UpdateRefusedError as refused:
        error = refused
    except Exception as failed:  # a rule of a user's own may raise anything
        error = refusal(update, failed)
        logger.exception(error.message)
    if error is not None:
        store.keep(key, start, version)
    return Applied(key, start, version, error)


def begin_rows(store: ParameterStore, effect: ef.ApplyRows | ef.JoinRows) -> None:
    """Begin with an effect on many rows, which `compute_rows` and `finish_rows` carry out."""
    if isinstance(effect, ef.JoinRows):
        store.make_room(effect.slot, store.nbytes(effect.parts))


def compute_rows(store: ParameterStore, effect: ef.ApplyRows | ef.JoinRows) -> Applied | None:
    """Do the work; it may run in a thread, while the store does nothing but give memory for what lands."""
    if isinstance(effect, ef.ApplyRows):
        return _apply(store, effect.update, effect.slots, effect.factors)
    store.join_rows(effect.slot, effect.parts, effect.row_bytes)
    return None


def finish_rows(store: ParameterStore, effect: ef.ApplyRows | ef.JoinRows, applied: Applied | None) -> Applied | None:
    """Free what is used up; return the stimulus that the effect ends in, if it ends in one."""
    for slot in effect.slots if isinstance(effect, ef.ApplyRows) else effect.parts:
        store.free(slot)
    return applied


def cost_of_rows(store: ParameterStore, effect: ef.Effect) -> int:
    """Return what an effect has to do with rows, in bytes that could be copied in the same time; 0 for all others."""
    match effect:
        case ef.JoinRows(_, parts):
            return store.nbytes(parts)
        case ef.ApplyRows(update, slots):
            key, start, count = update.key, update.start, store.count_updated(update.key, update.start, slots)
        case ef.Send(payload=ef.StoredRows(key, start, _, rows)):
            count = len(rows) // ROW_ID_BYTES
        case _:
            return 0
    return count * (DRAWING_BYTES + store.table(key, start).row_nbytes)


def _norms(store: ParameterStore, effect: ef.Norms) -> Normed:
    key, start, phase = effect.key, effect.start, effect.phase
    try:
        sums = store.norms(key, start, effect.slot, effect.rule, phase, effect.clock, effect.divisor, effect.gathered)
    except Exception as failed:  # a pusher must hear of it, whatever it is
        error = refusal(effect, failed)
        logger.exception(error.message)
        return Normed(key, start, effect.version, phase, [], error)
    return Normed(key, start, effect.version, phase, sums)


def state_bytes(store: ParameterStore, payload: ef.StoredState) -> bytes:
    """Return what is saved of a chunk, as it goes over the network."""
    key, start = payload.chunk_key, payload.chunk_start
    arrays: dict[str, NDArray[Any]] = {}
    facts, left = {STEPS: str(store.steps(key, start))}, -1
    if payload.arrays:
        arrays, left = store.saved(key, start, payload.version, payload.key, payload.first, payload.names)
    else:
        facts[ARRAYS] = msgspec.json.encode(store.described(key, start, payload.key)).decode()
    return pack(arrays, facts | {LEFT: str(left)})


def copy_bytes(store: ParameterStore, payload: ef.StoredCopy) -> bytes:
    """Return all that is kept of a chunk, as it goes to a standby."""
    key, start = payload.key, payload.start
    arrays = store.whole(key, start, payload.version) | store.before(key, start, payload.previous)
    return pack(arrays, {STEPS: str(store.steps(key, start))})


def copy_of(stored: Stored, before: Stored | None) -> bytes:
    """Return all that is kept of a chunk that is given, as it goes to a standby. See `copy_bytes`."""
    arrays = {VALUE: stored.value.buffer.view(stored.dtype)} | (stored.state or {})
    if before is not None:
        arrays[BEFORE] = before.value.buffer.view(stored.dtype)
    return pack(arrays, {STEPS: str(stored.steps)})


def _restore(store: ParameterStore, effect: ef.Restore) -> Restored:
    error: AiokvError | None = None
    try:
        arrays, facts = unpack(store.content(effect.slot), f"key {effect.key!r}")
        steps, previous = int(facts[STEPS]), effect.previous
        before = {name: arrays.pop(name) for name in (BEFORE, BEFORE_IDS) if previous >= 0 and name in arrays}
        store.restore(effect.key, effect.start, effect.first, arrays, steps, effect.rule)
        if previous >= 0:
            store.restore_before(effect.key, effect.start, previous, before)
    except AiokvError as refused:
        error = refused
    except (KeyError, ValueError) as failed:
        error = DataError(f"key {effect.key!r}: expected the number of updates, got none: {failed}", key=effect.key)
    return Restored(effect.peer, effect.request, error)


def state_of(stored: Stored, payload: ef.StoredState) -> bytes:
    """Return what is saved of a chunk that is given, as it goes over the network. See `state_bytes`."""
    facts = {STEPS: str(stored.steps), LEFT: "-1"}
    return pack(only(piece_of(stored, payload.key), payload.names), facts)


def refusal(effect: ef.Apply | ef.Norms, failed: Exception) -> AiokvError:
    """Return what is said to those whose update could not be made; what is no error of ours is logged."""
    if isinstance(failed, AiokvError) and failed.counted:
        return failed
    key, version = effect.key, effect.version
    text = f"key {key!r}, round {version}: the update could not be made: {type(failed).__name__}: {failed}"
    return UpdateRefusedError(text, key=key, round=version)
