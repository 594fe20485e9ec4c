"""float16 and bfloat16 in compiled code, which has no such numbers: elements are integers that are turned to float32.

To the kernels a float16 is a uint16 and a bfloat16 an int16, so that the type says which of them it is.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import config
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.kernels.reference import Array

BYTES = 2

FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def has_float16() -> bool:
    """Tell whether the code that Numba makes may use instructions that convert float16."""
    if platform.machine().lower() in {"aarch64", "arm64"}:
        return True
    # Numba can be told to compile for another processor than this one.
    features: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
    return "+f16c" in (binding.get_host_cpu_features().flatten() if features is None else features)


def as_integers(array: Array) -> Array:
    """Return an array as kernels take it."""
    if array.itemsize > BYTES:
        return array
    if array.dtype == FLOAT16:
        return array.view(np.uint16)
    if array.dtype == BFLOAT16:
        return array.view(np.int16)
    return array


def _intrinsic(describe: Callable[..., Any]) -> Any:
    """Make a function for compiled code of one that gives its signature and what emits its instructions."""
    return intrinsic(describe)


@_intrinsic
def number(_context: Any, element: Any) -> Any:
    """Return an element as a number to compute with."""
    if element == types.uint16:
        return types.float32(element), widen_float16
    if element == types.int16:
        return types.float32(element), widen_bfloat16
    return element(element), lambda _context, _builder, _signature, args: args[0]


@_intrinsic
def element(_context: Any, number: Any, like: Any) -> Any:
    """Return a number as an element of the same type as `like`: the inverse of `number`, rounded to nearest even."""
    if like == types.uint16:
        return like(number, like), narrow_float16
    if like == types.int16:
        return like(number, like), narrow_bfloat16
    return number(number, like), lambda _context, _builder, _signature, args: args[0]


def widen_float16(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    """Emit what makes a float32 of a float16."""
    return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())


def narrow_float16(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    """Emit what makes a float16 of a float32, rounded to nearest even."""
    return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))


def widen_bfloat16(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    """Emit what makes a float32 of a bfloat16, which is its upper half."""
    wide = builder.zext(args[0], ir.IntType(32))
    return builder.bitcast(builder.shl(wide, ir.IntType(32)(16)), ir.FloatType())


def narrow_bfloat16(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    """Emit what makes a bfloat16 of a float32, rounded to nearest even.

    Adding a half of the last digit, or a little less where that one is even, carries into it when it must.
    """
    word = ir.IntType(32)
    bits = builder.bitcast(args[0], word)
    odd = builder.and_(builder.lshr(bits, word(16)), word(1))
    rounded = builder.add(bits, builder.add(odd, word(0x7FFF)))
    # In a NaN that could carry into the sign: it is made quiet instead.
    quiet = builder.or_(bits, word(0x400000))
    chosen = builder.select(builder.fcmp_unordered("uno", args[0], args[0]), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, word(16)), ir.IntType(16))
