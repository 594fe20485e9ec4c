"""Rows of a table on the device: gathered, scattered, and added in the order of their duplicates.

Row ids come with a message, so they are in the host's memory: there they are sorted into segments, one for each row
that occurs. A thread adds what one segment has for its columns, one after the other, so sums have the bits of
`numpy.add.at`, and no two threads write to one place.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aiokv.errors import SpecMismatchError
from aiokv.kernels.checks import is_low, mismatch
from aiokv.kernels.cuda import launch
from aiokv.kernels.cuda.memory import VECTOR
from aiokv.kernels.cuda.reduce import check_sum
from aiokv.kernels.cuda.streaming import Launch, Streaming, make_kernel
from aiokv.kernels.cuda.tensors import Tensor, tensor_of

if TYPE_CHECKING:
    from aiokv.kernels.reference import Array


class Segments(NamedTuple):
    """Row ids, sorted; equal ones keep their order.

    Attributes:
        rows: each row once, increasing.
        starts: where in `order` the segment of each row begins, and where the last one ends.
        order: places in the message, segment by segment.
    """

    rows: Array
    starts: Array
    order: Array


def segments_of(ids: Array) -> Segments:
    """Sort row ids, int64[n]."""
    order = np.argsort(ids, kind="stable")
    rows, starts = np.unique(ids[order], return_index=True)
    return Segments(rows, np.append(starts, ids.size).astype(np.int64), order.astype(np.int64))


ADD = """\
def kernel(at_target, at_values, rows, starts, order, width, aligned):
    groups = (width + {last}) // {group}
    for item in range(cuda.grid(1), rows.size * groups, cuda.gridsize(1)):
        segment, column = item // groups, item % groups * {group}
        place = rows[segment] * width + column
        if aligned:
{begin}
            for n in range(starts[segment], starts[segment + 1]):
                i = order[n] * width + column
{wide}
{end}
        else:
            for k in range(min({group}, width - column)):
                total = number(read(at_target, place + k, kind_target))
                for n in range(starts[segment], starts[segment + 1]):
                    found = number(read(at_values, order[n] * width + column + k, kind_values))
                    total = sum_of(total, found)
                write(at_target, place + k, element(total, like_target))
"""

COPY = """\
def kernel(at_table, at_rows, ids, width, aligned):
    groups = (width + {last}) // {group}
    for item in range(cuda.grid(1), ids.size * groups, cuda.gridsize(1)):
        row, column = item // groups, item % groups * {group}
        there, here = ids[row] * width + column, row * width + column
        if aligned:
            write_vector({to}, read_vector({of}, kind_table))
        else:
            for k in range(min({group}, width - column)):
                write({to} + k, read({of} + k, kind_table))
"""


@functools.cache
def add_kernel(target: str, values: str) -> Any:
    """Return the kernel that adds rows to those of a table."""
    source = add_source(target, values)
    body = "number(element(add(total, found), like_target))" if is_low(np.dtype(target)) else "add(total, found)"
    precision = "float64" if target == "float64" else "float32"
    functions = [f"def sum_of(total, found):\n    return {body}"]
    return make_kernel(source, precision, {"target": target, "values": values}, functions)


def group_of(*dtypes: str) -> int:
    """Return how many elements a thread takes at a time."""
    return VECTOR // min(np.dtype(dtype).itemsize for dtype in dtypes)


def add_source(target: str, values: str) -> str:
    """Return the source of `add_kernel`."""
    group = group_of(target, values)
    loads = {}
    for name, dtype, start in (("target", target, "place"), ("values", values, "i")):
        count = VECTOR // np.dtype(dtype).itemsize
        loads[name] = [
            f"{', '.join(f'{name}_{first + k}' for k in range(count))} = "
            f"read_vector(at_{name}, {start} + {first}, kind_{name})"
            for first in range(0, group, count)
        ]
    begin = loads["target"] + [f"total_{k} = number(target_{k})" for k in range(group)]
    wide = loads["values"] + [f"total_{k} = sum_of(total_{k}, number(values_{k}))" for k in range(group)]
    count = VECTOR // np.dtype(target).itemsize
    end = []
    for first in range(0, group, count):
        results = ", ".join(f"element(total_{first + k}, like_target)" for k in range(count))
        end.append(f"write_vector(at_target, place + {first}, ({results}))")
    parts = {"begin": _lines(begin, 12), "wide": _lines(wide, 16), "end": _lines(end, 12)}
    return ADD.format(group=group, last=group - 1, **parts)


def _lines(lines: list[str], spaces: int) -> str:
    return "\n".join(" " * spaces + line for line in lines)


@functools.cache
def copy_kernel(dtype: str, *, gathers: bool) -> Any:
    """Return the kernel that copies rows out of a table, or into it."""
    there, here = "at_table, there", "at_rows, here"
    of, to = (there, here) if gathers else (here, there)
    group = group_of(dtype)
    return make_kernel(COPY.format(group=group, last=group - 1, of=of, to=to), "float32", {"table": dtype})


def scatter_add(target: Any, ids: Array, values: Any, width: int, *, stream: Any = 0) -> None:
    """Add rows to those of a table; what occurs several times is added in the order of the message.

    Args:
        target: the table, rows of `width` elements one after the other.
        ids: int64[n] in the host's memory, in any order.
        values: n rows; of the table's dtype, or of a lower precision than float32.
        width: elements of a row.
        stream: in whose order it happens.

    Raises:
        SpecMismatchError: arrays do not fit, or a row is not in the table.
    """
    table, found = _checked("target", target, ids, "values", values, width)
    check_sum(table.dtype.name, [found.dtype.name])
    if not ids.size or not width:
        return
    group = group_of(table.dtype.name, found.dtype.name)
    segments = segments_of(ids)
    arrays = [launch.to_device(array, stream) for array in segments]
    blocks = launch.geometry(_blocks(segments.rows.size, width, group))
    kernel = add_kernel(table.dtype.name, found.dtype.name)
    kernel[(*blocks, stream)](table.address, found.address, *arrays, width, _aligned(table, found, width, group))


def gather(table: Any, ids: Array, out: Any, width: int, *, stream: Any = 0) -> None:
    """Copy rows of a table to `out`, one after the other.

    Raises:
        SpecMismatchError: arrays do not fit, or a row is not in the table.
    """
    _copy(*_checked("table", table, ids, "out", out, width), ids, width, stream, gathers=True)


def scatter(table: Any, ids: Array, rows: Any, width: int, *, stream: Any = 0) -> None:
    """Copy rows into a table, each to another place.

    Raises:
        SpecMismatchError: arrays do not fit, a row is not in the table, or one occurs twice.
    """
    if np.unique(ids).size != ids.size:
        raise mismatch("ids", "each row once", "duplicates")
    _copy(*_checked("table", table, ids, "rows", rows, width), ids, width, stream, gathers=False)


def sum_segments(out: Any, segments: Segments, values: Any, width: int, *, stream: Any = 0) -> None:
    """Write for each segment the sum of its rows, in their order, one after the other.

    Args:
        out: a row for each segment.
        segments: of the values, at least one.
        values: rows of the dtype of the result, or of a lower precision than float32.
        width: elements of a row, at least one.
        stream: in whose order it happens.

    Raises:
        SpecMismatchError: arrays do not fit.
    """
    count = segments.rows.size
    rows = np.arange(count, dtype=np.int64)
    total, found = _checked("out", out, rows, "out", out, width)[0], tensor_of("values", values)
    check_sum(total.dtype.name, [found.dtype.name])
    # With this one a sum has the sign of its zeros.
    fill(total, -0.0, stream=stream)
    arrays = [launch.to_device(array, stream) for array in (rows, segments.starts, segments.order)]
    group = group_of(total.dtype.name, found.dtype.name)
    blocks = launch.geometry(_blocks(count, width, group))
    kernel = add_kernel(total.dtype.name, found.dtype.name)
    kernel[(*blocks, stream)](total.address, found.address, *arrays, width, _aligned(total, found, width, group))


FILL = "def element_of(value):\n    return value,"


@functools.cache
def fill_spec(dtype: str) -> Streaming:
    """Return the kernel that writes one number everywhere."""
    precision = "float64" if dtype == "float64" else "float32"
    return Streaming(f"fill_{dtype}", (), (("out", dtype),), FILL, ("value",), precision)


def fill(out: Any, value: float, *, stream: Any = 0) -> None:
    """Make all elements one number.

    Raises:
        SpecMismatchError: the array can't be written.
    """
    tensor = tensor_of("out", out)
    Launch(fill_spec(tensor.dtype.name), [[tensor]], stream).run([[value]], stream)


def clear(out: Any, *, stream: Any = 0) -> None:
    """Make all elements zero, of any dtype: all have the same zero.

    Raises:
        SpecMismatchError: the array can't be written.
    """
    fill(_as_unsigned(tensor_of("out", out), 1), 0, stream=stream)


def scatter_bytes(table: Tensor, ids: Array, values: Any, *, stream: Any = 0) -> None:
    """Copy rows of any dtype into a table whose first dimension says how many it has, each to another place.

    Args:
        table: the table.
        ids: int64[n] in the host's memory, increasing.
        values: uint8, the bytes of n rows.
        stream: in whose order it happens.
    """
    rows = tensor_of("values", values)
    itemsize = table.dtype.itemsize
    width = table.size // table.shape[0]
    _copy(_as_unsigned(table, itemsize), _as_unsigned(rows, itemsize), ids, width, stream, gathers=False)


def _as_unsigned(tensor: Tensor, itemsize: int) -> Tensor:
    """Return the same memory, told as unsigned numbers."""
    dtype = np.dtype(f"uint{8 * itemsize}")
    return replace(tensor, size=tensor.nbytes // itemsize, dtype=dtype, owner=tensor)


def _copy(table: Tensor, rows: Tensor, ids: Array, width: int, stream: Any, *, gathers: bool) -> None:
    if table.dtype != rows.dtype:
        raise mismatch("rows", f"{table.dtype} to fit the table", f"{rows.dtype}")
    if not ids.size or not width:
        return
    group = group_of(table.dtype.name)
    blocks = launch.geometry(_blocks(ids.size, width, group))
    kernel = copy_kernel(table.dtype.name, gathers=gathers)
    aligned = _aligned(table, rows, width, group)
    kernel[(*blocks, stream)](table.address, rows.address, launch.to_device(ids, stream), width, aligned)


def _checked(name: str, table: Any, ids: Array, other: str, rows: Any, width: int) -> tuple[Tensor, Tensor]:
    table, rows = tensor_of(name, table), tensor_of(other, rows)
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise mismatch("ids", "int64[n]", f"{ids.dtype}{list(ids.shape)}")
    if rows.size != ids.size * width or (width and table.size % width):
        expected, got = f"{ids.size} rows of {width}, of a table of such", f"{rows.size} and {table.size} elements"
        raise mismatch(other, expected, got)
    count = table.size // width if width else 0
    if ids.size and width and (ids.min() < 0 or ids.max() >= count):
        text = f"row {ids.min() if ids.min() < 0 else ids.max()} is not in a table of {count} rows"
        raise SpecMismatchError(text, expected=f"0 to {count - 1}", got=f"{ids.min()} to {ids.max()}")
    return table, rows


def _aligned(table: Tensor, rows: Tensor, width: int, group: int) -> bool:
    return not (table.address % VECTOR or rows.address % VECTOR or width % group)


def _blocks(rows: int, width: int, group: int) -> int:
    return -(-rows * -(-width // group) // launch.THREADS)
