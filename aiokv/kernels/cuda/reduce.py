"""Sums of gradients on the device, in the order in which they are given; norms, and scaling by them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.errors import SpecMismatchError
from aiokv.kernels.checks import is_low
from aiokv.kernels.cuda import launch
from aiokv.kernels.cuda.launches import once
from aiokv.kernels.cuda.streaming import Streaming, make_kernel
from aiokv.kernels.cuda.tensors import tensor_of
from aiokv.kernels.work import MOST_ADDED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.kernels.cuda.launches import Run

FLOATS = ("float16", "bfloat16", "float32", "float64")


@functools.cache
def sum_spec(
    out: str, sources: tuple[str, ...], *, adds: bool, squares: bool = False, scales: bool = False
) -> Streaming:
    """Return the kernel that adds buffers.

    Each sum is rounded to the dtype of the result, as if one buffer were added after the other.

    Args:
        out: dtype of the result.
        sources: dtypes of the buffers, in their order.
        adds: to what is in the result already, which comes first.
        squares: add the squares of the results, too.
        scales: multiply the buffers by a number first.
    """
    reads = [("out", out)] * adds + [(f"source_{n}", dtype) for n, dtype in enumerate(sources)]
    taken = [name for name, _ in reads] + ["scale"] * scales
    lines = [f"def element_of({', '.join(taken)}):"]
    for n in range(len(sources)):
        part = f"multiply(scale, source_{n})" if scales else f"source_{n}"
        if n or adds:
            # A sum in a low precision is rounded each time, as the reference does.
            part = f"add({'total' if n else 'out'}, {part})"
            part = f"number(element({part}, like_out))" if is_low(np.dtype(out)) else part
        lines.append(f"    total = {part}")
    lines.append("    return total, multiply_wide(wide(total), wide(total))" if squares else "    return total,")
    return Streaming(
        "sum" + "_and_squares" * squares,
        tuple(reads),
        (("out", out),),
        "\n".join(lines),
        ("scale",) if scales else (),
        "float64" if out == "float64" else "float32",
        "add" if squares else "",
    )


def check_sum(out: str, sources: Sequence[str]) -> None:
    """Refuse what can't be added.

    Raises:
        SpecMismatchError: the result is neither float32, for float32 and less, nor of the dtype of all.
    """
    mixes = out == "float32" and set(sources) <= {"float32", "float16", "bfloat16"}
    if out not in FLOATS or not (mixes or set(sources) <= {out}):
        expected, got = "all of one float dtype, or a result of float32", f"{out} of {', '.join(sources)}"
        raise SpecMismatchError(f"a sum must be {expected}; got {got}", expected=expected, got=got)


def sum_into(outs: Sequence[Any], sources: Sequence[Sequence[Any]], *, stream: Any = 0, run: Run = once) -> None:
    """Write to each result the sum of its buffers, in their order: one launch for up to eight of each.

    Args:
        outs: the results, one for each tensor; all of one dtype.
        sources: the buffers of each tensor; the first ones of all tensors have one dtype, and so on. They lie apart
            from the results.
        stream: in whose order it happens.

    Raises:
        SpecMismatchError: arrays do not fit, or can't be added.
    """
    _sum(outs, sources, stream, run, squares=False)


NARROW = "def element_of(total):\n    return total,"


@functools.cache
def narrow_spec(dtype: str) -> Streaming:
    """Return the kernel that rounds float32 to a lower precision; what is too large becomes infinite."""
    return Streaming(f"narrow_{dtype}", (("total", "float32"),), (("out", dtype),), NARROW)


def narrow(totals: Sequence[Any], outs: Sequence[Any], *, stream: Any = 0, run: Run = once) -> None:
    """Round arrays of float32 to float16 or bfloat16, all of them in one launch.

    Raises:
        SpecMismatchError: arrays do not fit.
    """
    found = [tensor_of("out", out) for out in outs]
    rows = [[total, out] for total, out in zip(totals, found, strict=True)]
    run(narrow_spec(found[0].dtype.name), rows, None, stream)


def sum_and_squares(outs: Sequence[Any], sources: Sequence[Sequence[Any]], *, stream: Any = 0, run: Run = once) -> Any:
    """Write sums as `sum_into` does, and return the sum of the squares of all results, float64[1] on the device.

    It is not finite when one of the sums is not, and only then: no square of a float32 is too large for a float64. Its
    bits depend on nothing but the numbers and the lengths.

    Raises:
        SpecMismatchError: arrays do not fit, or the results are not float32 or less.
    """
    return total_of(sum_with_squares(outs, sources, stream=stream, run=run), stream)


def sum_with_squares(outs: Sequence[Any], sources: Sequence[Sequence[Any]], *, stream: Any = 0, run: Run = once) -> Any:
    """Write sums as `sum_into` does, and return the sum of the squares of each part, float64 on the device.

    Raises:
        SpecMismatchError: arrays do not fit, or the results are not float32 or less.
    """
    return _sum(outs, sources, stream, run, squares=True)


@functools.cache
def squares_spec(dtype: str) -> Streaming:
    """Return the kernel that adds the squares of what is there."""
    element = "def element_of(source):\n    return multiply_wide(wide(source), wide(source)),"
    return Streaming("squares", (("source", dtype),), (), element, reduction="add")


def by_tensor(results: Any, sizes: Sequence[int]) -> list[float]:
    """Return the sum of the results of each tensor's parts; all tensors have elements."""
    parts = [-(-size // launch.PART) for size in sizes]
    found: list[float] = np.add.reduceat(results.copy_to_host(), np.cumsum([0, *parts[:-1]])).tolist()
    return found


def _sum(outs: Sequence[Any], sources: Sequence[Sequence[Any]], stream: Any, run: Run, *, squares: bool) -> Any:
    found = [tensor_of("out", out) for out in outs]
    rows = [[tensor_of(f"source_{n}", array) for n, array in enumerate(row)] for row in sources]
    counts = {len(row) for row in rows}
    if len(rows) != len(found) or len(counts) != 1 or 0 in counts:
        got = f"{len(found)} results, and {[len(row) for row in rows]} buffers"
        raise SpecMismatchError(f"every tensor needs equally many buffers; got {got}", got=got)
    out, dtypes = found[0].dtype.name, [tensor.dtype.name for tensor in rows[0]]
    check_sum(out, dtypes)
    if squares and out == "float64":
        raise SpecMismatchError("squares are added of sums in float32; got float64", expected="float32", got="float64")
    results, done = None, 0
    while done < len(dtypes):
        # What earlier passes have added is one of the buffers of this one.
        end = min(len(dtypes), done + MOST_ADDED - bool(done))
        spec = sum_spec(out, tuple(dtypes[done:end]), adds=bool(done), squares=squares and end == len(dtypes))
        results = run(spec, _columns(spec, found, rows, done, end), None, stream)
        done = end
    return results if squares else None


def _columns(spec: Streaming, outs: list[Any], rows: list[list[Any]], start: int, end: int) -> list[list[Any]]:
    """Return the arrays of each tensor in the order of the kernel's."""
    named = [
        {"out": out} | {f"source_{n}": tensor for n, tensor in enumerate(row[start:end])}
        for out, row in zip(outs, rows, strict=True)
    ]
    return [[arrays[name] for name in spec.arrays] for arrays in named]


def accumulate_scaled(
    targets: Sequence[Any], sources: Sequence[Any], scale: float, *, stream: Any = 0, run: Run = once
) -> None:
    """Add `scale * source` to each target; product and sum are rounded.

    Raises:
        SpecMismatchError: arrays do not fit, or can't be added.
    """
    found = [tensor_of("target", target) for target in targets]
    rows = [tensor_of("source", source) for source in sources]
    out, source = found[0].dtype.name, rows[0].dtype.name
    check_sum(out, [source])
    spec = sum_spec(out, (source,), adds=True, scales=True)
    columns = _columns(spec, found, [[row] for row in rows], 0, 1)
    run(spec, columns, [[scale]] * len(found), stream)


@functools.cache
def scale_spec(dtype: str) -> Streaming:
    """Return the kernel that multiplies by a number which another kernel has left on the device."""
    precision = "float64" if dtype == "float64" else "float32"
    element = "def element_of(out, factor):\n    return multiply(factor, out),"
    arrays = (("out", dtype),)
    return Streaming("scale", arrays, arrays, element, ("factor",), precision, skips="factor == 1")


@functools.cache
def quotient_spec(out: str, source: str | None) -> Streaming:
    """Return the kernel that divides by a number; in place where there is no source."""
    read = "out" if source is None else "source"
    element = f"def element_of({read}, divisor):\n    return divide({read}, divisor),"
    precision = "float64" if out == "float64" else "float32"
    return Streaming("divide", ((read, source or out),), (("out", out),), element, ("divisor",), precision)


TOTAL = """\
def kernel(results, total):
    shared = cuda.shared.array(THREADS, wide)
    thread = cuda.threadIdx.x
    if cuda.blockIdx.x == 0:
        found = wide(0)
        for i in range(thread, results.size, THREADS):
            found = add_wide(found, results[i])
        shared[thread] = found
        distance = THREADS // 2
        while distance > 0:
            cuda.syncthreads()
            if thread < distance:
                shared[thread] = add_wide(shared[thread], shared[thread + distance])
            distance //= 2
        if thread == 0:
            total[0] = shared[0]
"""

FACTOR = """\
def kernel(squares, limit, factors):
    norm = sqrt(squares[0])
    factor = divide(limit[0], norm) if limit[0] < norm < infinity else wide(1)
    for row in range(cuda.grid(1), factors.shape[0], cuda.gridsize(1)):
        factors[row, 0] = factor
"""


@functools.cache
def total_kernel() -> Any:
    """Return the kernel that adds the results of parts in their order."""
    return make_kernel(TOTAL, "float64", {}, THREADS=launch.THREADS)


@functools.cache
def factor_kernel() -> Any:
    """Return the kernel that makes a factor of a norm."""
    return make_kernel(FACTOR, "float64", {}, infinity=np.inf)


def total_of(results: Any, stream: Any = 0) -> Any:
    """Return the sum of the results of parts, float64[1] on the device."""
    if results is None:
        return launch.to_device(np.zeros(1), stream)
    total = launch.new_on_device(1, np.float64, stream)
    total_kernel()[(*launch.geometry(1), stream)](results, total)
    return total


def clip(targets: Sequence[Any], squares: Any, limit: float, *, stream: Any = 0) -> None:
    """Scale tensors down so that the norm of all is at most a limit; the host waits for nothing.

    Where the norm is within the limit, or not finite, they stay as they are, and are not even read.

    Args:
        targets: tensors of one dtype, float32 or less.
        squares: float64[1] on the device, the sum of the squares of all, from `sum_and_squares`.
        limit: the largest norm, more than 0.
        stream: in whose order it happens.

    Raises:
        SpecMismatchError: arrays do not fit.
    """
    if not targets:
        return
    found = [tensor_of("target", target) for target in targets]
    factors = launch.new_on_device((len(found), 1), np.float32, stream)
    factor_kernel()[(*launch.geometry(1), stream)](squares, launch.to_device(np.array([limit]), stream), factors)
    once(scale_spec(found[0].dtype.name), [[tensor] for tensor in found], factors, stream)
