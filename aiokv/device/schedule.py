"""The decisions of a store on devices: what is copied, added, updated and published when, and what is used again.

A payload is copied to its chunk's device on one stream, while another stream computes, and a third one copies values
to the host. The order of what uses one buffer is kept by events, so the host waits for nothing. Where a device is
behind, launches are held back for a moment, so that those of several chunks become one. A version is published
when the event of its update has been reported; a buffer is used for something else when all events of what used it
have been.

No device is needed here: `handle` takes stimuli and returns effects, and events may be reported in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from aiokv.device import records as r
from aiokv.device.flow import Flow
from aiokv.device.outgoing import Outgoing, Value
from aiokv.device.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from aiokv.device.records import Address, Buffer, Effect, Event, Fresh
    from aiokv.errors import AiokvError
    from aiokv.types import Slot, Version


@dataclass(slots=True, eq=False)
class _Chunk:
    device: int
    nbytes: int
    value: Value
    state: dict[str, Buffer] = field(default_factory=dict)
    earlier: dict[Version, Value] = field(default_factory=dict)
    is_gone: bool = False

    def at(self, version: Version) -> Value:
        """Return the value that is, or was, a version."""
        return self.value if version == self.value.version else self.earlier[version]


@dataclass(slots=True)
class _Updating:
    """What is to be done when an update is: `fresh` says that it has begun the chunk's state."""

    address: Address
    chunk: _Chunk
    value: Value
    keeps: bool
    fresh: bool


class Schedule:
    """Slots, chunks and buffers on devices, and what is under way.

    Args:
        limits: for each device how many bytes all buffers together may have.
        kind_of: of works that are equal by this, several can be done in one launch; None: this one is done alone.
    """

    def __init__(self, limits: Sequence[int], kind_of: Callable[[object], Hashable] = lambda _: None) -> None:
        self.loads = [0] * len(limits)
        """Bytes of the values of the chunks on each device."""
        self._flow = Flow(limits, kind_of)
        self._outgoing = Outgoing(self._flow)
        self._slots = Slots(self._flow)
        self._chunks: dict[Address, _Chunk] = {}
        self._updating: dict[Event, _Updating] = {}

    # --- what there is ---

    @property
    def open_slots(self) -> int:
        """How many slots are not used up."""
        return len(self._slots)

    @property
    def landed_bytes(self) -> int:
        """How many bytes they take."""
        return self._slots.landed_bytes

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self._flow.is_idle

    def has_slot(self, slot: Slot) -> bool:
        """Tell whether a slot is on a device."""
        return slot in self._slots

    def device_of(self, what: Slot | Address) -> int | None:
        """Return on which device a slot or a chunk is; None if it is on none."""
        if not isinstance(what, tuple):
            return self._slots.device_of(what)
        found = self._chunks.get(what)
        return None if found is None else found.device

    def nbytes_of(self, slot: Slot) -> int:
        """Return how many bytes are in a slot."""
        return self._slots.nbytes_of(slot)

    def version_of(self, chunk: Address) -> Version:
        """Return the version of a chunk's value."""
        return self._chunks[chunk].value.version

    def state_of(self, chunk: Address) -> dict[str, int]:
        """Return the names of what is kept for a chunk, and their bytes."""
        return {name: self._flow.memory.nbytes(buffer) for name, buffer in self._chunks[chunk].state.items()}

    # --- the door ---

    def handle(self, stimulus: r.Stimulus) -> list[Effect]:
        """Take in one stimulus and return what is to be done.

        Raises:
            DeviceMemoryError: a device has not enough memory; nothing has changed.
        """
        match stimulus:
            case r.Completed(event, error):
                self._completed(event, error)
            case r.Measure():
                self._measure(stimulus)
            case r.Update():
                self._update(stimulus)
            case r.Requested(ticket, address, version, state):
                chunk = self._chunks[address]
                self._outgoing.request(ticket, chunk.at(version), chunk.nbytes, chunk.device)
                if state:
                    self._outgoing.fetch(ticket, chunk.state, chunk.device)
                self._outgoing.deliver(ticket)
            case r.Borrowed(ticket, slots):
                for name, slot in slots.items():
                    buffer, device = self._slots.whole(slot)
                    self._outgoing.fetch(ticket, {name: buffer}, device)
            case r.Sent(ticket):
                self._outgoing.sent(ticket)
            case r.Landed() | r.Unpack() | r.Fold() | r.Compare() | r.Cut() | r.Freed():
                self._change_slots(stimulus)
            case _:
                self._arrange_chunks(stimulus)
        return self._flow.take_effects()

    def _change_slots(self, stimulus: r.Landed | r.Unpack | r.Fold | r.Compare | r.Cut | r.Freed) -> None:
        match stimulus:
            case r.Landed(slot, nbytes, device):
                self._slots.land(slot, nbytes, device)
            case r.Unpack():
                self._slots.unpack(stimulus)
            case r.Fold(target, sources, work, nbytes, joins):
                self._slots.fold(target, sources, work, nbytes, joins=joins)
            case r.Compare(slot, address, read, work, nbytes):
                chunk = self._chunks[address]
                values = [chunk.value.buffer, chunk.at(read).buffer]
                self._slots.compare(slot, chunk.device, work, nbytes, values)
            case r.Cut(slot, parts):
                self._slots.cut(slot, parts)
            case r.Freed(slot):
                self._slots.free(slot)
            case _:
                assert_never(stimulus)

    def _arrange_chunks(
        self, stimulus: r.Install | r.Divide | r.Restore | r.Reset | r.Forgotten | r.Renumbered | r.Retired
    ) -> None:
        match stimulus:
            case r.Install():
                self._install(stimulus)
            case r.Divide(address, parts):
                self._divide(address, parts)
            case r.Restore(chunk, value, state):
                self._restore(self._chunks[chunk], value, state)
            case r.Reset(chunk):
                self._reset(self._chunks[chunk])
            case r.Forgotten(chunk):
                self._end_chunk(self._chunks.pop(chunk))
            case r.Renumbered(chunk, version):
                self._chunks[chunk].value.version = version
            case r.Retired(chunk, versions):
                for version in versions:
                    self._outgoing.retire(self._chunks[chunk].earlier.pop(version))
            case _:
                assert_never(stimulus)

    # --- chunks ---

    def _install(self, stimulus: r.Install) -> None:
        nbytes = stimulus.nbytes
        # The one with the fewest bytes; of equal ones the first.
        device = min(range(len(self.loads)), key=lambda number: (self.loads[number], number))
        self._flow.memory.check(device, nbytes)
        if stimulus.slot is None:
            value = Value(0, self._flow.take(device, nbytes))
            self._flow.launch(device, stimulus.zero, [value.buffer], new=[value.buffer])
        else:
            host, buffer = self._flow.bring(stimulus.slot, nbytes, device)
            # Everybody wants the first value, and here it is already.
            value = Value(0, buffer, host)
        self._chunks[stimulus.chunk] = _Chunk(device, nbytes, value)
        self.loads[device] += nbytes

    def _begin_state(self, chunk: _Chunk, fresh: Mapping[str, Fresh]) -> None:
        for name, (nbytes, work) in fresh.items():
            buffer = chunk.state[name] = self._flow.take(chunk.device, nbytes)
            self._flow.launch(chunk.device, work, [buffer, chunk.value.buffer], new=[buffer])

    def _reset(self, chunk: _Chunk) -> None:
        for buffer in chunk.state.values():
            self._flow.drop(buffer)
        chunk.state = {}

    def _divide(
        self, address: Address, parts: Sequence[tuple[Address, tuple[int, int], Mapping[str, tuple[int, int]]]]
    ) -> None:
        whole = self._chunks[address]
        device, values = whole.device, [whole.value, *whole.earlier.values()]
        del self._chunks[address]
        for part, (first, nbytes), state in parts:
            value, *earlier = [
                Value(value.version, self._flow.copied(device, value.buffer, first, nbytes)) for value in values
            ]
            cut = {name: self._flow.copied(device, whole.state[name], *place) for name, place in state.items()}
            self._chunks[part] = _Chunk(device, nbytes, value, cut, {value.version: value for value in earlier})
            self.loads[device] += nbytes
        self._end_chunk(whole)

    def _restore(self, chunk: _Chunk, value: Slot | None, state: Mapping[str, tuple[Slot, int]]) -> None:
        wanted = sum(nbytes for _, nbytes in state.values()) + (0 if value is None else chunk.nbytes)
        self._flow.memory.check(chunk.device, wanted)
        if value is not None:
            host, buffer = self._flow.bring(value, chunk.nbytes, chunk.device)
            self._outgoing.retire(chunk.value)
            chunk.value = Value(chunk.value.version, buffer, host)
        self._reset(chunk)
        for name, (slot, nbytes) in state.items():
            host, chunk.state[name] = self._flow.bring(slot, nbytes, chunk.device)
            self._flow.drop(host)

    def _end_chunk(self, chunk: _Chunk) -> None:
        chunk.is_gone = True
        self.loads[chunk.device] -= chunk.nbytes
        self._reset(chunk)
        for value in (*chunk.earlier.values(), chunk.value):
            self._outgoing.retire(value)

    # --- updates ---

    def _begin(self, chunk: _Chunk, slot: Slot, fresh: Mapping[str, Fresh], more: int) -> None:
        """Have room for a sum where the chunk is, for state and for `more` bytes; then make the state."""
        moved = self._slots.nbytes_of(slot) if self._slots.device_of(slot) != chunk.device else 0
        self._flow.memory.check(chunk.device, moved + more + sum(each.nbytes for each in fresh.values()))
        self._begin_state(chunk, fresh)

    def _measure(self, stimulus: r.Measure) -> None:
        chunk = self._chunks[stimulus.chunk]
        self._begin(chunk, stimulus.slot, stimulus.fresh, stimulus.nbytes)
        total = self._slots.at(stimulus.slot, chunk.device)
        results = self._flow.take(chunk.device, stimulus.nbytes)
        buffers = [results, chunk.value.buffer, total, *(chunk.state[name] for name in stimulus.names)]
        self._flow.launch(chunk.device, stimulus.work, buffers, new=[results])
        self._outgoing.fetch(stimulus.ticket, {"": results}, chunk.device)
        self._flow.drop(results)

    def _update(self, stimulus: r.Update) -> None:
        chunk = self._chunks[stimulus.chunk]
        self._begin(chunk, stimulus.slot, stimulus.fresh, stimulus.out)
        new = self._slots.take(stimulus.slot, chunk.device)
        if stimulus.work is not None:
            new = self._compute(stimulus, chunk, new)
        value = Value(stimulus.version, new)
        updating = _Updating(stimulus.chunk, chunk, value, stimulus.keeps, bool(stimulus.fresh))
        event = self._flow.writer(new)
        if event is None:
            self._publish(updating, self._flow.errors.get(new))
            return
        self._updating[event] = updating
        if chunk.value.wanted:
            # Somebody will most likely want this one, too.
            self._outgoing.copy(value, chunk.nbytes, chunk.device)

    def _compute(self, stimulus: r.Update, chunk: _Chunk, total: Buffer) -> Buffer:
        """Launch the work of an update; return where the new value is."""
        state = [chunk.state[name] for name in stimulus.names]
        buffers = [chunk.value.buffer, total, *state]
        read = []
        if stimulus.read is not None:
            read.append(chunk.at(stimulus.read).buffer)
        if not stimulus.out:
            self._flow.launch(chunk.device, stimulus.work, buffers + read, changed=[total], spared=state)
            return total
        new = self._flow.take(chunk.device, stimulus.out)
        self._flow.launch(chunk.device, stimulus.work, [*buffers, new, *read], new=[new], spared=state)
        self._flow.drop(total)
        return new

    def _publish(self, updating: _Updating, error: AiokvError | None) -> None:
        chunk, value = updating.chunk, updating.value
        if chunk.is_gone:
            self._outgoing.retire(value)
            return
        if error is None:
            before, chunk.value = chunk.value, value
            if updating.keeps:
                chunk.earlier[before.version] = before
            else:
                self._outgoing.retire(before)
        else:
            self._outgoing.retire(value)
            chunk.value.version = value.version
            if updating.fresh:
                self._reset(chunk)
        self._flow.add(r.Published(updating.address, value.version, error))

    # --- what is done ---

    def _completed(self, event: Event, error: AiokvError | None) -> None:
        self._flow.end(event, error)
        self._slots.end(event)
        if event in self._updating:
            self._publish(self._updating.pop(event), error)
        self._outgoing.end(event, error)

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        values = dict.fromkeys([*self._outgoing.values(), *(each.value for each in self._updating.values())])
        held = self._slots.buffers() + self._outgoing.buffers()
        for chunk in self._chunks.values():
            values |= dict.fromkeys([chunk.value, *chunk.earlier.values()])
            held += chunk.state.values()
        for value in values:
            held += [value.buffer] if value.host is None else [value.buffer, value.host]
            assert value.copying is not None or not value.waiting, "who waits, waits for a copy"
        self._flow.validate(held)
