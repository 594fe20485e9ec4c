"""Chunks on devices: where they begin and end, and how they are read, saved and restored."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.device import records as r
from aiokv.errors import DeviceMemoryError
from aiokv.kernels.work import Compensate, Zero
from aiokv.optim import PRECISIONS
from aiokv.store.device_slots import DeviceSlots, unless
from aiokv.store.memory import Parts, Stored
from aiokv.store.pieces import cut
from aiokv.store.slots import Value
from aiokv.store.states import VALUE, checked_state, parts_of, piece_of
from aiokv.types import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiokv.errors import AiokvError
    from aiokv.kernels import Backend
    from aiokv.kernels.work import Engine
    from aiokv.optim import Optimizer
    from aiokv.store.device_slots import Sum
    from aiokv.store.slots import Array, Landed
    from aiokv.types import Key, Slot, Version


@dataclass(slots=True)
class Kept:
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


class DeviceChunks(DeviceSlots):
    """The part of a `DeviceStore` that deals with chunks.

    Args:
        backend: who does the arithmetic on the host.
        engine: the devices.
    """

    def __init__(self, backend: Backend, engine: Engine) -> None:
        super().__init__(backend, engine)
        self._kept: dict[r.Address, Kept] = {}
        self._refused: dict[r.Address, AiokvError] = {}
        """Chunks on the host for which there was no room on a device."""

    def is_on_device(self, key: Key, start: int) -> bool:
        """Tell whether a chunk is on a device."""
        return (key, start) in self._kept

    def refusal(self, key: Key, start: int) -> AiokvError | None:
        """Return why a chunk can't be updated: it is on the host, because there was no room for it elsewhere."""
        return self._refused.get((key, start))

    def arrived(self, slot: Slot, key: Key, start: int, *, encoded: bool = False) -> None:
        """Begin to copy a contribution to its chunk's device, while other ones are still coming.

        One that is encoded is copied when it has been checked: see `decode`.
        """
        kept = self._kept.get((key, start))
        if kept is not None and slot in self._slots:
            device = self._schedule.device_of((key, start))
            assert device is not None, "a chunk that is kept is on one"
            if encoded:
                self._encoded[slot] = device
                return
            # Where memory is short it waits on the host; an error is one of the update.
            if self._slots[slot].buffer.nbytes == kept.size * kept.dtype.itemsize:
                with contextlib.suppress(DeviceMemoryError):
                    self._bring(slot, device, kept.dtype)

    def compensate(self, slot: Slot, dtype: str, key: Key, start: int, read: Version, lamda: float) -> None:
        """Compensate a gradient on the device of its chunk. See `ParameterStore.compensate`."""
        address = key, start
        kept = self._kept.get(address)
        if kept is None:
            super().compensate(slot, dtype, key, start, read, lamda)
            return
        device, wide = self._schedule.device_of(address), kept.precision
        assert device is not None, "a chunk that is kept is on one"
        try:
            self._bring(slot, device, kept.dtype)
            gradient = self._sums[slot]
            work = Compensate(wide.name, unless(wide.name, gradient.dtype.name), kept.dtype.name, lamda)
            self._handle(r.Compare(slot, address, read, work, kept.size * wide.itemsize))
            gradient.dtype = wide
        except DeviceMemoryError as error:
            held: Sum | Landed = self._sums[slot] if slot in self._sums else self._slots[slot]
            held.error = held.error or error

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
                self._kept[key, start] = Kept(kind, list(pieces) or [Piece(key, start, size)])
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
            self._kept[piece.key, 0] = Kept(whole.dtype, [piece], whole.steps)
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
            version: of its value: the current one, or one that is kept.
            then: it may be called before this returns.
            state: with all that its rule keeps.
        """
        address = key, start
        kept, ticket = self._kept[address], next(self._tickets)
        pieces, steps = list(kept.pieces), kept.steps

        def ready(arrays: Mapping[str, Array], error: AiokvError | None) -> None:
            rest = {name: array.view(kept.precision) for name, array in arrays.items() if name}
            stored = Stored(kept.dtype, Value(arrays[""], version), pieces, rest or None, steps)
            then(Reading(stored, error, functools.partial(self._handle, r.Sent(ticket))))

        self._asking[ticket] = ready
        self._handle(r.Requested(ticket, address, version, state))

    def hold(self, key: Key, start: int, version: Version, then: Callable[[Parts], None]) -> None:
        """Have all that is kept of a chunk. See `ParameterStore.hold`."""
        if (key, start) not in self._kept:
            super().hold(key, start, version, then)
            return

        def there(reading: Reading) -> None:
            arrays = [] if reading.error is not None else parts_of(reading.stored)
            then(Parts(arrays, reading.stored.steps, reading.error, reading.release))

        self.request(key, start, version, there, state=True)


def places(array: Array, pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Return first byte and number of bytes of each piece's part of an array."""
    first, found = 0, []
    for part in cut(array, pieces):
        found.append((first, part.nbytes))
        first += part.nbytes
    return found
