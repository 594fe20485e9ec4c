"""Payloads and sums of a server whose chunks are on devices, and the exchange with the schedule and the engine."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_never

import numpy as np

from aiokv.codec import Float8
from aiokv.codec.records import SCALE
from aiokv.device import records as r
from aiokv.device.schedule import Schedule
from aiokv.errors import DeviceMemoryError, ProtocolError
from aiokv.kernels.work import Add, Combine, Decode, Scale, decodes, kind_of
from aiokv.optim import PRECISIONS
from aiokv.store.memory import ParameterStore
from aiokv.store.pool import Pool
from aiokv.store.slots import Landed, payload_lengths

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiokv.codec import Codec
    from aiokv.errors import AiokvError
    from aiokv.kernels import Backend
    from aiokv.kernels.work import Engine, Work
    from aiokv.store.slots import Array
    from aiokv.types import Slot


@dataclass(slots=True)
class Lent:
    """What lies in slots, one after the other; `release` says that it is not needed any longer. With an `error` it is
    nothing."""

    content: memoryview
    error: AiokvError | None
    release: Callable[[], None]


@dataclass(slots=True)
class Sum:
    """What lies in a slot on a device: its dtype, whether it has been divided, and why it could not be made."""

    dtype: np.dtype[Any]
    divided: bool = False
    error: AiokvError | None = None


class DeviceSlots(ParameterStore):
    """The part of a `DeviceStore` that deals with slots.

    Args:
        backend: who does the arithmetic on the host.
        engine: the devices.
    """

    def __init__(self, backend: Backend, engine: Engine) -> None:
        # Page-locked memory takes long to make, so all of it is used again.
        super().__init__(backend, Pool(sys.maxsize, engine.pinned))
        self._engine = engine
        self._schedule = Schedule(engine.limits, kind_of)
        self._sums: dict[Slot, Sum] = {}
        self._memory: dict[r.Buffer, Array] = {}
        """Buffers of the host that devices copy from or to."""
        self._making: dict[r.Address, Callable[[AiokvError | None], None]] = {}
        self._asking: dict[r.Ticket, Callable[[Mapping[str, Array], AiokvError | None], None]] = {}
        self._tickets = itertools.count()
        self._encoded: dict[Slot, int] = {}
        """For which device payloads are that have to be decoded."""

    # --- devices ---

    def start(self, report: Callable[[list[tuple[int, AiokvError | None]]], None]) -> None:
        """Begin; from a thread of the engine's, events are reported which are to be given to `completed`."""
        self._engine.start(report)

    def close(self) -> None:
        """End, when all that is under way is done. It may take a while: call it in a thread."""
        self._engine.close()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self._schedule.is_idle

    def completed(self, event: int, error: AiokvError | None) -> None:
        """Take in that the engine has reported an event; calls who has waited for it."""
        self._handle(r.Completed(event, error))

    def _handle(self, stimulus: r.Stimulus) -> None:
        """Give a stimulus to the schedule and perform what it wants; whoever waits is called last.

        Raises:
            DeviceMemoryError: a device has not enough memory; nothing has changed.
        """
        told: list[r.Published | r.Ready] = []
        for effect in self._schedule.handle(stimulus):
            match effect:
                case r.Published() | r.Ready():
                    told.append(effect)
                case _:
                    self._perform(effect)
        for said in told:
            if isinstance(said, r.Published):
                self._making.pop(said.chunk)(said.error)
            else:
                self._asking.pop(said.ticket)(
                    {name: self._memory[buffer] for name, buffer in said.buffers.items()}, said.error
                )

    def _perform(self, effect: r.Allocate | r.Deallocate | r.Take | r.Reserve | r.Release | r.Copy | r.Launch) -> None:
        engine, memory = self._engine, self._memory
        match effect:
            case r.Allocate(buffer, device, nbytes):
                engine.allocate(buffer, device, nbytes)
            case r.Deallocate(buffer):
                engine.deallocate(buffer)
            case r.Take(buffer, slot):
                memory[buffer] = self._slots.pop(slot).buffer
            case r.Reserve(buffer, nbytes):
                memory[buffer] = self._pool.take(nbytes)
            case r.Release(buffer):
                self._pool.give(memory.pop(buffer))
            case r.Copy(stream, waits, event, target, source, nbytes, first):
                places = memory.get(target, target), memory.get(source, source)
                engine.copy(stream, waits, event, *places, (first, nbytes))
            case r.Launch(stream, waits, parts):
                engine.launch(stream, waits, parts)
            case _:
                assert_never(effect)

    def _bring(self, slot: Slot, device: int, dtype: np.dtype[Any]) -> None:
        """Have a slot on a device.

        Raises:
            DeviceMemoryError: it has not enough memory; the slot is as it was.
        """
        if self._schedule.has_slot(slot):
            return
        landed = self._slots[slot]
        sum_ = Sum(dtype, landed.divided, landed.error)
        if landed.wide is not None:
            # It was begun on the host.
            sum_.dtype = landed.wide.dtype
            self._slots[slot] = Landed(landed.wide.view(np.uint8))
        try:
            self._handle(r.Landed(slot, self._slots[slot].buffer.nbytes, device))
        except DeviceMemoryError:
            self._slots[slot] = landed
            raise
        if landed.wide is not None:
            self._pool.give(landed.buffer)
        self._sums[slot] = sum_

    # --- slots ---

    @property
    def open_slots(self) -> int:
        """How many payloads have landed, or are landing, and are not used up."""
        return super().open_slots + self._schedule.open_slots

    @property
    def landed_bytes(self) -> int:
        """How many bytes those payloads take."""
        return super().landed_bytes + self._schedule.landed_bytes

    def has(self, slot: Slot) -> bool:
        """Tell whether a slot's payload is not used up."""
        return self._schedule.has_slot(slot) or super().has(slot)

    def free(self, slot: Slot) -> None:
        """Give a slot's memory back."""
        self._encoded.pop(slot, None)
        if self._schedule.has_slot(slot):
            del self._sums[slot]
            self._handle(r.Freed(slot))
        else:
            super().free(slot)

    def is_away(self, slots: Sequence[Slot]) -> bool:
        """Tell whether what lies in one of some slots is not in the host's memory."""
        return not self._on_host(*slots)

    def borrow(self, slots: Sequence[Slot], then: Callable[[Lent], None]) -> None:
        """Have what lies in slots, in the precision that it has, in the host's memory, and call a function with it.

        It is as it is now, whatever is done with the slots afterwards.
        """
        ticket = next(self._tickets)
        away = {str(place): slot for place, slot in enumerate(slots) if self._schedule.has_slot(slot)}
        here = {
            str(place): np.asarray(self.joined([slot])) for place, slot in enumerate(slots) if str(place) not in away
        }
        error = next((error for slot in away.values() if (error := self._sums[slot].error) is not None), None)

        def ready(arrays: Mapping[str, Array], failed: AiokvError | None) -> None:
            found = here | dict(arrays)
            parts = [found[str(place)] for place in range(len(slots))]
            content = np.concatenate(parts) if len(parts) > 1 else parts[0]
            then(Lent(content.data, error or failed, functools.partial(self._handle, r.Sent(ticket))))

        self._asking[ticket] = ready
        self._handle(r.Borrowed(ticket, away))

    def decode(self, slot: Slot | None, target: Slot, codec: Codec, dtype: str, sizes: list[int]) -> None:
        """Make a slot of the values that a payload says, where they are needed. See `ParameterStore.decode`."""
        device = None if slot is None else self._encoded.pop(slot, None)
        if slot is None or device is None:
            super().decode(slot, target, codec, dtype, sizes)
            return
        if decodes(codec, dtype):
            with contextlib.suppress(DeviceMemoryError):
                self._decode_there(slot, target, codec, sizes, device)
                return
        super().decode(slot, target, codec, dtype, sizes)
        # Where memory is short it waits on the host.
        with contextlib.suppress(DeviceMemoryError):
            self._bring(target, device, np.dtype(dtype))

    def _decode_there(self, slot: Slot, target: Slot, codec: Codec, sizes: list[int], device: int) -> None:
        payload = self._slots[slot].buffer
        # The only tensor's scale stays here, so that its codes begin where a device reads 16 of them at a time.
        left = SCALE if isinstance(codec, Float8) and len(sizes) == 1 else 0
        parts, first = [], 0
        try:
            for size, nbytes in zip(sizes, payload_lengths(codec, sizes, payload.nbytes), strict=True):
                unit = self._decoders[codec].unit(payload[first : first + nbytes].data, size)
                codes = first + (SCALE if isinstance(codec, Float8) else 0)
                parts.append((codes - left, size, unit))
                first += nbytes
        except ProtocolError:
            self.free(slot)
            raise
        wide = np.dtype(np.float32)
        work = Decode(codec, tuple(parts))
        self._handle(r.Unpack(slot, target, device, left, payload.nbytes - left, work, sum(sizes) * wide.itemsize))
        self._sums[target] = Sum(wide)

    def fold(self, target: Slot, source: Slot, dtype: str) -> None:
        """Add one slot to another and free it. See `ParameterStore.fold`."""
        if self._on_host(target, source):
            super().fold(target, source, dtype)
        else:
            self._change(target, [source], dtype, _addition)

    def weigh(self, slot: Slot, dtype: str, factor: float) -> None:
        """Multiply a slot's content. See `ParameterStore.weigh`."""
        if self._on_host(slot):
            super().weigh(slot, dtype, factor)
        else:
            self._change(slot, [], dtype, lambda wide, kinds: Scale(wide, unless(wide, kinds[0]), factor))

    def combine(self, target: Slot, sources: list[Slot], dtype: str, reduction: str) -> None:
        """Put what a reduction makes of several slots into the first of them. See `ParameterStore.combine`."""
        if self._on_host(target, *sources):
            super().combine(target, sources, dtype, reduction)
        else:
            self._change(target, sources, dtype, lambda wide, kinds: Combine(wide, tuple(kinds), reduction))

    def _on_host(self, *slots: Slot) -> bool:
        return not any(self._schedule.has_slot(slot) for slot in slots)

    def _change(self, target: Slot, sources: list[Slot], dtype: str, work_of: Callable[[str, list[str]], Work]) -> None:
        """Make something else of a slot, in the precision of sums, and of others, which are free then.

        Where memory is short, the sum has an error.
        """
        slots, wide = [target, *sources], np.dtype(PRECISIONS[dtype])
        try:
            device = next(where for slot in slots if (where := self._schedule.device_of(slot)) is not None)
            for slot in slots:
                self._bring(slot, device, np.dtype(dtype))
            kinds = [self._sums[slot].dtype.name for slot in slots]
            self._alter(target, sources, work_of(wide.name, kinds), wide)
        except DeviceMemoryError as error:
            held: Sum | Landed = self._sums[target] if target in self._sums else self._slots[target]
            held.error = held.error or error
            for source in sources:
                self.free(source)

    def _alter(self, target: Slot, sources: list[Slot], work: Work, dtype: np.dtype[Any]) -> None:
        total = self._sums[target]
        nbytes = self._schedule.nbytes_of(target) // total.dtype.itemsize * dtype.itemsize
        self._handle(r.Fold(target, sources, work, nbytes, joins=isinstance(work, Add)))
        total.dtype = dtype
        for source in sources:
            total.error = total.error or self._sums.pop(source).error

    def split(self, slot: Slot, parts: list[tuple[Slot, int]]) -> None:
        """Cut a slot's content into new slots. See `ParameterStore.split`."""
        if self._on_host(slot):
            super().split(slot, parts)
            return
        whole = self._sums.pop(slot)
        # The bytes that are given are those of what has landed; a sum may be wider.
        grown = self._schedule.nbytes_of(slot) // sum(nbytes for _, nbytes in parts)
        first, places = 0, []
        for part, nbytes in parts:
            places.append((part, first, nbytes * grown))
            first += nbytes * grown
            self._sums[part] = Sum(whole.dtype, whole.divided, whole.error)
        self._handle(r.Cut(slot, places))


def _addition(wide: str, kinds: list[str]) -> Work:
    total, added = kinds
    return Add(wide, (added,), adds=True) if total == wide else Add(wide, (total, added), adds=False)


def unless(wide: str, kind: str) -> str | None:
    """Return the dtype of a source, None if it is changed in its place."""
    return None if kind == wide else kind
