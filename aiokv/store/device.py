"""A server's memory on devices: dense keys of floats live there, with what their rule keeps; all others on the host.

Payloads land in memory of the host from which devices copy without another copy. What is done when is decided by
`aiokv.device.schedule`, and done by an engine; here it is said what is to be computed. An update takes time: who wants
one gives a function that is called when it is made.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from aiokv.device import records as r
from aiokv.errors import DeviceMemoryError
from aiokv.kernels import checks
from aiokv.kernels.plan import plan_update
from aiokv.kernels.work import Cast, Divide, Renew, Squares, Zero
from aiokv.optim import Assign, OwnRule
from aiokv.store.device_chunks import DeviceChunks, Kept
from aiokv.store.device_slots import unless
from aiokv.store.pieces import cut, steps_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiokv.errors import AiokvError
    from aiokv.optim import Norms, Optimizer
    from aiokv.store.slots import Array
    from aiokv.types import Key, Piece, Slot, Version

COUNT_BYTES = 8
"""Of a sum of squares, float64."""


class DeviceStore(DeviceChunks):
    """All slots and chunks of one server, some on devices.

    Args:
        backend: who does the arithmetic on the host.
        engine: the devices.
    """

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
            _by_piece(gathered, kept.pieces),
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
        *,
        keep: bool = False,
    ) -> None:
        """Make a version of a chunk, and call a function when it is made. See `ParameterStore.apply`.

        Raises:
            AiokvError: it can't be made; the slot is free, and the function is not called.
        """
        address, kept = (key, start), self._kept[key, start]
        try:
            update = self._update_of(address, kept, version, slot, rule, clock, divisor, norms)
            update.keeps = keep or read is not None
            if read is not None:
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
        kept: Kept,
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
        each = _by_piece(norms, kept.pieces) if rule.by_key else ()
        named = kept.dtype.name, total.dtype.name
        work = Renew(rule, tuple(steps), pieces, each, *named, apart, tuple(layout), reads=False)
        out = kept.size * kept.dtype.itemsize if apart else 0
        return r.Update(address, version, slot, work, out, tuple(layout), self._fresh(address, layout))

    def _made(
        self, kept: Kept, before: int, done: Callable[[AiokvError | None], None], error: AiokvError | None
    ) -> None:
        # Unless the state was forgotten meanwhile.
        if error is not None and kept.steps:
            kept.steps = before
        done(error)

    def _ready(self, address: r.Address, kept: Kept, slot: Slot, divisor: int) -> None:
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
            work = Divide(wide.name, unless(wide.name, total.dtype.name), divisor)
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


def _check(error: AiokvError | None, address: r.Address) -> None:
    if error is not None:
        key, _ = address
        raise type(error)(f"key {key!r}: {error.message}", **error.details | {"key": key})


def _layout(rule: Optimizer, kept: Kept) -> dict[str, int]:
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


def _by_piece(phases: Sequence[Sequence[tuple[float, ...]]], pieces: Sequence[Piece]) -> tuple[Norms, ...]:
    """Return for each piece the sums of each phase."""
    return tuple([tuple([phase[number] for phase in phases]) for number in range(len(pieces))])
