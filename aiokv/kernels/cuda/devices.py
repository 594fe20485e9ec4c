"""The devices of this machine, as a worker uses them: it sums arrays there, and copies values to arrays there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda

from aiokv.errors import DeviceMemoryError
from aiokv.kernels.checks import BFLOAT16, mismatch
from aiokv.kernels.cuda import reduce, sparse
from aiokv.kernels.cuda.memory import SIMULATED
from aiokv.kernels.cuda.tensors import Copy, Tensor, memory_of, tensor_of, writable_tensor
from aiokv.kernels.foreign import is_on_device
from aiokv.optim import PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
            total = self._buffer(key, first.size, np.dtype(PRECISIONS[first.dtype.name]))
            if not first.size:
                return np.empty(first.shape, first.dtype)
            reduce.sum_into([total], [tensors])
            # A sum that is too large for the dtype shows it in its values.
            with np.errstate(all="ignore"):
                found: Array = total.copy_to_host().astype(first.dtype, copy=False)
            return found.reshape(tuple(arrays[0].shape))

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
