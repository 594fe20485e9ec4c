"""What arrays must be before a kernel gets them: kernels check nothing; a wrong length would crash them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.errors import SpecMismatchError
from aiokv.optim import PRECISIONS
from aiokv.types import ITEM_SIZES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.kernels.reference import Array

_DTYPES = frozenset(np.dtype(name) for name in ITEM_SIZES)
"""In native byte order: `>f4` is not among them on a little-endian machine."""

_PRECISIONS = {np.dtype(dtype): np.dtype(precision) for dtype, precision in PRECISIONS.items()}


def precision_for(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return in what precision weights of that dtype are updated.

    Raises:
        SpecMismatchError: they are no floats.
    """
    precision = _PRECISIONS.get(dtype)
    if precision is None:
        raise mismatch("weight", f"one of {', '.join(PRECISIONS)}", f"dtype {dtype}")
    return precision


def check_first(name: str, array: Array) -> None:
    """Check an array that decides what the others must be like.

    Raises:
        SpecMismatchError: a kernel can't take it.
    """
    _check_memory(name, array)
    if array.dtype not in _DTYPES:
        raise mismatch(name, f"one of {', '.join(ITEM_SIZES)}, in native byte order", f"dtype {array.dtype.str}")


def check_like(name: str, array: Array, size: int, dtype: np.dtype[Any], model: str) -> None:
    """Check an array that must have as many elements as the first one, whose name is `model`.

    Raises:
        SpecMismatchError: it has not, or another dtype, or a kernel can't take it.
    """
    _check_memory(name, array)
    if array.dtype != dtype or array.size != size:
        raise mismatch(name, f"{dtype}[{size}] to fit {model}", f"{array.dtype}[{array.size}]")


def check_written(name: str, array: Array, others: Iterable[tuple[str, Array]]) -> None:
    """Check an array that a kernel writes.

    Raises:
        SpecMismatchError: it is read-only, or overlaps another one.
    """
    if not array.flags.writeable:
        raise mismatch(name, "writable", "a read-only array")
    for other, neighbour in others:
        if np.may_share_memory(array, neighbour):
            raise mismatch(name, f"apart from {other} in memory", "arrays that overlap")


def mismatch(name: str, expected: str, got: str) -> SpecMismatchError:
    """Return the error that says what an array must be, and what it was."""
    return SpecMismatchError(f"{name} must be {expected}; got {got}", expected=expected, got=got)


def _check_memory(name: str, array: Array) -> None:
    if not isinstance(array, np.ndarray):
        raise mismatch(name, "a NumPy array", type(array).__name__)
    if array.ndim != 1 or not array.flags.c_contiguous:
        got = f"shape {array.shape}, strides {array.strides}"
        raise mismatch(name, "one-dimensional and C-contiguous; pass a.reshape(-1)", got)
