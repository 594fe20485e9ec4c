"""Arrays of other libraries that lie on a CUDA device: told apart and described, without a CUDA package."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401 - with it NumPy knows the name "bfloat16"
import numpy as np

CUDA_DEVICE, MANAGED_DEVICE = 2, 13
"""Numbers of DLPack."""


def is_on_device(array: Any) -> bool:
    """Tell whether an array of another library lies on a CUDA device."""
    if isinstance(array, np.ndarray):
        return False
    if hasattr(array, "__cuda_ndarray__"):
        # Numba's own, and what its simulator has for them: DLPack would call those an array of the host.
        return True
    if hasattr(array, "__dlpack_device__"):
        return dlpack_device(array) in {CUDA_DEVICE, MANAGED_DEVICE}
    # PyTorch has the attribute, but it is an error to ask for it where the tensor lies elsewhere.
    return hasattr(type(array), "__cuda_array_interface__")


def dlpack_device(array: Any) -> int | None:
    """Return DLPack's number of the kind of device that an array lies on; None where DLPack has none."""
    try:
        return int(array.__dlpack_device__()[0])
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None


def is_immutable(array: Any) -> bool:
    """Tell whether nobody may write to an array, although its memory says nothing of that: JAX's are so."""
    return type(array).__module__.partition(".")[0] in {"jax", "jaxlib"}


class OnDevice:
    """An array on a device, with what NumPy would say of it.

    Args:
        array: of CuPy, PyTorch, JAX, Numba or another library with DLPack or `__cuda_array_interface__`.
    """

    __slots__ = ("array", "dtype", "nbytes", "number", "shape")

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype = _dtype_of(array)
        self.nbytes = int(np.prod(self.shape)) * self.dtype.itemsize
        self.number = _number_of(array)
        """Of the device, as CUDA counts; 0 where the array does not say it."""


def _number_of(array: Any) -> int:
    if hasattr(array, "gpu_data"):
        # Numba's.
        return int(array.gpu_data.context.device.id)
    return int(array.__dlpack_device__()[1]) if hasattr(array, "__dlpack_device__") else 0


def _dtype_of(array: Any) -> np.dtype[Any]:
    try:
        found: np.dtype[Any] = np.dtype(array.dtype)
    except TypeError:
        # PyTorch's are no types, and have names such as "torch.float32".
        found = np.dtype(str(array.dtype).rpartition(".")[2])
    return found
