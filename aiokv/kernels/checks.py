"""What arrays must be before a kernel gets them: kernels check nothing; a wrong length would crash them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from aiokv.errors import OptimizerError, SpecMismatchError
from aiokv.optim import PRECISIONS
from aiokv.types import ITEM_SIZES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aiokv.kernels.reference import Array
    from aiokv.optim import Norms, Optimizer

# NumPy knows the name bfloat16 once this package is imported.
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

FLOAT32 = np.dtype(np.float32)

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


def is_low(dtype: np.dtype[Any]) -> bool:
    """Tell whether numbers of that dtype are computed with in float32."""
    return dtype != FLOAT32 and _PRECISIONS.get(dtype) == FLOAT32


def check_first(name: str, array: Array) -> None:
    """Check an array that decides what the others must be like.

    Raises:
        SpecMismatchError: a kernel can't take it.
    """
    check_memory(name, array)
    if array.dtype not in _DTYPES:
        raise mismatch(name, f"one of {', '.join(ITEM_SIZES)}, in native byte order", f"dtype {array.dtype.str}")


def check_like(name: str, array: Array, size: int, dtype: np.dtype[Any], model: str) -> None:
    """Check an array that must have a certain length, to fit the first one, whose name is `model`.

    Raises:
        SpecMismatchError: it has not, or another dtype, or a kernel can't take it.
    """
    check_memory(name, array)
    if array.dtype != dtype or array.size != size:
        raise mismatch(name, f"{dtype}[{size}] to fit {model}", f"{array.dtype}[{array.size}]")


def check_total(total: Array, weight: Array) -> None:
    """Check a sum, which is like the weight; float32 will do for a lower precision.

    Raises:
        SpecMismatchError: it is neither, or a kernel can't take it.
    """
    check_memory("total", total)
    wide = total.dtype == FLOAT32 and is_low(weight.dtype)
    check_like("total", total, weight.size, FLOAT32 if wide else weight.dtype, "weight")


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


def state_layout(rule: Optimizer, weight: Array, row_size: int) -> dict[str, tuple[np.dtype[Any], int]]:
    """Return dtype and length of each array that a rule keeps for a weight.

    Raises:
        SpecMismatchError: the rule can't update weights of that dtype, or they are not whole rows.
    """
    keeps = rule.keeps
    keeps_master = is_low(weight.dtype) and getattr(rule, "multi_precision", False)
    if not keeps and not keeps_master:
        return {}
    size = weight.size
    if rule.by_row:
        if row_size < 1 or size % row_size:
            raise mismatch("weight", f"whole rows of {row_size} elements", f"{size} elements")
        size //= row_size
    precision = precision_for(weight.dtype)
    layout = dict.fromkeys(keeps, (precision, size))
    return layout | {"master": (precision, weight.size)} if keeps_master else layout


def check_state(rule: Optimizer, weight: Array, state: Mapping[str, Array], row_size: int) -> None:
    """Check what a rule keeps.

    Raises:
        OptimizerError: its names are those of another rule's.
        SpecMismatchError: an array does not fit the weight, is read-only, or overlaps another one.
    """
    layout = state_layout(rule, weight, row_size)
    if state.keys() != layout.keys():
        expected, got = (", ".join(sorted(each)) or "nothing" for each in (layout, state))
        raise OptimizerError(
            f"{rule} keeps {expected}, but the state has {got}; make one with new_state", expected=expected, got=got
        )
    before = [("weight", weight)]
    for name, array in state.items():
        dtype, size = layout[name]
        check_like(name, array, size, dtype, "weight")
        check_written(name, array, before)
        before.append((name, array))


def check_norms(rule: Optimizer, norms: Norms, phases: int) -> None:
    """Raise OptimizerError unless there are the sums of squares of so many phases."""
    expected, got = list(rule.norm_counts[:phases]), [len(sums) for sums in norms]
    if got != expected:
        raise OptimizerError(
            f"optimizer {rule.name!r} needs sums of squares of {phases} phases, {expected} of them, got {got}",
            expected=expected,
            got=got,
        )


def mismatch(name: str, expected: str, got: str) -> SpecMismatchError:
    """Return the error that says what an array must be, and what it was."""
    return SpecMismatchError(f"{name} must be {expected}; got {got}", expected=expected, got=got)


def check_memory(name: str, array: Array) -> None:
    """Check that an array lies in memory as kernels expect.

    Raises:
        SpecMismatchError: it does not.
    """
    if not isinstance(array, np.ndarray):
        raise mismatch(name, "a NumPy array", type(array).__name__)
    if array.ndim != 1 or not array.flags.c_contiguous:
        got = f"shape {array.shape}, strides {array.strides}"
        raise mismatch(name, "one-dimensional and C-contiguous; pass a.reshape(-1)", got)
