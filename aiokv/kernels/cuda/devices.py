"""The devices of this machine, as a worker sums on them the arrays that a call gives for one key."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda

from aiokv.errors import DeviceMemoryError
from aiokv.kernels.cuda import reduce
from aiokv.kernels.cuda.memory import SIMULATED
from aiokv.kernels.cuda.tensors import Copy, Tensor, tensor_of
from aiokv.kernels.foreign import is_on_device
from aiokv.optim import PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.kernels.reference import Array
    from aiokv.types import Key


def all_devices() -> list[Device]:
    """Return every device that this process sees."""
    return [Device(number) for number in range(len(cuda.gpus))]


class Device:
    """Sums on one device. A key's buffer there is used again at each push.

    Args:
        number: as CUDA counts.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._buffers: dict[Key, Any] = {}
        # Two threads must not use one buffer at once.
        self._lock = threading.Lock()

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

    def _bring(self, array: Any) -> Tensor:
        if not is_on_device(array):
            return Copy(np.ascontiguousarray(array).reshape(-1)).tensor
        tensor = tensor_of("array", array)
        if SIMULATED or tensor.device in (None, self.number):
            return tensor
        # Numba reads memory of another device through the addresses that all devices share.
        there = cuda.as_cuda_array(_Bytes(tensor))  # type: ignore[no-untyped-call]
        here = self._allocate(tensor.nbytes, np.dtype(np.uint8))
        here.copy_to_device(there)
        return Tensor(here.__cuda_array_interface__["data"][0], tensor.size, tensor.dtype, here, tensor.shape)

    def _buffer(self, key: Key, size: int, dtype: np.dtype[Any]) -> Any:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size != size or buffer.dtype != dtype:
            buffer = self._buffers[key] = self._allocate(size, dtype)
        return buffer

    def _allocate(self, size: int, dtype: np.dtype[Any]) -> Any:
        try:
            return cuda.device_array(size, dtype)
        except MemoryError as error:
            raise self._full(size * dtype.itemsize, error) from error
        except Exception as error:
            # Numba's own error for what the driver says; the simulator has no such class.
            if "OUT_OF_MEMORY" not in str(error):
                raise
            raise self._full(size * dtype.itemsize, error) from error

    def _full(self, nbytes: int, error: Exception) -> DeviceMemoryError:
        text = f"CUDA device {self.number} has no {nbytes} bytes more for a buffer: {error}"
        return DeviceMemoryError(text, expected=nbytes, got=str(error))


class _Bytes:
    """A tensor's memory as bytes, for Numba."""

    def __init__(self, tensor: Tensor) -> None:
        self.owner = tensor
        data = (tensor.address, tensor.read_only)
        self.__cuda_array_interface__ = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": data, "version": 3}
