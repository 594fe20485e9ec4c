"""The devices of this machine, as a worker uses them: it sums arrays there, and copies values to arrays there."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda

from aiokv.errors import DeviceMemoryError
from aiokv.kernels.checks import BFLOAT16, is_low, mismatch
from aiokv.kernels.cuda import encoding, reduce, sparse
from aiokv.kernels.cuda.encoding import DeviceEncoder, read
from aiokv.kernels.cuda.memory import SIMULATED
from aiokv.kernels.cuda.tensors import Copy, Tensor, memory_of, tensor_of, writable_tensor
from aiokv.kernels.foreign import is_on_device
from aiokv.optim import PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.codec import Codec
    from aiokv.kernels.reference import Array
    from aiokv.types import Key


def all_devices() -> list[Device]:
    """Return every device that this process sees."""
    return [Device(number) for number in range(len(cuda.gpus))]


class Device:
    """One device. A key's buffer there is used again at each push; see `aiokv.list_sums.Device`.

    Args:
        number: as CUDA counts.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._buffers: dict[Key, Any] = {}
        # Two threads must not use one buffer at once.
        self._lock = threading.Lock()
        self._copying: Any = None
        """The stream of copies from the host's memory: they need not wait for sums."""
        self._idle: dict[int, list[Any]] = {}
        """Buffers of float32 for sums that are kept, by their length."""

    def sum_arrays(self, key: Key, arrays: Sequence[Any]) -> Array:
        """Return the sum of arrays of one float dtype, in their order, as an array in the host's memory.

        What lies on this device is used where it lies; what lies elsewhere is copied here first. Low precisions are
        added in float32, and rounded once.

        Raises:
            SpecMismatchError: an array can't be used.
            DeviceMemoryError: the device has not enough memory.
        """
        with self._lock, cuda.gpus[self.number]:
            tensors = [self._bring(array) for array in arrays]
            first = tensors[0]
            found = np.empty(tuple(arrays[0].shape), first.dtype)
            if not first.size:
                return found
            total = self._buffer(key, first.size, np.dtype(PRECISIONS[first.dtype.name]))
            # A sum that is too large for the dtype shows it in its values.
            with np.errstate(all="ignore"):
                reduce.sum_into([total], [tensors])
                rounded = self._narrowed(total, first.dtype) if is_low(first.dtype) else tensor_of("total", total)
            read(rounded, found.reshape(-1))
            return found

    def sum_rows(self, ids: Array, values: Any) -> tuple[Array, Array]:
        """Return row ids, increasing and each once, and the sums of their rows in the host's memory.

        Args:
            ids: int64[n] in the host's memory, at least one, in any order.
            values: a row of floats for each, on this device.

        Raises:
            SpecMismatchError: the values can't be used.
            DeviceMemoryError: the device has not enough memory.
        """
        with self._lock, cuda.gpus[self.number], np.errstate(all="ignore"):
            tensor = self._bring(values)
            segments = sparse.segments_of(ids)
            shape = (segments.rows.size, *tensor.shape[1:])
            found = np.empty(shape, tensor.dtype)
            if found.size:
                total = self._allocate(found.size, np.dtype(PRECISIONS[tensor.dtype.name]))
                sparse.sum_segments(total, segments, tensor, tensor.size // ids.size)
                rounded = self._narrowed(total, tensor.dtype) if is_low(tensor.dtype) else tensor_of("total", total)
                read(rounded, found.reshape(-1))
            return segments.rows, found

    # --- gradients that are encoded here ---

    def encodes(self, codec: Codec, dtype: str) -> bool:
        """Say whether gradients of a dtype can be encoded here."""
        return encoding.encodes(codec, dtype)

    def keep_sum(self, arrays: Sequence[Any]) -> Tensor:
        """Return the sum that `sum_arrays` makes of arrays of at most float32, in float32 on this device.

        A single array of float32 is its own sum, and stays the caller's.

        Raises:
            SpecMismatchError: an array can't be used.
            DeviceMemoryError: the device has not enough memory.
        """
        with self._lock, cuda.gpus[self.number], np.errstate(all="ignore"):
            tensors = [self._bring(array) for array in arrays]
            first = tensors[0]
            if len(tensors) == 1 and first.dtype == np.float32:
                return first
            idle = self._idle.get(first.size)
            total = idle.pop() if idle else self._allocate(first.size, np.dtype(np.float32))
            reduce.sum_into([total], [tensors])
            if len(tensors) > 1 and is_low(first.dtype):
                reduce.sum_into([total], [[self._narrowed(total, first.dtype)]])
            return tensor_of("total", total)

    def release(self, total: Tensor) -> None:
        """Take back a sum that `keep_sum` has made, and that nobody reads any longer."""
        with self._lock:
            self._idle.setdefault(total.size, []).append(total.owner)

    def new_encoder(self, codec: Codec, key: Key, size: int, dtype: str, step: int) -> DeviceEncoder:
        """Return what encodes the gradients of a key here, and keeps their residual."""
        return DeviceEncoder(codec, key, size, dtype, self.number, step=step)

    def check(self, gradients: Sequence[tuple[DeviceEncoder, Tensor, Sequence[tuple[int, int]]]]) -> Any:
        """Look whether gradients of one codec can be encoded, all of them; return what `encode` needs to know.

        Args:
            gradients: encoder, values and cuts of each.

        Raises:
            NotFiniteError: one can't be encoded. Nothing has changed.
        """
        found = [encoding.Gradient(*each) for each in gradients]
        with self._lock, cuda.gpus[self.number]:
            return found, encoding.check(found)

    def encode(self, checked: Any) -> list[list[memoryview]]:
        """Return the payloads of what was checked, for each gradient one for each cut."""
        with self._lock, cuda.gpus[self.number]:
            return encoding.encode(*checked)

    # --- copies ---

    def to_host(self, array: Any) -> Array:
        """Return a copy in the host's memory of an array on this device, of any dtype.

        Raises:
            SpecMismatchError: the array can't be used.
        """
        with cuda.gpus[self.number]:
            tensor = tensor_of("array", array)
            found = np.empty(tensor.shape, tensor.dtype)
            if tensor.size:
                memory_of(tensor).copy_to_host(found.reshape(-1).view(np.uint8))
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
            found: Array = cuda.pinned_array(nbytes, np.uint8)
            return found

    def writable(self, array: Any) -> Tensor:
        """Return what `start` takes of an array on this device; what its library still does with it is done first.

        Raises:
            SpecMismatchError: nobody may write to the array, or it can't be used.
        """
        with cuda.gpus[self.number]:
            return writable_tensor("out", array)

    def start(self, memory: Array, target: Tensor, rows: Array | None) -> None:
        """Begin to copy page-locked memory, uint8, which stays as it is until `wait` has returned.

        Args:
            memory: the bytes of the whole target, or of some rows of it.
            target: from `writable`.
            rows: int64, which rows those are; all others become zero. None: the whole target.

        Raises:
            DeviceMemoryError: the device has not enough memory for the rows.
        """
        with cuda.gpus[self.number]:
            if self._copying is None:
                self._copying = cuda.stream()
            if rows is None:
                memory_of(target).copy_to_device(memory, stream=self._copying)
                return
            sparse.clear(target, stream=self._copying)
            if rows.size:
                values = self._allocate(memory.size, np.dtype(np.uint8))
                values.copy_to_device(memory, stream=self._copying)
                sparse.scatter_bytes(target, rows, values, stream=self._copying)

    def wait(self) -> None:
        """Return when all copies are there that were begun."""
        if self._copying is not None:
            with cuda.gpus[self.number]:
                self._copying.synchronize()

    # --- inside ---

    def _bring(self, array: Any) -> Tensor:
        if not is_on_device(array):
            return Copy(np.ascontiguousarray(array).reshape(-1)).tensor
        tensor = tensor_of("array", array)
        if SIMULATED or tensor.device in (None, self.number):
            return tensor
        here = self._allocate(tensor.nbytes, np.dtype(np.uint8))
        here.copy_to_device(memory_of(tensor))
        return Tensor(here.__cuda_array_interface__["data"][0], tensor.size, tensor.dtype, here, tensor.shape)

    def _narrowed(self, total: Any, dtype: np.dtype[Any]) -> Tensor:
        """Return a sum in a lower precision."""
        memory = self._allocate(total.size * dtype.itemsize, np.dtype(np.uint8))
        found = replace(tensor_of("total", memory), size=total.size, dtype=dtype)
        reduce.narrow(total, found)
        return found

    def _buffer(self, key: Key, size: int, dtype: np.dtype[Any]) -> Any:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size != size or buffer.dtype != dtype:
            buffer = self._buffers[key] = self._allocate(size, dtype)
        return buffer

    def _allocate(self, size: int, dtype: np.dtype[Any]) -> Any:
        return self._allocated(size * dtype.itemsize, lambda: cuda.device_array(size, dtype))

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
