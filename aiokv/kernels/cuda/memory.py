"""How kernels read and write: by address, one element or 16 bytes at a time; and the same for Numba's simulator.

A kernel gets the addresses of all its tensors in a table, so that one launch can go over many of them. What lies there
is said by a dtype: to compiled code a float16 is a uint16 and a bfloat16 an int16, as in `aiokv.kernels.halves`. The
simulator has the real dtypes, and computes with NumPy's scalars.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numba.core import config

if TYPE_CHECKING:
    from collections.abc import Callable

SIMULATED: bool = bool(config.ENABLE_CUDASIM)

VECTOR = 16
"""Bytes that the widest load or store of one thread moves."""

FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)

if SIMULATED:

    def kind(dtype: str) -> Any:
        """Return what a kernel is told to read."""
        return np.dtype(dtype)

    def like(dtype: str) -> Any:
        """Return an example of what a kernel writes."""
        return np.dtype(dtype).type(0)

    def _at(address: int, start: int, count: int, dtype: np.dtype[Any]) -> Any:
        nbytes = count * dtype.itemsize
        memory: Any = (ctypes.c_char * nbytes).from_address(int(address) + int(start) * dtype.itemsize)
        return np.frombuffer(memory, dtype)

    def read(address: int, i: int, dtype: Any) -> Any:
        """Return element `i` of what lies at the address."""
        return _at(address, i, 1, dtype)[0]

    def read_vector(address: int, i: int, dtype: Any) -> Any:
        """Return the elements from `i` on that 16 bytes have; their address is a multiple of 16."""
        if (int(address) + int(i) * dtype.itemsize) % VECTOR:
            raise AssertionError(f"16 bytes are read at {address} + {i} * {dtype.itemsize}")
        return tuple(_at(address, i, VECTOR // dtype.itemsize, dtype))

    def write(address: int, i: int, value: Any) -> None:
        """Make a value element `i` of what lies at the address."""
        _at(address, i, 1, value.dtype)[0] = value

    def write_vector(address: int, i: int, values: Any) -> None:
        """Make values the elements from `i` on; they have 16 bytes together."""
        if (int(address) + int(i) * values[0].dtype.itemsize) % VECTOR:
            raise AssertionError(f"16 bytes are written at {address} + {i} * {values[0].dtype.itemsize}")
        _at(address, i, len(values), values[0].dtype)[:] = values

    def number(element: Any) -> Any:
        """Return an element as a number to compute with: float32 for a lower precision."""
        return np.float32(element) if element.dtype in (FLOAT16, BFLOAT16) else element

    def element(number: Any, like: Any) -> Any:
        """Return a number as an element, rounded to nearest even."""
        return type(like)(number)

    def where(condition: Any, yes: Any, no: Any) -> Any:
        """Choose, as `numpy.where` does."""
        return yes if condition else no

    def bits_of(number: Any) -> Any:
        """Return the bits of a float32 as an int32."""
        return np.float32(number).view(np.int32)

    def float_of(bits: Any) -> Any:
        """Return the float32 that has the bits of an int32."""
        return np.int32(bits).view(np.float32)

else:
    from llvmlite import ir  # type: ignore[import-untyped]
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from aiokv.kernels import halves

    # Addresses of tensors are of global memory: said here, the instructions need not find out.
    _GLOBAL = 1

    def kind(dtype: str) -> Any:
        """Return what a kernel is told to read."""
        return type(like(dtype))

    def like(dtype: str) -> Any:
        """Return an example of what a kernel writes."""
        return halves.as_integers(np.zeros(1, dtype))[0]

    def _intrinsic(describe: Callable[..., Any]) -> Any:
        """Make a function for compiled code of one that gives its signature and what emits its instructions."""
        return intrinsic(describe)

    def _count(item: Any) -> int:
        return VECTOR * 8 // int(item.bitwidth)

    def _pointer(context: Any, builder: Any, item: Any, address: Any, i: Any) -> Any:
        element = context.get_data_type(item)
        base = builder.inttoptr(address, ir.PointerType(element, _GLOBAL))
        return builder.gep(base, [i], source_etype=element)

    def _vector_pointer(context: Any, builder: Any, item: Any, address: Any, i: Any) -> Any:
        # Four words, whatever is in them: other vectors are taken apart by some versions of the compiler.
        words = ir.PointerType(ir.VectorType(ir.IntType(32), VECTOR // 4), _GLOBAL)
        return builder.bitcast(_pointer(context, builder, item, address, i), words)

    def _taken_apart(context: Any, builder: Any, words: Any, item: Any, count: int) -> list[Any]:
        """Return the elements that are in four words."""
        index = ir.IntType(32)
        if item.bitwidth >= index.width:
            vector = builder.bitcast(words, ir.VectorType(context.get_data_type(item), count))
            return [builder.extract_element(vector, index(k)) for k in range(count)]
        # As a vector of eight or sixteen, older versions of NVVM would load these in several parts.
        narrow, share = context.get_data_type(item), index.width // item.bitwidth
        found = [builder.extract_element(words, index(k)) for k in range(VECTOR // 4)]
        shifted = [builder.lshr(word, index(k * item.bitwidth)) for word in found for k in range(share)]
        return [builder.trunc(word, narrow) for word in shifted]

    def _put_together(context: Any, builder: Any, values: list[Any], item: Any) -> Any:
        """Return the four words that elements make."""
        index = ir.IntType(32)
        words = ir.VectorType(index, VECTOR // 4)
        if item.bitwidth >= index.width:
            vector = ir.Constant(ir.VectorType(context.get_data_type(item), len(values)), ir.Undefined)
            for k, value in enumerate(values):
                vector = builder.insert_element(vector, value, index(k))
            return builder.bitcast(vector, words)
        vector, share = ir.Constant(words, ir.Undefined), index.width // item.bitwidth
        for place in range(VECTOR // 4):
            parts = values[place * share : (place + 1) * share]
            word = index(0)
            for k, part in enumerate(parts):
                word = builder.or_(word, builder.shl(builder.zext(part, index), index(k * item.bitwidth)))
            vector = builder.insert_element(vector, word, index(place))
        return vector

    @_intrinsic
    def read(_context: Any, address: Any, i: Any, dtype: Any) -> Any:
        """Return element `i` of what lies at the address."""
        item = dtype.dtype

        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            value_type = context.get_data_type(item)
            return builder.load(_pointer(context, builder, item, *args[:2]), typ=value_type)

        return item(types.int64, types.int64, dtype), emit

    @_intrinsic
    def read_vector(_context: Any, address: Any, i: Any, dtype: Any) -> Any:
        """Return the elements from `i` on that 16 bytes have; their address is a multiple of 16."""
        item, count = dtype.dtype, _count(dtype.dtype)

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            words = ir.VectorType(ir.IntType(32), VECTOR // 4)
            loaded = builder.load(_vector_pointer(context, builder, item, *args[:2]), align=VECTOR, typ=words)
            values = _taken_apart(context, builder, loaded, item, count)
            return context.make_tuple(builder, signature.return_type, values)

        return types.UniTuple(item, count)(types.int64, types.int64, dtype), emit

    @_intrinsic
    def write(_context: Any, address: Any, i: Any, value: Any) -> Any:
        """Make a value element `i` of what lies at the address."""

        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            builder.store(args[2], _pointer(context, builder, value, *args[:2]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, value), emit

    @_intrinsic
    def write_vector(_context: Any, address: Any, i: Any, values: Any) -> Any:
        """Make values the elements from `i` on; they have 16 bytes together."""
        item, count = values.dtype, values.count

        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            values = [builder.extract_value(args[2], k) for k in range(count)]
            words = _put_together(context, builder, values, item)
            builder.store(words, _vector_pointer(context, builder, item, *args[:2]), align=VECTOR)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, values), emit

    @_intrinsic
    def number(_context: Any, element: Any) -> Any:
        """Return an element as a number to compute with: float32 for a lower precision."""
        if element == types.uint16:
            return types.float32(element), halves.widen_float16
        if element == types.int16:
            return types.float32(element), halves.widen_bfloat16
        return element(element), lambda _context, _builder, _signature, args: args[0]

    @_intrinsic
    def element(_context: Any, number: Any, like: Any) -> Any:
        """Return a number as an element, rounded to nearest even."""
        if like == types.uint16:
            return like(number, like), halves.narrow_float16
        if like == types.int16:
            return like(number, like), halves.narrow_bfloat16
        return like(like, like), lambda _context, _builder, _signature, args: args[0]

    @_intrinsic
    def where(_context: Any, condition: Any, yes: Any, no: Any) -> Any:
        """Choose, as `numpy.where` does: one instruction, where an `if` would make the compiler follow branches."""
        return yes(types.boolean, yes, yes), lambda _c, builder, _s, args: builder.select(*args)

    @_intrinsic
    def bits_of(_context: Any, number: Any) -> Any:
        """Return the bits of a float32 as an int32."""
        return types.int32(types.float32), lambda _c, builder, _s, args: builder.bitcast(args[0], ir.IntType(32))

    @_intrinsic
    def float_of(_context: Any, bits: Any) -> Any:
        """Return the float32 that has the bits of an int32."""
        return types.float32(types.int32), lambda _c, builder, _s, args: builder.bitcast(args[0], ir.FloatType())
