"""Arrays on devices for libraries that take DLPack."""

from __future__ import annotations

from typing import Any

from aiokv.kernels import export_array


def with_dlpack(array: Any) -> Any:
    """Return an object with DLPack over the memory of an array on a device, for `from_dlpack` of other libraries.

    What `split_and_load` returns, and other arrays of Numba, have `__cuda_array_interface__` alone, which JAX does not
    take everywhere. Nothing is copied; the memory stays for as long as anybody uses it.

    Args:
        array: of Numba or another library, C-contiguous.

    Raises:
        SpecMismatchError: its memory can't be used.
        ConfigError: this machine has no device.
        MissingExtraError: numba-cuda is not installed.
    """
    return export_array(array)
