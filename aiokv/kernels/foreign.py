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


class OnDevice:
    """An array on a device, with what NumPy would say of it.

    Args:
        array: of CuPy, PyTorch, JAX, Numba or another library with DLPack or `__cuda_array_interface__`.
    """

    __slots__ = ("array", "dtype", "nbytes", "shape")

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype = _dtype_of(array)
        self.nbytes = int(np.prod(self.shape)) * self.dtype.itemsize


def _dtype_of(array: Any) -> np.dtype[Any]:
    try:
        found: np.dtype[Any] = np.dtype(array.dtype)
    except TypeError:
        # PyTorch's are no types, and have names such as "torch.float32".
        found = np.dtype(str(array.dtype).rpartition(".")[2])
    return found
