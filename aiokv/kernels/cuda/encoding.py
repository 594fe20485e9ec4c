"""Gradients on a device to payloads: what `aiokv.codec.encoder` does, with the same bits. Residuals stay there.

All tensors of a push are encoded together, in one launch for each step. What is copied to the host's memory is their
payloads, and a number for each part of a tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
from numba import cuda

from aiokv.codec import BFloat16, Float8, Float16, OneBit, TopK, TwoBit
from aiokv.codec.encoder import not_encodable
from aiokv.codec.floats import MAX_SCALE
from aiokv.codec.whole import with_scale
from aiokv.kernels.cuda import codec as kernels
from aiokv.kernels.cuda import launch, reduce, select, sparse
from aiokv.kernels.cuda.pools import Packed
from aiokv.kernels.cuda.tensors import Copy, Tensor, read
from aiokv.optim import PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.codec import Codec
    from aiokv.kernels.cuda.launches import Run
    from aiokv.kernels.cuda.pools import Memory
    from aiokv.kernels.reference import Array
    from aiokv.types import Key

    Cuts = Sequence[tuple[int, int]]

WORD = 4
"""Bytes of a word of codes."""

CODECS = (OneBit, TwoBit, Float16, BFloat16, Float8, TopK)


def encodes(codec: Codec, dtype: str) -> bool:
    """Say whether gradients of a dtype are encoded here: random choices, and float64, are left to the host."""
    return isinstance(codec, CODECS) and PRECISIONS.get(dtype) == "float32"


class DeviceEncoder:
    """What one worker has for one key on a device; see `aiokv.codec.encoder.Encoder`, whose methods these are.

    Args:
        codec: how to compress, one of those that `encodes` accepts.
        key: of the tensor.
        size: number of elements, at least one.
        dtype: of the gradients: float32, or a lower precision that was widened to it.
        number: of the device.
        memory: of the device.
        step: how many gradients were encoded before.
    """

    def __init__(
        self, codec: Codec, key: Key, size: int, dtype: str, number: int, memory: Memory, *, step: int = 0
    ) -> None:
        self.codec = codec
        self.key = key
        self.step = step
        self.number = number
        self._size, self._dtype, self._memory = size, dtype, memory
        self._residual: Tensor | None = None

    @property
    def residual(self) -> Tensor | None:
        """What payloads did not say so far, float32; None without error feedback."""
        if self._residual is None and self.codec.error_feedback:
            with cuda.gpus[self.number]:
                residual = self._memory.on_device(self._size, np.dtype(np.float32))
                sparse.clear(residual)
                self._residual = residual
        return self._residual

    def flush(self) -> Array:
        """Forget the residual and return it; zeros without error feedback."""
        found = self._read()
        self._residual = None
        return found

    def _read(self) -> Array:
        found = np.zeros(self._size, np.float32)
        if self._residual is not None:
            with cuda.gpus[self.number]:
                read(self._residual, found)
        return found

    def put_back(self, values: Array) -> None:
        """Add values to the residual."""
        residual = self.residual
        assert residual is not None, "without error feedback nothing is kept"
        with cuda.gpus[self.number]:
            reduce.accumulate_scaled([residual], [Copy(values).tensor], 1.0)

    def state(self) -> dict[str, Any]:
        """Return copies of what the next payloads depend on."""
        return {"step": self.step} | ({"residual": self._read()} if self.codec.error_feedback else {})


class Gradient(NamedTuple):
    """A gradient that is to be encoded.

    Attributes:
        encoder: of its key.
        values: float32.
        cuts: neighbouring ranges that cover the tensor.
    """

    encoder: DeviceEncoder
    values: Tensor
    cuts: Cuts

    @property
    def arrays(self) -> list[Tensor]:
        """The values, and the residual if there is one."""
        residual = self.encoder.residual
        return [self.values] if residual is None else [self.values, residual]

    def part(self, start: int, stop: int) -> list[Tensor]:
        """Return a range of each of the arrays."""
        return [_range(array, start, stop) for array in self.arrays]


def check(gradients: Sequence[Gradient], run: Run) -> list[float]:
    """Return the largest magnitude of each gradient with its residual; all are of one codec, and nothing is changed.

    Raises:
        NotFiniteError: one can't be encoded.
    """
    spec = kernels.largest_spec(feeds_back=gradients[0].encoder.codec.error_feedback)
    results = run(spec, [gradient.arrays for gradient in gradients], [kernels.LIMITS] * len(gradients))
    parts = [-(-gradient.values.size // launch.PART) for gradient in gradients]
    starts = np.cumsum([0, *parts[:-1]])
    largest = np.maximum.reduceat(results.copy_to_host(), starts)
    for gradient, size in zip(gradients, largest, strict=True):
        if not np.isfinite(size):
            values = np.empty(gradient.values.size, np.float32)
            read(gradient.values, values)
            raise not_encodable(gradient.encoder.codec, gradient.encoder.key, values)
    return [float(size) for size in largest]


def encode(gradients: Sequence[Gradient], largest: Sequence[float], memory: Memory, run: Run) -> list[list[memoryview]]:
    """Return the payloads of gradients of one codec, one for each cut, and bring their residuals up to date.

    Args:
        gradients: all of one codec.
        largest: what `check` has returned for them, if nothing was encoded meanwhile.
        memory: for payloads.
        run: starts kernels.
    """
    codec = gradients[0].encoder.codec
    match codec:
        case OneBit() | TwoBit():
            found = _encode_bits(codec, gradients, memory, run)
        case Float16() | BFloat16():
            found = _encode_halves(codec, gradients, memory, run)
        case Float8():
            found = _encode_float8(gradients, largest, memory, run)
        case TopK():
            found = [_choose(codec, gradient) for gradient in _corrected(gradients, run)]
        case _:
            raise AssertionError(f"{codec!r} is encoded on the host")
    for gradient in gradients:
        gradient.encoder.step += 1
    return [[payload.data.toreadonly() for payload in payloads] for payloads in found]


def _encode_bits(codec: OneBit | TwoBit, gradients: Sequence[Gradient], memory: Memory, run: Run) -> list[list[Array]]:
    lengths = [codec.nbytes(stop - start) for gradient in gradients for start, stop in gradient.cuts]
    payloads = Packed(memory, [(length // WORD, kernels.WORD) for length in lengths])
    rows = []
    pieces = iter(payloads.tensors)
    for gradient in gradients:
        for start, stop in gradient.cuts:
            values, *residual = gradient.part(start, stop)
            rows.append([values, *residual, next(pieces)])
    spec = kernels.encode_bits_spec(codec.bits, feeds_back=gradients[0].encoder.codec.error_feedback)
    _launch(run, spec, rows, [[codec.threshold, 1.0]] * len(rows))
    found = iter([words.view(np.uint8) for words in payloads.read()])
    return [[next(found) for _ in gradient.cuts] for gradient in gradients]


def _encode_halves(
    codec: Float16 | BFloat16, gradients: Sequence[Gradient], memory: Memory, run: Run
) -> list[list[Array]]:
    dtype = "float16" if isinstance(codec, Float16) else "bfloat16"
    payloads = Packed(memory, [(gradient.values.size, dtype) for gradient in gradients])
    spec = kernels.encode_half_spec(dtype, feeds_back=gradients[0].encoder.codec.error_feedback)
    rows = [[*each.arrays, codes] for each, codes in zip(gradients, payloads.tensors, strict=True)]
    _launch(run, spec, rows, [[float(ml_dtypes.finfo(dtype).max)]] * len(rows))  # type: ignore[no-untyped-call]
    return [
        [codes[start:stop].view(np.uint8) for start, stop in gradient.cuts]
        for gradient, codes in zip(gradients, payloads.read(), strict=True)
    ]


def _encode_float8(
    gradients: Sequence[Gradient], largest: Sequence[float], memory: Memory, run: Run
) -> list[list[Array]]:
    scales = [min(np.float32(np.float32(size) / kernels.FLOAT8_MAX), MAX_SCALE) for size in largest]
    scaled = [(each, scale) for each, scale in zip(gradients, scales, strict=True) if scale]
    # No float32 is a fine enough unit for the others: all of them is left.
    rest = [each for each, scale in zip(gradients, scales, strict=True) if not scale]
    _corrected(rest, run)
    payloads = Packed(memory, [(gradient.values.size, np.uint8) for gradient, _ in scaled])
    spec = kernels.encode_float8_spec(feeds_back=gradients[0].encoder.codec.error_feedback)
    rows = [[*each.arrays, codes] for (each, _), codes in zip(scaled, payloads.tensors, strict=True)]
    _launch(run, spec, rows, [[scale, kernels.FLOAT8_MAX] for _, scale in scaled])
    read_codes = iter(payloads.read())
    found = []
    for gradient, scale in zip(gradients, scales, strict=True):
        codes = next(read_codes) if scale else np.zeros(gradient.values.size, np.uint8)
        found.append(
            [with_scale(scale, codes[start:stop]) if start < stop else codes[:0] for start, stop in gradient.cuts]
        )
    return found


def _corrected(gradients: Sequence[Gradient], run: Run) -> Sequence[Gradient]:
    """Add gradients to their residuals, if they have one; return what there is then, as gradients."""
    if not gradients or not gradients[0].encoder.codec.error_feedback:
        return gradients
    residuals = [gradient.arrays[1] for gradient in gradients]
    reduce.accumulate_scaled(residuals, [gradient.values for gradient in gradients], 1.0, run=run)
    return [each._replace(values=residual) for each, residual in zip(gradients, residuals, strict=True)]


def _choose(codec: TopK, gradient: Gradient) -> list[Array]:
    """Return payloads with the largest values, which are no longer in the residual then."""
    found, chosen = select.largest_places(gradient.values, codec.count(gradient.values.size))
    places, values = found.copy_to_host().astype(np.int64), chosen.copy_to_host()
    if gradient.encoder.residual is not None:
        select.clear_places(gradient.encoder.residual, found)
    payloads = []
    for start, stop in gradient.cuts:
        first, end = np.searchsorted(places, [start, stop])
        indices = (places[first:end] - start).astype(np.uint32)
        payloads.append(np.concatenate([indices.view(np.uint8), values[first:end].view(np.uint8)]))
    return payloads


def _launch(run: Run, spec: Any, rows: list[list[Tensor]], numbers: list[list[Any]]) -> None:
    filled = [n for n, row in enumerate(rows) if row[0].size]
    if filled:
        run(spec, [rows[n] for n in filled], [numbers[n] for n in filled])


def _range(array: Tensor, start: int, stop: int) -> Tensor:
    address = array.address + start * array.dtype.itemsize
    return replace(array, address=address, size=stop - start, shape=(stop - start,), owner=array)
