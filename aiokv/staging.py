"""Values that are for arrays on devices: they land in page-locked memory, and devices copy them from there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiokv.list_sums import device_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.arrays import Arguments, Array
    from aiokv.worker_device import Device


@dataclass(slots=True, eq=False)
class Staged:
    """What one call receives for arrays on devices."""

    copies: list[tuple[Device, Array, Any, Array | None]] = field(default_factory=list)
    """Device, memory, where on the device its content is to go, and to which rows, if not to all."""

    def copy(self) -> None:
        """Copy everything, and return when it is there: all devices copy at the same time. Any thread may call it."""
        for device, memory, target, rows in self.copies:
            device.start(memory, target, rows)
        for device in dict.fromkeys(copy[0] for copy in self.copies):
            device.wait()


def stage(arguments: Arguments, devices: Sequence[Device]) -> Staged:
    """Let a call's values land where the devices copy from that are to get them. Any thread may call it.

    Args:
        arguments: of the call.
        devices: those that this process sees, by their numbers.

    Raises:
        SpecMismatchError: an array can't be written, or lies where this store uses no device; nothing has changed.
    """
    staged = Staged()
    found = []
    for out in arguments.device_outs:
        device = device_of(arguments.keys[out.target], out.array, devices)
        found.append((out, device, device.writable(out.array.array)))
    memories: dict[int, Array] = {}
    for out, device, target in found:
        like = arguments.targets[out.target]
        if out.target not in memories:
            # To lock pages takes long: nobody waits for it here.
            memory = memories[out.target] = device.allocate(like.nbytes)
            arguments.targets[out.target] = memory.view(like.dtype).reshape(like.shape)
        if out.array.nbytes:
            staged.copies.append((device, memories[out.target], target, out.rows))
    return staged
