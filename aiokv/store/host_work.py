"""The work of devices, done by NumPy or a backend on memory of the host: for what no device has a kernel for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from aiokv.codec import Float8, Float16, OneBit, TwoBit
from aiokv.codec.backends import get_kernels
from aiokv.kernels.robust import combine
from aiokv.kernels.work import Add, Cast, Combine, Compensate, Decode, Divide, Renew, Scale, Squares, Work, Zero
from aiokv.store.pieces import sums_of_squares, update

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from aiokv.codec import Codec
    from aiokv.kernels import Backend

    Array = NDArray[Any]


def do_on_host(work: Work, memory: Sequence[Array], backend: Backend) -> None:
    """Do work on arrays of bytes, in the order that the work says.

    Raises:
        OptimizerError: the rule can't make the update.
    """
    # A gradient that overflows shows it in its values.
    with np.errstate(all="ignore"):
        match work:
            case Add(out, sources, adds):
                total = memory[0].view(out)
                arrays = [array.view(dtype) for array, dtype in zip(memory[1:], sources, strict=True)]
                if not adds:
                    total[:] = arrays.pop(0)
                for array in arrays:
                    backend.accumulate(total, array)
            case Decode(codec, tensors):
                _decode(codec, tensors, memory[0].view(np.float32), memory[1])
            case Scale(out, source, factor):
                values = memory[0].view(out)
                taken = values if source is None else memory[1].view(source).astype(out)
                np.multiply(taken, values.dtype.type(factor), out=values)
            case Divide(out, source, divisor):
                values = memory[0].view(out)
                taken = values if source is None else memory[1].view(source).astype(out)
                np.divide(taken, divisor, out=values)
            case Cast(out, source):
                memory[0].view(out)[:] = memory[1].view(source)
            case Zero():
                memory[0][:] = 0
            case Compensate():
                _compensate(work, memory, backend)
            case Combine(out, sources, reduction):
                given = memory[-len(sources) :]
                parts = [array.view(dtype) for array, dtype in zip(given, sources, strict=True)]
                memory[0].view(out)[:] = combine(parts, reduction)
            case Squares() | Renew():
                _do_rule(work, memory, backend)


def _decode(codec: Codec, parts: Sequence[tuple[int, int, float]], out: Array, payload: Array) -> None:
    kernels, first = get_kernels("reference"), 0
    for begin, size, unit in parts:
        codes, values = payload[begin : begin + (codec.nbytes(size) or 0)], out[first : first + size]
        match codec:
            case OneBit():
                kernels.decode_1bit(codes, values)
            case TwoBit():
                kernels.decode_2bit(codes, np.float32(unit), values)
            case Float8():
                kernels.decode_fp8(np.float32(unit), codes[:size], values)
            case _:
                values[:] = codes.view(np.float16 if isinstance(codec, Float16) else ml_dtypes.bfloat16)
        first += size


def _compensate(work: Compensate, memory: Sequence[Array], backend: Backend) -> None:
    gradient, weight, read = memory[0].view(work.out), memory[-2].view(work.weight), memory[-1].view(work.weight)
    if work.source is not None:
        gradient[:] = memory[1].view(work.source)
    backend.compensate(gradient, weight, read, work.lamda)


def _do_rule(work: Squares | Renew, memory: Sequence[Array], backend: Backend) -> None:
    pieces, steps = work.pieces, work.steps
    if isinstance(work, Squares):
        weight, total = memory[1].view(work.weight), memory[2].view(work.total)
        state = _state(work, memory[3:])
        gathered = [list(phase) for phase in zip(*work.gathered, strict=True)]
        sums = sums_of_squares(backend, work.rule, work.phase, pieces, steps, weight, total, state, gathered)
        memory[0].view(np.float64)[:] = [number for each in sums for number in each]
        return
    weight, total = memory[0].view(work.weight), memory[1].view(work.total)
    count = 2 + len(work.names)
    out = memory[count].view(work.weight) if work.out else None
    read = memory[-1].view(work.weight) if work.reads else None
    state = _state(work, memory[2:count])
    norms = [list(phase) for phase in zip(*work.norms, strict=True)]
    update(backend, work.rule, pieces, steps, weight, total, state, out=out, norms=norms, read=read)


def _state(work: Squares | Renew, memory: Sequence[Array]) -> dict[str, Array]:
    precision = np.float64 if work.weight == "float64" else np.float32
    return {name: array.view(precision) for name, array in zip(work.names, memory, strict=True)}
