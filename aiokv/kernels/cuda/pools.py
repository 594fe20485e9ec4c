"""Memory on a device, and page-locked memory of the host, that is lent and used again: to make either takes long."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.kernels.cuda.memory import VECTOR
from aiokv.kernels.cuda.tensors import Tensor, read, tensor_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.kernels.reference import Array

MAX_IDLE_BYTES = 4 << 30
"""What comes back beyond this is freed."""

MIN_BYTES = 1 << 12

STEPS = 8
"""How many lengths there are between one power of two and the next one."""


def rounded(nbytes: int) -> int:
    """Return how long the memory is that is lent for so many bytes: at most an eighth longer, for lengths that vary."""
    if nbytes <= MIN_BYTES:
        return MIN_BYTES
    step = (1 << (nbytes - 1).bit_length()) // 2 // STEPS
    return -(-nbytes // step) * step


class Lease:
    """Memory that is lent, for as long as somebody refers to this.

    Args:
        memory: uint8.
    """

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Of memory of the host: an array over it keeps the lease."""
        found: dict[str, Any] = self.memory.__array_interface__
        return found


class Pool:
    """Lends memory, and has it back when nobody refers to it any longer.

    Any thread may call it. Memory comes back in whatever thread drops the last reference, at any moment, while the same
    thread is in here too: so nothing is locked.

    Args:
        allocate: returns new memory of so many bytes, uint8.
    """

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self._allocate = allocate
        self._idle: dict[int, deque[Any]] = {}

    @property
    def idle_bytes(self) -> int:
        """Bytes that nobody uses."""
        return sum(nbytes * len(idle) for nbytes, idle in list(self._idle.items()))

    def lend(self, nbytes: int) -> Lease:
        """Return memory of at least so many bytes, with any content."""
        length = rounded(nbytes)
        idle = self._idle.setdefault(length, deque())
        try:
            memory = idle.pop()
        except IndexError:
            memory = self._allocate(length)
        lease = Lease(memory)
        weakref.finalize(lease, self._back, length, memory).atexit = False
        return lease

    def _back(self, length: int, memory: Any) -> None:
        if self.idle_bytes + length <= MAX_IDLE_BYTES:
            self._idle[length].append(memory)


class Memory:
    """What one device lends.

    Args:
        on_device: allocates there.
        on_host: allocates page-locked memory.
    """

    def __init__(self, on_device: Callable[[int], Any], on_host: Callable[[int], Array]) -> None:
        self.device = Pool(on_device)
        self.host = Pool(on_host)

    def on_device(self, size: int, dtype: np.dtype[Any]) -> Tensor:
        """Return an array on the device."""
        lease = self.device.lend(size * dtype.itemsize)
        address = tensor_of("memory", lease.memory).address
        return Tensor(address, size, dtype, lease, (size,))

    def on_host(self, nbytes: int) -> Array:
        """Return page-locked memory, uint8[nbytes]: a device copies from and to it while the program goes on."""
        lease: Any = self.host.lend(nbytes)
        return np.asarray(lease)[:nbytes]


class Packed:
    """Arrays on a device that lie one after the other, so that one copy brings all of them to the host's memory.

    Args:
        memory: lends it.
        specs: size and dtype of each array.
    """

    def __init__(self, memory: Memory, specs: Sequence[tuple[int, Any]]) -> None:
        self._memory = memory
        self._specs = [(size, np.dtype(dtype)) for size, dtype in specs]
        padded = [-(-size * dtype.itemsize // VECTOR) * VECTOR for size, dtype in self._specs]
        self._starts: list[int] = np.cumsum([0, *padded], dtype=np.int64).tolist()
        self._whole = memory.on_device(self._starts[-1], np.dtype(np.uint8))

    @property
    def tensors(self) -> list[Tensor]:
        """The arrays."""
        whole, places = self._whole, zip(self._starts, self._specs, strict=False)
        return [Tensor(whole.address + start, size, dtype, whole, (size,)) for start, (size, dtype) in places]

    def read(self) -> list[Array]:
        """Return copies in the host's memory."""
        found = self._memory.on_host(self._whole.nbytes)
        read(self._whole, found)
        return [
            found[start : start + size * dtype.itemsize].view(dtype)
            for start, (size, dtype) in zip(self._starts, self._specs, strict=False)
        ]
