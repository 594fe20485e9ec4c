"""A server's effects on a memory that is on devices: what takes time there ends in a stimulus later on."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from aiokv import storing
from aiokv.core import effects as ef
from aiokv.core.stimuli import Applied, Normed
from aiokv.errors import AiokvError, NotFiniteError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.stimuli import Decoded, Restored
    from aiokv.store.device import DeviceStore
    from aiokv.store.device_chunks import Reading
    from aiokv.store.device_slots import Lent
    from aiokv.store.memory import Stored

    Later = Callable[[Applied | Normed], None]
    Then = Callable[[memoryview, Callable[[], None]], None]
    Failed = Callable[[AiokvError], None]


def perform(store: DeviceStore, effect: ef.Effect, later: Later) -> Applied | Normed | Decoded | Restored | None:
    """Carry out one effect. See `aiokv.storing.perform`.

    Args:
        store: the memory.
        effect: what is to be done.
        later: takes the stimulus in which the effect ends, if that is not returned.
    """
    match effect:
        case ef.Apply(key, start):
            return _apply(store, effect, later)
        case ef.Norms(key, start) if store.is_on_device(key, start):
            return _norms(store, effect, later)
        case _:
            return storing.perform(store, effect)


def _apply(store: DeviceStore, effect: ef.Apply, later: Later) -> Applied | None:
    key, start, version = effect.key, effect.start, effect.version
    refusal = store.refusal(key, start)
    if refusal is not None:
        store.skip(key, start, version, effect.slot)
        return Applied(key, start, version, refusal)
    if not store.is_on_device(key, start):
        applied = storing.perform(store, effect)
        assert isinstance(applied, Applied), "an update on the host is made at once"
        return applied
    assert effect.slot is not None, "what is on a device has elements"
    store.count_staleness(effect.staleness)
    named = key, start, version, effect.slot, effect.rule, effect.clock, effect.divisor, effect.norms, effect.read
    try:
        store.begin_apply(*named, lambda error: later(Applied(key, start, version, error)), keep=effect.keep)
    except Exception as failed:  # noqa: BLE001 - who has pushed must hear of it, whatever it is
        store.keep(key, start, version)
        return Applied(key, start, version, storing.refusal(effect, failed))
    return None


def _norms(store: DeviceStore, effect: ef.Norms, later: Later) -> Normed | None:
    key, start, version, phase = effect.key, effect.start, effect.version, effect.phase
    assert effect.slot is not None, "what is on a device has elements"

    def done(found: list[tuple[float, ...]] | AiokvError) -> None:
        if isinstance(found, AiokvError):
            later(Normed(key, start, version, phase, [], found))
        else:
            later(Normed(key, start, version, phase, found))

    named = key, start, effect.slot, effect.rule, phase, effect.clock, effect.divisor, effect.gathered
    try:
        store.begin_norms(*named, done)
    except Exception as failed:  # noqa: BLE001 - as in `_apply`
        return Normed(key, start, version, phase, [], storing.refusal(effect, failed))
    return None


def read(store: DeviceStore, payload: ef.Payload, then: Then, failed: Failed) -> bool:
    """Have a payload in the host's memory, if it has to be copied from a device for that; tell whether it has.

    Args:
        store: the memory.
        payload: what is wanted.
        then: gets the bytes, and what to call when they are not needed any longer. It may be called at once.
        failed: gets the error, if there is one.
    """
    match payload:
        case ef.StoredChunks(chunks) if any(store.is_on_device(chunk.key, chunk.start) for chunk in chunks):
            _read_all(store, chunks, then, failed)
        case ef.StoredChunk(key, start, version) if store.is_on_device(key, start):
            store.request(key, start, version, lambda reading: _give(reading, then, failed))
        case ef.StoredDifference(key, start, version) if store.is_on_device(key, start):
            store.request(key, start, version, lambda reading: _difference(store, payload, reading, then, failed))
        case ef.StoredState(key, start, version) if payload.arrays and store.is_on_device(key, start):
            state_of = functools.partial(storing.state_of, payload=payload)
            store.request(key, start, version, lambda reading: _pack(state_of, reading, then, failed), state=True)
        case ef.StoredCopy(key, start) if store.is_on_device(key, start):
            _read_copy(store, payload, then, failed)
        case ef.StoredSum(slot) if store.is_away([slot]):
            store.borrow([slot], lambda lent: _lend(lent, then, failed))
        case ef.StoredSlots(slots) if store.is_away(slots):
            store.borrow(slots, lambda lent: _lend(lent, then, failed))
        case _:
            return False
    return True


def _give(reading: Reading, then: Then, failed: Failed) -> None:
    if reading.error is None:
        then(reading.stored.value.buffer.data, reading.release)
    else:
        reading.release()
        failed(reading.error)


def _read_all(store: DeviceStore, chunks: list[ef.StoredChunk], then: Then, failed: Failed) -> None:
    """Give several chunks together, when the last one is there."""
    parts: dict[int, bytes] = {}
    errors: list[AiokvError] = []

    def there(number: int, part: bytes, error: AiokvError | None) -> None:
        parts[number] = part
        errors.extend([] if error is None else [error])
        if len(parts) < len(chunks):
            return
        if errors:
            failed(errors[0])
        else:
            then(memoryview(b"".join(parts[place] for place in range(len(chunks)))), _nothing)

    def taken(number: int, reading: Reading) -> None:
        part = reading.stored.value.buffer.tobytes()
        reading.release()
        there(number, part, reading.error)

    for number, chunk in enumerate(chunks):
        if store.is_on_device(chunk.key, chunk.start):
            store.request(chunk.key, chunk.start, chunk.version, functools.partial(taken, number))
            continue
        value = store.acquire(chunk.key, chunk.start, chunk.version)
        part = value.buffer.tobytes()
        store.release(value)
        there(number, part, None)


def _difference(store: DeviceStore, payload: ef.StoredDifference, reading: Reading, then: Then, failed: Failed) -> None:
    stored, error = reading.stored, reading.error
    if error is None:
        named = payload.key, payload.start, payload.peer
        try:
            difference = store.replicas.difference(*named, stored.value.buffer.view(stored.dtype), payload.codec)
        except NotFiniteError as not_finite:
            error = not_finite
    reading.release()
    if error is None:
        then(difference, _nothing)
    else:
        failed(error)


def _read_copy(store: DeviceStore, payload: ef.StoredCopy, then: Then, failed: Failed) -> None:
    """Give all that is kept of a chunk, with the value of a version before if that is wanted."""
    key, start = payload.key, payload.start
    found: list[Reading] = []

    def there(reading: Reading) -> None:
        found.append(reading)
        if len(found) == 1 + (payload.previous >= 0):
            _pack_copy(found, payload, then, failed)

    store.request(key, start, payload.version, there, state=True)
    if payload.previous >= 0:
        store.request(key, start, payload.previous, there)


def _pack_copy(found: list[Reading], payload: ef.StoredCopy, then: Then, failed: Failed) -> None:
    errors = [reading.error for reading in found if reading.error is not None]
    by_version = {reading.stored.value.version: reading.stored for reading in found}
    packed = b"" if errors else storing.copy_of(by_version[payload.version], by_version.get(payload.previous))
    for reading in found:
        reading.release()
    if errors:
        failed(errors[0])
    else:
        then(memoryview(packed), _nothing)


def _pack(pack: Callable[[Stored], bytes], reading: Reading, then: Then, failed: Failed) -> None:
    if reading.error is not None:
        reading.release()
        failed(reading.error)
        return
    packed = pack(reading.stored)
    reading.release()
    then(memoryview(packed), _nothing)


def _lend(lent: Lent, then: Then, failed: Failed) -> None:
    if lent.error is None:
        then(lent.content, lent.release)
    else:
        lent.release()
        failed(lent.error)


def _nothing() -> None:
    pass
