"""The devices of this machine, as a worker uses them: it sums arrays there, and copies values to arrays there."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda

from aiokv.errors import DeviceMemoryError
from aiokv.kernels.checks import BFLOAT16, FLOAT32, is_low, mismatch
from aiokv.kernels.cuda import encoding, peers, reduce, sparse
from aiokv.kernels.cuda.encoding import DeviceEncoder
from aiokv.kernels.cuda.launches import Launches
from aiokv.kernels.cuda.memory import SIMULATED
from aiokv.kernels.cuda.pools import Memory, Packed
from aiokv.kernels.cuda.tensors import Copy, Tensor, memory_of, read, tensor_of, writable_tensor
from aiokv.kernels.foreign import is_on_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.codec import Codec
    from aiokv.kernels.reference import Array
    from aiokv.types import Key


@functools.cache
def all_devices() -> tuple[Device, ...]:
    """Return every device that this process sees: all stores share what they lend."""
    return tuple(Device(number) for number in range(len(cuda.gpus)))


class Device:
    """One device; see `aiokv.list_sums.Device`.

    Args:
        number: as CUDA counts.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.memory = Memory(self._new_memory, lambda nbytes: cuda.pinned_array(nbytes, np.uint8))
        # Numba's streams wait for the default one, on which everything is computed, and it waits for them.
        self._lock = threading.Lock()
        self._streams: dict[str, Any] = {}
        self._run = Launches().run

    def sum_lists(self, lists: Sequence[Sequence[Any]], squares: list[float | None] | None = None) -> list[Array]:
        """Return the sum of each list in the host's memory; one launch makes those of one dtype and length of a list.

        What lies on this device is used where it lies; what lies elsewhere is copied here first. Low precisions are
        added in float32, and rounded once.

        Args:
            lists: arrays of one spec each, of floats.
            squares: takes the sum of the squares of each sum; None of float64, whose squares may be too large.

        Raises:
            SpecMismatchError: an array can't be used.
            DeviceMemoryError: the device has not enough memory.
        """
        with self._lock, cuda.gpus[self.number]:
            rows = [[self._bring(array) for array in arrays] for arrays in lists]
            sums = Packed(self.memory, [(row[0].size, row[0].dtype) for row in rows])
            measured: dict[int, float] | None = None if squares is None else {}
            self._sum(rows, sums.tensors, measured)
            if squares is not None and measured is not None:
                squares.extend(self._squares(sums.tensors, measured))
            return [found.reshape(arrays[0].shape) for found, arrays in zip(sums.read(), lists, strict=True)]

    def sum_rows(self, ids: Array, values: Any) -> tuple[Array, Array]:
        """Return row ids, increasing and each once, and the sums of their rows in the host's memory.

        Args:
            ids: int64[n] in the host's memory, at least one, in any order.
            values: a row of floats for each, on this device.

        Raises:
            SpecMismatchError: the values can't be used.
            DeviceMemoryError: the device has not enough memory.
        """
        with self._lock, cuda.gpus[self.number]:
            tensor = self._bring(values)
            segments = sparse.segments_of(ids)
            shape = (segments.rows.size, *tensor.shape[1:])
            size = int(np.prod(shape))
            sums = Packed(self.memory, [(size, tensor.dtype)])
            (out,) = sums.tensors
            if size:
                # A sum that is too large for the dtype shows it in its values.
                with np.errstate(all="ignore"):
                    total = self.memory.on_device(size, FLOAT32) if is_low(tensor.dtype) else out
                    sparse.sum_segments(total, segments, tensor, tensor.size // ids.size)
                    if total is not out:
                        reduce.narrow([total], [out], run=self._run)
            return segments.rows, sums.read()[0].reshape(shape)

    # --- gradients that are encoded here ---

    def encodes(self, codec: Codec, dtype: str) -> bool:
        """Say whether gradients of a dtype can be encoded here."""
        return encoding.encodes(codec, dtype)

    def keep_sums(self, lists: Sequence[Sequence[Any]], squares: list[float | None] | None = None) -> list[Tensor]:
        """Return the sums that `sum_lists` makes of arrays of at most float32, in float32 on this device.

        A single array of float32 is its own sum, and stays the caller's.

        Raises:
            SpecMismatchError: an array can't be used.
            DeviceMemoryError: the device has not enough memory.
        """
        with self._lock, cuda.gpus[self.number]:
            rows = [[self._bring(array) for array in arrays] for arrays in lists]
            # What is encoded is what would be sent, so it is rounded as that would be.
            low = [n for n, row in enumerate(rows) if len(row) > 1 and is_low(row[0].dtype)]
            rounded = self._packed([rows[n] for n in low])
            self._sum([rows[n] for n in low], rounded)
            sources = dict(enumerate(rows)) | {n: [each] for n, each in zip(low, rounded, strict=True)}
            made = [n for n, row in sources.items() if len(row) > 1 or row[0].dtype != FLOAT32]
            totals = self._packed([rows[n] for n in made], FLOAT32)
            self._sum([sources[n] for n in made], totals)
            found = dict(zip(made, totals, strict=True))
            sums = [found.get(n, row[0]) for n, row in enumerate(rows)]
            if squares is not None:
                squares.extend(self._squares(sums, {}))
            return sums

    def new_encoder(self, codec: Codec, key: Key, size: int, dtype: str, step: int) -> DeviceEncoder:
        """Return what encodes the gradients of a key here, and keeps their residual."""
        return DeviceEncoder(codec, key, size, dtype, self.number, self.memory, step=step)

    def check(self, gradients: Sequence[tuple[DeviceEncoder, Tensor, Sequence[tuple[int, int]]]]) -> Any:
        """Look whether gradients of one codec can be encoded, all of them; return what `encode` needs to know.

        Args:
            gradients: encoder, values and cuts of each.

        Raises:
            NotFiniteError: one can't be encoded. Nothing has changed.
        """
        found = [encoding.Gradient(*each) for each in gradients]
        with self._lock, cuda.gpus[self.number]:
            return found, encoding.check(found, self._run)

    def encode(self, checked: Any) -> list[list[memoryview]]:
        """Return the payloads of what was checked, for each gradient one for each cut."""
        found, largest = checked
        with self._lock, cuda.gpus[self.number]:
            return encoding.encode(found, largest, self.memory, self._run)

    # --- copies ---

    def fetch(self, arrays: Sequence[Any]) -> list[Array]:
        """Return copies in the host's memory of arrays on this device, of any dtypes.

        Raises:
            SpecMismatchError: an array can't be used.
        """
        with cuda.gpus[self.number]:
            stream = self._stream("to host")
            found = []
            for array in arrays:
                tensor = tensor_of("array", array)
                memory = self.memory.on_host(tensor.nbytes)
                read(tensor, memory, stream)
                found.append(memory.view(tensor.dtype).reshape(tensor.shape))
            stream.synchronize()
            return found

    def load(self, array: Array) -> Any:
        """Return a copy on this device of an array in the host's memory, as one of Numba's.

        Raises:
            SpecMismatchError: Numba has no arrays of that dtype, or it lies on a device already.
            DeviceMemoryError: the device has not enough memory.
        """
        if is_on_device(array) or (array.dtype == BFLOAT16 and not SIMULATED):
            raise mismatch(
                "data",
                "an array in the host's memory of a dtype that Numba has",
                f"{type(array).__name__} of {array.dtype}",
            )
        with cuda.gpus[self.number]:
            return self._allocated(array.nbytes, lambda: cuda.to_device(np.ascontiguousarray(array)))

    def allocate(self, nbytes: int) -> Array:
        """Return page-locked memory of the host, uint8: a device copies from it while the program does other things."""
        with cuda.gpus[self.number]:
            return self.memory.on_host(nbytes)

    def writable(self, array: Any) -> Tensor:
        """Return what `start` takes of an array on this device; what its library still does with it is done first.

        Raises:
            SpecMismatchError: nobody may write to the array, or it can't be used.
        """
        with cuda.gpus[self.number]:
            return writable_tensor("out", array)

    def start(self, memory: Array, target: Tensor, rows: Array | None, first: int = 0) -> None:
        """Begin to copy page-locked memory, uint8, which stays as it is until `wait` has returned.

        Args:
            memory: the bytes of a part of the target, or of some rows of it.
            target: from `writable`.
            rows: int64, which rows those are; all others become zero. None: a part.
            first: where the part begins.

        Raises:
            DeviceMemoryError: the device has not enough memory for the rows.
        """
        with cuda.gpus[self.number]:
            stream = self._stream("to device")
            if rows is None:
                part = memory_of(target)[first : first + memory.size]
                part.copy_to_device(memory, stream=stream)
                return
            sparse.clear(target, stream=stream)
            if rows.size:
                values = self.memory.on_device(memory.size, memory.dtype)
                memory_of(values).copy_to_device(memory, stream=stream)
                sparse.scatter_bytes(target, rows, values, stream=stream)

    def wait(self) -> None:
        """Return when all copies are there that were begun."""
        with cuda.gpus[self.number]:
            self._stream("to device").synchronize()

    # --- inside ---

    def _bring(self, array: Any) -> Tensor:
        if not is_on_device(array):
            return Copy(np.ascontiguousarray(array).reshape(-1)).tensor
        tensor = tensor_of("array", array)
        if SIMULATED or tensor.device is None or tensor.device == self.number:
            return tensor
        peers.connect(self.number, tensor.device)
        here = self.memory.on_device(tensor.size, tensor.dtype)
        memory_of(here).copy_to_device(memory_of(tensor))
        return replace(here, shape=tensor.shape)

    def _squares(self, sums: Sequence[Tensor], measured: dict[int, float]) -> list[float | None]:
        """Return the sums of squares, of what is not yet measured; all sums have elements."""
        left: dict[str, list[int]] = {}
        for number, each in enumerate(sums):
            if number not in measured and each.dtype.itemsize <= FLOAT32.itemsize:
                left.setdefault(each.dtype.name, []).append(number)
        for dtype, numbers in left.items():
            results = self._run(reduce.squares_spec(dtype), [[sums[n]] for n in numbers])
            measured |= zip(numbers, reduce.by_tensor(results, [sums[n].size for n in numbers]), strict=True)
        return [measured.get(number) for number in range(len(sums))]

    def _sum(
        self, rows: Sequence[list[Tensor]], outs: Sequence[Tensor], measured: dict[int, float] | None = None
    ) -> None:
        """Write sums of arrays of one dtype each, in that dtype or, of a low precision, in float32.

        What has its squares added in the same pass goes to `measured`: sums that are not rounded once more.
        """
        groups: dict[tuple[int, str, str], list[int]] = {}
        for number, (row, out) in enumerate(zip(rows, outs, strict=True)):
            groups.setdefault((len(row), row[0].dtype.name, out.dtype.name), []).append(number)
        # A sum that is too large for the dtype shows it in its values.
        with np.errstate(all="ignore"):
            for numbers in groups.values():
                sources, targets = [rows[n] for n in numbers], [outs[n] for n in numbers]
                if is_low(targets[0].dtype):
                    totals = self._packed(sources, FLOAT32)
                    reduce.sum_into(totals, sources, run=self._run)
                    reduce.narrow(totals, targets, run=self._run)
                elif measured is not None and targets[0].dtype == FLOAT32:
                    results = reduce.sum_with_squares(targets, sources, run=self._run)
                    measured |= zip(numbers, reduce.by_tensor(results, [each.size for each in targets]), strict=True)
                else:
                    reduce.sum_into(targets, sources, run=self._run)

    def _packed(self, rows: Sequence[list[Tensor]], dtype: np.dtype[Any] | None = None) -> list[Tensor]:
        """Return memory for something of each of some arrays' size, and of their dtype if none is given."""
        return Packed(self.memory, [(row[0].size, dtype or row[0].dtype) for row in rows]).tensors

    def _stream(self, name: str) -> Any:
        """Return a stream of this device, which is the current one."""
        if name not in self._streams:
            self._streams[name] = cuda.stream()
        return self._streams[name]

    def _new_memory(self, nbytes: int) -> Any:
        return self._allocated(nbytes, lambda: cuda.device_array(nbytes, np.uint8))

    def _allocated(self, nbytes: int, make: Callable[[], Any]) -> Any:
        """Return what makes an array on the device; say how much was wanted where there is not enough."""
        try:
            return make()
        except MemoryError as error:
            raise self._full(nbytes, error) from error
        except Exception as error:
            # Numba's own error for what the driver says; the simulator has no such class.
            if "OUT_OF_MEMORY" not in str(error):
                raise
            raise self._full(nbytes, error) from error

    def _full(self, nbytes: int, error: Exception) -> DeviceMemoryError:
        text = f"CUDA device {self.number} has no {nbytes} bytes more for a buffer: {error}"
        return DeviceMemoryError(text, expected=nbytes, got=str(error))
