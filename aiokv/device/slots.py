"""Payloads and sums on devices. Contributions that are there at once are added to their sum in one go.

An addition waits while something that it needs is still on its way: those that come meanwhile join it. So what comes
late is added as it comes, what comes together goes over memory once, and nothing waits for what is not there yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiokv.device.records import Kind, Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.device.flow import Flow
    from aiokv.device.records import Buffer, Event, Unpack
    from aiokv.types import Slot


@dataclass(slots=True)
class _Addition:
    """What is to be added to a sum, to another buffer if the sum is wider, when the events are there."""

    work: Any
    into: Buffer | None = None
    sources: list[Buffer] = field(default_factory=list)
    needs: dict[Event, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Slot:
    """What lies in a slot: `nbytes` when all is added that waits."""

    buffer: Buffer
    device: int
    nbytes: int
    addition: _Addition | None = None


class Slots:
    """The slots of a store on devices.

    Args:
        flow: who orders copies and launches.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._slots: dict[Slot, _Slot] = {}
        self._waiting: dict[Event, list[Slot]] = {}

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def landed_bytes(self) -> int:
        """How many bytes all of them have."""
        return sum(slot.nbytes for slot in self._slots.values())

    def device_of(self, slot: Slot) -> int | None:
        """Return on which device a slot is; None if it is on none."""
        found = self._slots.get(slot)
        return None if found is None else found.device

    def nbytes_of(self, slot: Slot) -> int:
        """Return how many bytes are in a slot."""
        return self._slots[slot].nbytes

    def land(self, slot: Slot, nbytes: int, device: int) -> None:
        """Copy what has landed in the host's memory to a device.

        Raises:
            DeviceMemoryError: there is no room for it.
        """
        self._flow.memory.check(device, nbytes)
        host, buffer = self._flow.bring(slot, nbytes, device)
        self._slots[slot] = _Slot(buffer, device, nbytes)
        self._flow.drop(host)

    def unpack(self, wanted: Unpack) -> None:
        """Decode what has landed in the host's memory, on a device.

        Raises:
            DeviceMemoryError: there is no room for payload and values.
        """
        device = wanted.device
        self._flow.memory.check(device, wanted.nbytes + wanted.size)
        host, payload = self._flow.bring(wanted.slot, wanted.nbytes, device, wanted.first)
        values = self._flow.take(device, wanted.size)
        self._flow.launch(device, wanted.work, [values, payload], new=[values])
        self._slots[wanted.target] = _Slot(values, device, wanted.size)
        for buffer in (host, payload):
            self._flow.drop(buffer)

    def fold(self, target: Slot, sources: Sequence[Slot], work: Any, nbytes: int, *, joins: bool) -> None:
        """Make something of a slot and of others, which are no more then. See `aiokv.device.records.Fold`.

        Raises:
            DeviceMemoryError: there is no room for it.
        """
        total = self._slots[target]
        device = total.device
        grown = nbytes if nbytes != total.nbytes else 0
        moved = sum(part.nbytes for part in map(self._slots.__getitem__, sources) if part.device != device)
        self._flow.memory.check(device, grown + moved)
        added = [self.take(source, device) for source in sources]
        addition = total.addition
        joined = addition.work.joined(work) if joins and addition is not None and not grown else None
        if addition is None or joined is None:
            self.settle(target)
            addition = total.addition = _Addition(work, self._flow.take(device, nbytes) if grown else None)
        else:
            addition.work = joined
        addition.sources += added
        total.nbytes = nbytes
        for buffer in (total.buffer, *added):
            event = self._flow.writer(buffer)
            if event is not None:
                addition.needs[event] = None
                self._waiting.setdefault(event, []).append(target)
        if not joins or not addition.needs:
            self.settle(target)

    def compare(self, slot: Slot, device: int, work: Any, nbytes: int, values: list[Buffer]) -> None:
        """Make something else of a slot by comparing values on a device. See `aiokv.device.records.Compare`.

        Raises:
            DeviceMemoryError: there is no room for it.
        """
        found = self._slots[slot]
        grown = nbytes if nbytes != found.nbytes else 0
        self._flow.memory.check(device, grown + (found.nbytes if found.device != device else 0))
        buffer = self.at(slot, device)
        if not grown:
            self._flow.launch(device, work, [buffer, *values], changed=[buffer])
            return
        found.buffer, found.nbytes = self._flow.take(device, nbytes), nbytes
        self._flow.launch(device, work, [found.buffer, buffer, *values], new=[found.buffer])
        self._flow.drop(buffer)

    def settle(self, slot: Slot) -> None:
        """Launch what still waits to be added."""
        total = self._slots[slot]
        addition, total.addition = total.addition, None
        if addition is None:
            return
        buffers = [total.buffer, *addition.sources]
        if addition.into is None:
            self._flow.launch(total.device, addition.work, buffers, changed=buffers[:1])
        else:
            self._flow.launch(total.device, addition.work, [addition.into, *buffers], new=[addition.into])
            self._flow.drop(total.buffer)
            total.buffer = addition.into
        for source in addition.sources:
            self._flow.drop(source)

    def whole(self, slot: Slot) -> tuple[Buffer, int]:
        """Return where a slot's content is, with all that is added to it so far, and on which device."""
        self.settle(slot)
        found = self._slots[slot]
        return found.buffer, found.device

    def end(self, event: Event) -> None:
        """Take note that a copy or a launch is done, or could not be."""
        for slot in self._waiting.pop(event, ()):
            total = self._slots.get(slot)
            if total is not None and total.addition is not None:
                total.addition.needs.pop(event, None)
                if not total.addition.needs:
                    self.settle(slot)

    def at(self, slot: Slot, device: int) -> Buffer:
        """Return where a slot's content is, on a device to which it is copied if it is on another one."""
        self.settle(slot)
        found = self._slots[slot]
        if found.device != device:
            buffer = self._flow.take(device, found.nbytes)
            self._flow.copy(Stream(device, Kind.IN), buffer, found.buffer, found.nbytes)
            self._flow.drop(found.buffer)
            found.buffer, found.device = buffer, device
        return found.buffer

    def take(self, slot: Slot, device: int) -> Buffer:
        """Return where a slot's content is, on a device; the slot is no more."""
        buffer = self.at(slot, device)
        del self._slots[slot]
        return buffer

    def cut(self, slot: Slot, parts: Sequence[tuple[Slot, int, int]]) -> None:
        """Copy parts of a slot, with their first byte and their number of bytes, into new slots; it is no more."""
        device = self._slots[slot].device
        whole = self.take(slot, device)
        # What is cut leaves, so the limit is not looked at.
        for part, first, nbytes in parts:
            self._slots[part] = _Slot(self._flow.copied(device, whole, first, nbytes), device, nbytes)
        self._flow.drop(whole)

    def free(self, slot: Slot) -> None:
        """Forget a slot, and what waits to be added to it."""
        for buffer in _buffers(self._slots.pop(slot)):
            self._flow.drop(buffer)

    # --- for tests ---

    def buffers(self) -> list[Buffer]:
        """Return the buffers of all slots.

        Raises:
            AssertionError: something waits for nothing.
        """
        for slot in self._slots.values():
            assert slot.addition is None or slot.addition.needs, "what could be added is added"
        return [buffer for slot in self._slots.values() for buffer in _buffers(slot)]


def _buffers(slot: _Slot) -> list[Buffer]:
    addition = slot.addition
    if addition is None:
        return [slot.buffer]
    return [slot.buffer, *addition.sources, *([] if addition.into is None else [addition.into])]
