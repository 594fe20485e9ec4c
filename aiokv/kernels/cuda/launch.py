"""Launches: geometry, the table of tensors that one launch goes over, and what a machine lacks to launch anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda

from aiokv.kernels.cuda.memory import SIMULATED, VECTOR

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.kernels.cuda.tensors import Tensor
    from aiokv.kernels.reference import Array

# A block takes one part of a tensor after the other: whole lines of memory, long enough to make up for reading where
# it lies. In the simulator every thread is a thread of Python, and small tensors are to have several parts.
THREADS, PART = (32, 128) if SIMULATED else (256, 8192)

BLOCKS_PER_MULTIPROCESSOR = 8
"""So many blocks fill a multiprocessor with threads; more would only wait."""

MIN_BLOCKS = 1 if SIMULATED else 128
"""Numba warns of fewer. Idle ones cost next to nothing."""

SIMULATED_BLOCKS = 2


def missing() -> list[str]:
    """Say what is needed to run on a device and is not there; nothing in the simulator."""
    if SIMULATED:
        return []
    found = []
    if error := cuda.cuda_error():  # type: ignore[no-untyped-call]
        found.append(f"the NVIDIA driver or a device ({' '.join(str(error).split())})")
    if error := missing_toolkit():
        found.append(f"the CUDA toolkit ({error})")
    return found


def missing_toolkit() -> str | None:
    """Say which library of the CUDA toolkit Numba can't load, None when all are there."""
    from numba.cuda.cuda_paths import get_cuda_paths  # noqa: PLC0415 - the simulator has no such module

    try:
        get_cuda_paths()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return " ".join(str(error).split())
    return None


def geometry(parts: int) -> tuple[int, int]:
    """Return blocks and threads per block for so many parts, which blocks take in turns."""
    if SIMULATED:
        return max(1, min(parts, SIMULATED_BLOCKS)), THREADS
    device = cuda.get_current_device()  # type: ignore[no-untyped-call]
    most = BLOCKS_PER_MULTIPROCESSOR * int(device.MULTIPROCESSOR_COUNT)
    return max(MIN_BLOCKS, min(parts, most)), THREADS


class Table:
    """Where the tensors of a launch lie, on the device; good for every launch over the same memory.

    Args:
        rows: for each tensor its arrays, in the order of the kernel's. Those of a row have the same length.
        group: elements that a thread takes at a time, all of whose loads are 16 bytes wide.
        stream: on which it is copied to the device.
        packed: array -> elements that share one of its elements.
    """

    def __init__(
        self, rows: Sequence[Sequence[Tensor]], group: int, stream: Any = 0, packed: frozenset[int] = frozenset()
    ) -> None:
        addresses, parts = table_of(rows, group, packed)
        self.count = len(parts)
        # What a table refers to stays where it is for as long as the table.
        self._kept: Sequence[Sequence[Tensor]] = rows
        self._addresses = addresses
        if self.count:
            self.addresses = to_device(addresses, stream)
            self.parts = to_device(parts, stream)

    def move(self, rows: Sequence[Sequence[Tensor]], stream: Any, check: Callable[[], None] | None = None) -> None:
        """Refer to other tensors, of the same lengths, that start at multiples of 16 bytes where the others did.

        Args:
            rows: the tensors.
            stream: on which their addresses are copied to the device.
            check: called before that, if they have changed.
        """
        addresses = np.array([[tensor.address for tensor in row] for row in rows], np.int64)
        changed = not np.array_equal(addresses, self._addresses)
        if changed and check is not None:
            check()
        self._kept = rows
        if self.count and changed:
            # What was launched before has read the others by then: the copy is behind it in the stream.
            self._addresses = addresses
            self.addresses.copy_to_device(addresses, stream=stream)

    def forget(self) -> None:
        """Keep the tensors no longer."""
        self._kept = ()


def table_of(rows: Sequence[Sequence[Tensor]], group: int, packed: frozenset[int]) -> tuple[Array, Array]:
    """Return the addresses, int64[tensors, arrays], and the parts of tensors. See `Table`."""
    measured = next(n for n in range(len(rows[0])) if n not in packed) if rows else 0
    sizes = np.array([row[measured].size for row in rows], np.int64)
    addresses = np.array([[tensor.address for tensor in row] for row in rows], np.int64)
    # Memory that starts anywhere is read element by element.
    aligned = np.array([all(tensor.address % VECTOR == 0 for tensor in row) for row in rows], bool)
    return addresses, make_parts(sizes, aligned, group)


def make_parts(sizes: Array, aligned: Array, group: int) -> Array:
    """Return the parts of tensors: int64[parts, 4], which tensor, first element, end of whole groups, end.

    Args:
        sizes: elements of each tensor.
        aligned: whether a tensor is read in whole groups.
        group: elements of a group.
    """
    counts = -(-sizes // PART)
    tensor = np.repeat(np.arange(sizes.size), counts)
    number = np.arange(tensor.size) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * PART
    stop = np.minimum(start + PART, sizes[tensor])
    wide = np.where(aligned[tensor], start + (stop - start) // group * group, start)
    return np.stack([tensor, start, wide, stop], axis=1).astype(np.int64)


def to_device(array: Array, stream: Any = 0) -> Any:
    """Copy a small array to the device, in the order of the stream."""
    return cuda.to_device(np.ascontiguousarray(array), stream=stream)


def new_on_device(shape: int | tuple[int, ...], dtype: Any, stream: Any = 0) -> Any:
    """Return memory on the device, as it happens to be."""
    return cuda.device_array(shape, dtype, stream=stream)


INLINE_BYTES = 64 << 10
"""What is copied from pageable memory returns at once up to here; of more the driver may wait for the stream."""

STAGES = 4
"""Copies of one array that may be under way at the same time."""


class Room:
    """Where small arrays of a launch are on the device: those of the next launch come to the same place.

    All launches are on one stream, so what is copied is behind the launch before. Room is only made for more than ever
    before: to free memory of a device would stop it.
    """

    def __init__(self) -> None:
        self._rooms: dict[str, Any] = {}
        self._put: dict[str, Array] = {}
        self._stages: dict[str, list[_Stage]] = {}

    def put(self, name: str, array: Array, stream: Any) -> Any:
        """Return rows of numbers, copied to the device unless they are there from the last time."""
        part = self.take(name, array.shape, array.dtype, stream)
        before = self._put.get(name)
        if before is None or not np.array_equal(before, array):
            self._copy(name, part, np.ascontiguousarray(array), stream)
            self._put[name] = array
        return part

    def take(self, name: str, shape: tuple[int, ...], dtype: Any, stream: Any) -> Any:
        """Return memory for an array, as it happens to be."""
        room, count = self._rooms.get(name), shape[0]
        if room is None or len(room) < count:
            rounded = 1 << (count - 1).bit_length()
            room = self._rooms[name] = new_on_device((rounded, *shape[1:]), dtype, stream)
            self._put.pop(name, None)
        return room[:count]

    def _copy(self, name: str, part: Any, array: Array, stream: Any) -> None:
        if array.nbytes <= INLINE_BYTES:
            part.copy_to_device(array, stream=stream)
            return
        stages = self._stages.setdefault(name, [_Stage() for _ in range(STAGES)])
        stages.append(stages.pop(0))
        stages[-1].copy(part, array, stream)


class _Stage:
    """Page-locked memory from which an array is copied, while the program goes on."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._copied = new_event()

    def copy(self, part: Any, array: Array, stream: Any) -> None:
        """Copy an array to the device; if the last copy from here is still under way, when that is done."""
        if self._memory.nbytes:
            self._copied.synchronize()
        if self._memory.nbytes < array.nbytes:
            self._memory = cuda.pinned_array(1 << (array.nbytes - 1).bit_length(), np.uint8)
        staged = self._memory[: array.nbytes].view(array.dtype).reshape(array.shape)
        staged[...] = array
        part.copy_to_device(staged, stream=stream)
        self._copied.record(stream)


def new_event() -> Any:
    """Return an event that does not measure time; the simulator's never do."""
    made: Any = cuda.event
    return made() if SIMULATED else made(timing=False)


def run(kernel: Any, table: Table, *arguments: Any, stream: Any = 0) -> None:
    """Launch a kernel over all tensors of a table."""
    if table.count:
        kernel[(*geometry(table.count), stream)](table.addresses, table.parts, *arguments)
