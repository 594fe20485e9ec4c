"""A server's memory on devices: dense keys of floats live there, with what their rule keeps; all others on the host.

Payloads land in memory of the host from which devices copy without another copy. What is done when is decided by
`aiokv.device.schedule`, and done by an engine; here it is said what is to be computed. An update takes time: who wants
one gives a function that is called when it is made.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_never

import numpy as np

from aiokv.device import records as r
from aiokv.device.schedule import Schedule
from aiokv.errors import DeviceMemoryError
from aiokv.kernels import checks
from aiokv.kernels.plan import plan_update
from aiokv.kernels.work import Add, Cast, Combine, Divide, Renew, Scale, Squares, Zero
from aiokv.optim import PRECISIONS, Assign, OwnRule
from aiokv.store.memory import Landed, ParameterStore, Parts, Stored, Value
from aiokv.store.pieces import cut, steps_for
from aiokv.store.pool import Pool
from aiokv.store.states import VALUE, checked_state, parts_of, piece_of
from aiokv.types import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiokv.errors import AiokvError
    from aiokv.kernels import Backend
    from aiokv.kernels.work import Engine, Work
    from aiokv.optim import Norms, Optimizer
    from aiokv.store.memory import Array
    from aiokv.types import Key, Slot, Version

COUNT_BYTES = 8
"""Of a sum of squares, float64."""


@dataclass(slots=True)
class _Sum:
    """What lies in a slot on a device: its dtype, whether it has been divided, and why it could not be made."""

    dtype: np.dtype[Any]
    divided: bool = False
    error: AiokvError | None = None


@dataclass(slots=True)
class _Kept:
    """A chunk on a device: as `Stored`, but for the arrays."""

    dtype: np.dtype[Any]
    pieces: list[Piece]
    steps: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(piece.size for piece in self.pieces)

    @property
    def precision(self) -> np.dtype[Any]:
        """In which it is updated."""
        return np.dtype(PRECISIONS[self.dtype.name])


@dataclass(slots=True)
class Reading:
    """A chunk's value, with what its rule keeps if that was wanted; `release` says that it is not needed any longer.

    With an `error` there is nothing in it.
    """

    stored: Stored
    error: AiokvError | None
    release: Callable[[], None]


class DeviceStore(ParameterStore):
    """All slots and chunks of one server, some on devices.

    Args:
        backend: who does the arithmetic on the host.
        engine: the devices.
    """

    def __init__(self, backend: Backend, engine: Engine) -> None:
        super().__init__(backend, Pool(make=engine.pinned))
        self._engine = engine
        self._schedule = Schedule(engine.limits)
        self._sums: dict[Slot, _Sum] = {}
        self._kept: dict[r.Address, _Kept] = {}
        self._refused: dict[r.Address, AiokvError] = {}
        """Chunks on the host for which there was no room on a device."""
        self._memory: dict[r.Buffer, Array] = {}
        """Buffers of the host that devices copy from or to."""
        self._making: dict[r.Address, Callable[[AiokvError | None], None]] = {}
        self._asking: dict[r.Ticket, Callable[[Mapping[str, Array], AiokvError | None], None]] = {}
        self._tickets = itertools.count()

    # --- devices ---

    def start(self, report: Callable[[list[tuple[int, AiokvError | None]]], None]) -> None:
        """Begin; from a thread of the engine's, events are reported which are to be given to `completed`."""
        self._engine.start(report)

    def close(self) -> None:
        """End, when all that is under way is done. It may take a while: call it in a thread."""
        self._engine.close()

    def is_on_device(self, key: Key, start: int) -> bool:
        """Tell whether a chunk is on a device."""
        return (key, start) in self._kept

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self._schedule.is_idle

    def completed(self, event: int, error: AiokvError | None) -> None:
        """Take in that the engine has reported an event; calls who has waited for it."""
        self._handle(r.Completed(event, error))

    def arrived(self, slot: Slot, key: Key, start: int) -> None:
        """Begin to copy a contribution to its chunk's device, while other ones are still coming."""
        kept = self._kept.get((key, start))
        if kept is not None and slot in self._slots:
            device = self._schedule.device_of((key, start))
            assert device is not None, "a chunk that is kept is on one"
            # Where memory is short it waits on the host; an error is one of the update.
            if self._slots[slot].buffer.nbytes == kept.size * kept.dtype.itemsize:
                with contextlib.suppress(DeviceMemoryError):
                    self._bring(slot, device, kept.dtype)

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
            case r.Launch(stream, waits, event, work, buffers, needed, lost):
                engine.launch(stream, waits, event, work, buffers, needed, lost)
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
        sum_ = _Sum(dtype, landed.divided, landed.error)
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
        if self._schedule.has_slot(slot):
            del self._sums[slot]
            self._handle(r.Freed(slot))
        else:
            super().free(slot)

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
            self._change(slot, [], dtype, lambda wide, kinds: Scale(wide, _unless(wide, kinds[0]), factor))

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
            held: _Sum | Landed = self._sums[target] if target in self._sums else self._slots[target]
            held.error = held.error or error
            for source in sources:
                self.free(source)

    def _alter(self, target: Slot, sources: list[Slot], work: Work, dtype: np.dtype[Any]) -> None:
        total = self._sums[target]
        nbytes = self._schedule.nbytes_of(target) // total.dtype.itemsize * dtype.itemsize
        self._handle(r.Fold(target, sources, work, nbytes))
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
            self._sums[part] = _Sum(whole.dtype, whole.divided, whole.error)
        self._handle(r.Cut(slot, places))

    # --- chunks ---

    def install(
        self, key: Key, start: int, dtype: str, size: int, slot: Slot | None, pieces: Sequence[Piece] = ()
    ) -> None:
        """Make the slot's content version 0 of a new chunk. See `ParameterStore.install`."""
        kind = np.dtype(dtype)
        if dtype in PRECISIONS and size:
            try:
                self._handle(r.Install((key, start), size * kind.itemsize, slot, Zero()))
            except DeviceMemoryError as error:
                # There is nobody to tell it to yet. It can be read; who pushes will be told.
                self._refused[key, start] = error
            else:
                self._kept[key, start] = _Kept(kind, list(pieces) or [Piece(key, start, size)])
                return
        super().install(key, start, dtype, size, slot, pieces)

    def divide(self, key: Key, start: int, parts: list[tuple[Key, int]]) -> None:
        """Make chunks of the keys that lie in one. See `ParameterStore.divide`."""
        address = key, start
        if address not in self._kept:
            super().divide(key, start, parts)
            if address in self._refused:
                error = self._refused.pop(address)
                self._refused |= dict.fromkeys([(name, 0) for name, _ in parts], error)
            return
        self.replicas.forget_chunk(key, start)
        hollow, whole = self._hollow(address), self._kept.pop(address)
        rows = {piece.key: piece.row_size for piece in whole.pieces}
        pieces = [Piece(name, 0, size, rows.get(name, 1)) for name, size in parts]
        values = places(hollow.value.buffer.view(whole.dtype), pieces)
        states = {name: places(array, pieces) for name, array in (hollow.state or {}).items()}
        cuts = []
        for number, piece in enumerate(pieces):
            state = {name: found[number] for name, found in states.items()}
            cuts.append(((piece.key, 0), values[number], state))
            self._kept[piece.key, 0] = _Kept(whole.dtype, [piece], whole.steps)
        self._handle(r.Divide(address, cuts))

    def forget(self, key: Key, start: int) -> None:
        """Drop a chunk."""
        self._refused.pop((key, start), None)
        if self._kept.pop((key, start), None) is None:
            super().forget(key, start)
            return
        self.replicas.forget_chunk(key, start)
        self._making.pop((key, start), None)
        self._handle(r.Forgotten((key, start)))

    def dtypes(self) -> list[str]:
        """Return the dtypes of the values, each once."""
        return list(dict.fromkeys([*super().dtypes(), *(kept.dtype.name for kept in self._kept.values())]))

    def reset_states(self) -> None:
        """Forget what rules have kept so far."""
        super().reset_states()
        for address, kept in self._kept.items():
            kept.steps = 0
            self._handle(r.Reset(address))

    def retire(self, key: Key, start: int, versions: Sequence[Version]) -> None:
        """Forget values before the current one."""
        if (key, start) in self._kept:
            self._handle(r.Retired((key, start), list(versions)))
        else:
            super().retire(key, start, versions)

    def keep(self, key: Key, start: int, version: Version) -> None:
        """Let the current value be `version` too, because an update could not be made."""
        if (key, start) in self._kept:
            self._handle(r.Renumbered((key, start), version))
        else:
            super().keep(key, start, version)

    def steps(self, key: Key, start: int) -> int:
        """Return the number of updates that the state of a chunk has seen."""
        kept = self._kept.get((key, start))
        return super().steps(key, start) if kept is None else kept.steps

    def described(self, key: Key, start: int, name: Key) -> dict[str, tuple[str, int]]:
        """Return dtype and number of elements of what is saved. See `ParameterStore.described`."""
        if (key, start) not in self._kept:
            return super().described(key, start, name)
        arrays = piece_of(self._hollow((key, start)), name)
        return {label: (array.dtype.name, array.size) for label, array in arrays.items()}

    def restore(self, key: Key, start: int, first: int, saved: dict[str, Array], steps: int, rule: Optimizer) -> None:
        """Put what was saved in the place of a chunk's value and state. See `ParameterStore.restore`."""
        address = key, start
        if address not in self._kept:
            super().restore(key, start, first, saved, steps, rule)
            return
        value, state = checked_state(key, saved, self._hollow(address), rule, self._backend)
        slots = {name: self._landed(array) for name, array in (state or {}).items()}
        own = self._landed(value) if VALUE in saved else None
        try:
            placed = {name: (slot, self._slots[slot].buffer.nbytes) for name, slot in slots.items()}
            self._handle(r.Restore(address, own, placed))
        except DeviceMemoryError:
            for slot in (*slots.values(), *([] if own is None else [own])):
                self.free(slot)
            raise
        self._kept[address].steps = steps

    def _landed(self, array: Array) -> Slot:
        slot, view = self.land(array.nbytes)
        view[:] = array.view(np.uint8).data
        return slot

    def _hollow(self, address: r.Address) -> Stored:
        """Return what there is of a chunk, without its content."""
        kept = self._kept[address]
        state = {
            name: np.empty(nbytes // kept.precision.itemsize, kept.precision)
            for name, nbytes in self._schedule.state_of(address).items()
        }
        value = Value(np.empty(kept.size * kept.dtype.itemsize, np.uint8), self._schedule.version_of(address))
        return Stored(kept.dtype, value, kept.pieces, state or None, kept.steps)

    # --- reading ---

    def request(
        self, key: Key, start: int, version: Version, then: Callable[[Reading], None], *, state: bool = False
    ) -> None:
        """Have a chunk's value in the host's memory, and call a function with it; it stays until it is released.

        Args:
            key: the chunk's key.
            start: its first element.
            version: of its value.
            then: it may be called before this returns.
            state: with all that its rule keeps.
        """
        address = key, start
        kept, ticket = self._kept[address], next(self._tickets)
        assert self._schedule.version_of(address) == version, (
            "a value is sent in the same breath in which it is decided"
        )
        pieces, steps = list(kept.pieces), kept.steps

        def ready(arrays: Mapping[str, Array], error: AiokvError | None) -> None:
            rest = {name: array.view(kept.precision) for name, array in arrays.items() if name}
            stored = Stored(kept.dtype, Value(arrays[""], version), pieces, rest or None, steps)
            then(Reading(stored, error, functools.partial(self._handle, r.Sent(ticket))))

        self._asking[ticket] = ready
        self._handle(r.Requested(ticket, address, state))

    def hold(self, key: Key, start: int, version: Version, then: Callable[[Parts], None]) -> None:
        """Have all that is kept of a chunk. See `ParameterStore.hold`."""
        if (key, start) not in self._kept:
            super().hold(key, start, version, then)
            return

        def there(reading: Reading) -> None:
            arrays = [] if reading.error is not None else parts_of(reading.stored)
            then(Parts(arrays, reading.stored.steps, reading.error, reading.release))

        self.request(key, start, version, there, state=True)

    # --- updates ---

    def begin_norms(
        self,
        key: Key,
        start: int,
        slot: Slot,
        rule: Optimizer,
        phase: int,
        clock: int,
        divisor: int,
        gathered: Sequence[Sequence[tuple[float, ...]]],
        done: Callable[[list[tuple[float, ...]] | AiokvError], None],
    ) -> None:
        """Compute what `ParameterStore.norms` returns, and call a function with it."""
        address, kept = (key, start), self._kept[key, start]
        counted, ticket = rule.norm_counts[phase], next(self._tickets)

        def ready(arrays: Mapping[str, Array], error: AiokvError | None) -> None:
            found = arrays[""].view(np.float64).reshape(-1, counted).tolist()
            self._handle(r.Sent(ticket))
            done(error or [tuple(sums) for sums in found])

        steps = steps_for(rule, kept.pieces, kept.steps + 1, clock)
        layout = _layout(rule, kept)
        self._ready(address, kept, slot, divisor)
        work = Squares(
            rule,
            phase,
            tuple(steps),
            tuple(kept.pieces),
            by_piece(gathered, kept.pieces),
            kept.dtype.name,
            self._sums[slot].dtype.name,
            tuple(layout),
        )
        nbytes = COUNT_BYTES * counted * len(kept.pieces)
        measure = r.Measure(ticket, address, slot, work, nbytes, tuple(layout), self._fresh(address, layout))
        self._asking[ticket] = ready
        try:
            self._handle(measure)
        except DeviceMemoryError:
            del self._asking[ticket]
            raise

    def begin_apply(
        self,
        key: Key,
        start: int,
        version: Version,
        slot: Slot,
        rule: Optimizer,
        clock: int,
        divisor: int,
        norms: Sequence[Sequence[tuple[float, ...]]],
        read: Version | None,
        done: Callable[[AiokvError | None], None],
    ) -> None:
        """Make a version of a chunk, and call a function when it is made. See `ParameterStore.apply`.

        Raises:
            AiokvError: it can't be made; the slot is free, and the function is not called.
        """
        address, kept = (key, start), self._kept[key, start]
        try:
            update = self._update_of(address, kept, version, slot, rule, clock, divisor, norms)
            if read is not None:
                update.keeps = True
                current = self._schedule.version_of(address)
                update.read = read if rule.reads_weight and read != current else None
                if update.read is not None:
                    update.work = update.work._replace(reads=True)
            self._making[address] = functools.partial(self._made, kept, kept.steps, done)
            kept.steps += 1
            self._handle(update)
        except Exception:
            if self._making.pop(address, None) is not None:
                kept.steps -= 1
            if self.has(slot):
                self.free(slot)
            raise
        self._sums.pop(slot, None)

    def _update_of(
        self,
        address: r.Address,
        kept: _Kept,
        version: Version,
        slot: Slot,
        rule: Optimizer,
        clock: int,
        divisor: int,
        norms: Sequence[Sequence[tuple[float, ...]]],
    ) -> r.Update:
        steps = steps_for(rule, kept.pieces, kept.steps + 1, clock)
        layout = _layout(rule, kept)
        self._ready(address, kept, slot, divisor)
        total = self._sums[slot]
        if isinstance(rule, Assign):
            if total.dtype != kept.dtype:
                self._alter(slot, [], Cast(kept.dtype.name, total.dtype.name), kept.dtype)
            return r.Update(address, version, slot, None)
        apart = total.dtype != kept.dtype
        pieces = tuple(kept.pieces)
        each = by_piece(norms, kept.pieces) if rule.by_key else ()
        named = kept.dtype.name, total.dtype.name
        work = Renew(rule, tuple(steps), pieces, each, *named, apart, tuple(layout), reads=False)
        out = kept.size * kept.dtype.itemsize if apart else 0
        return r.Update(address, version, slot, work, out, tuple(layout), self._fresh(address, layout))

    def _made(
        self, kept: _Kept, before: int, done: Callable[[AiokvError | None], None], error: AiokvError | None
    ) -> None:
        # Unless the state was forgotten meanwhile.
        if error is not None and kept.steps:
            kept.steps = before
        done(error)

    def _ready(self, address: r.Address, kept: _Kept, slot: Slot, divisor: int) -> None:
        """Have a sum on the chunk's device, divided once."""
        device = self._schedule.device_of(address)
        assert device is not None, "a chunk that is kept is on one"
        if not self._schedule.has_slot(slot):
            _check(self._slots[slot].error, address)
        self._bring(slot, device, kept.dtype)
        total = self._sums[slot]
        _check(total.error, address)
        if divisor > 1 and not total.divided:
            wide = kept.precision
            work = Divide(wide.name, _unless(wide.name, total.dtype.name), divisor)
            self._alter(slot, [], work, wide)
            total.divided = True

    def _fresh(self, address: r.Address, layout: Mapping[str, int]) -> dict[str, r.Fresh]:
        """Return what is to be made of a chunk's state, if it has none."""
        if self._schedule.state_of(address):
            return {}
        kept = self._kept[address]
        copy = Cast(kept.precision.name, kept.dtype.name)
        return {
            name: r.Fresh(size * kept.precision.itemsize, copy if name == "master" else Zero())
            for name, size in layout.items()
        }

    def refusal(self, key: Key, start: int) -> AiokvError | None:
        """Return why a chunk can't be updated: it is on the host, because there was no room for it elsewhere."""
        return self._refused.get((key, start))


def _addition(wide: str, kinds: list[str]) -> Work:
    total, added = kinds
    return Add(wide, (added,), adds=True) if total == wide else Add(wide, (total, added), adds=False)


def _unless(wide: str, kind: str) -> str | None:
    """Return the dtype of a source, None if it is changed in its place."""
    return None if kind == wide else kind


def _check(error: AiokvError | None, address: r.Address) -> None:
    if error is not None:
        key, _ = address
        raise type(error)(f"key {key!r}: {error.message}", **error.details | {"key": key})


def _layout(rule: Optimizer, kept: _Kept) -> dict[str, int]:
    """Return how many elements a rule keeps of each array for a chunk."""
    if not isinstance(rule, Assign | OwnRule):
        plan_update(rule)
    sizes: dict[str, int] = {}
    weight = np.empty(kept.size, kept.dtype)
    parts = cut(weight, kept.pieces) if rule.by_row else [weight]
    for part, piece in zip(parts, kept.pieces, strict=False):
        for name, (_, size) in checks.state_layout(rule, part, piece.row_size if rule.by_row else 1).items():
            sizes[name] = sizes.get(name, 0) + size
    return sizes


def by_piece(phases: Sequence[Sequence[tuple[float, ...]]], pieces: Sequence[Piece]) -> tuple[Norms, ...]:
    """Return for each piece the sums of each phase."""
    return tuple([tuple([phase[number] for phase in phases]) for number in range(len(pieces))])


def places(array: Array, pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Return first byte and number of bytes of each piece's part of an array."""
    first, found = 0, []
    for part in cut(array, pieces):
        found.append((first, part.nbytes))
        first += part.nbytes
    return found
