"""Compression on the device: what `aiokv.codec.reference` does, in one pass, with the same bits.

A residual is brought up to date in the pass that reads it; without error feedback there is none. Values must have been
checked: no NaN and no infinity.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.codec import Float8, Float16
from aiokv.codec.records import BitCodec
from aiokv.kernels.cuda import launch, reduce
from aiokv.kernels.cuda.streaming import Launch, Streaming, make_kernel
from aiokv.kernels.cuda.tensors import tensor_of

if TYPE_CHECKING:
    from aiokv.codec import Codec

WORD = "uint32"
"""Payloads of a few bits for each value are made of these."""

FLOAT8_MAX = np.float32(448)

GRADIENT, RESIDUAL = ("gradient", "float32"), ("residual", "float32")

ENCODE_1BIT = """\
    high = corrected > threshold
    code = where(high, 1, 0)
    left = add(corrected, where(high, -one, one))
"""

ENCODE_2BIT = """\
    high, low = corrected >= threshold, corrected <= -threshold
    code = where(high, 3, where(low, 2, 0))
    left = where(high, add(corrected, -threshold), where(low, add(corrected, threshold), corrected))
"""

VALUE_1BIT = "where(code == 1, one, -one)"
VALUE_2BIT = "where(code == 3, threshold, where(code == 2, -threshold, to_precision(0)))"


def _encoding(
    name: str, codes: tuple[str, str], lines: str, numbers: tuple[str, ...], *, feeds_back: bool, **more: Any
) -> Streaming:
    """Return a kernel that makes codes of values, and what is left of each where there is a residual.

    Args:
        name: of the kernel.
        codes: name and dtype of the array of codes.
        lines: source that makes `code` and `left` of `corrected`.
        numbers: names of the numbers of each tensor.
        feeds_back: whether there is a residual.
        more: other attributes of the kernel.
    """
    reads, writes = (GRADIENT, *[RESIDUAL] * feeds_back), (codes, *[RESIDUAL] * feeds_back)
    source = f"def element_of({', '.join([*[array for array, _ in reads], *numbers])}):\n"
    source += f"    corrected = {'add(gradient, residual)' if feeds_back else 'gradient'}\n{lines}"
    source += f"    return code, {'left' * feeds_back}\n"
    return Streaming(name, reads, writes, source, numbers, **more)


@functools.cache
def encode_bits_spec(bits: int, *, feeds_back: bool = True) -> Streaming:
    """Return the kernel that makes 1 or 2 bits of each value: gradient, residual -> payload, residual."""
    lines = ENCODE_2BIT if bits == 2 else ENCODE_1BIT  # noqa: PLR2004 - the codec's name says it
    codes, numbers = ("payload", WORD), ("threshold", "one")
    return _encoding(f"encode_{bits}bit", codes, lines, numbers, feeds_back=feeds_back, packed="payload", bits=bits)


@functools.cache
def decode_bits_spec(bits: int, *, adds: bool) -> Streaming:
    """Return the kernel that makes values of 1 or 2 bits each, or adds them to what is there."""
    value = VALUE_2BIT if bits == 2 else VALUE_1BIT  # noqa: PLR2004 - the codec's name says it
    reads = (("payload", WORD),) + (("out", "float32"),) * adds
    taken = "code, out, threshold, one" if adds else "code, threshold, one"
    result = f"add(out, {value})" if adds else value
    source = f"def element_of({taken}):\n    return {result},"
    name = f"{'accumulate' if adds else 'decode'}_{bits}bit"
    writes = (("out", "float32"),)
    return Streaming(name, reads, writes, source, ("threshold", "one"), packed="payload", bits=bits)


def decode_spec(codec: Codec) -> Streaming:
    """Return the kernel that makes float32 of a codec's codes: these, then the values."""
    if isinstance(codec, BitCodec):
        return decode_bits_spec(codec.bits, adds=False)
    if isinstance(codec, Float8):
        return decode_float8_spec(adds=False)
    return reduce.sum_spec("float32", ("float16" if isinstance(codec, Float16) else "bfloat16",), adds=False)


def encode_bits(bits: int, gradient: Any, residual: Any, threshold: float, payload: Any, *, stream: Any = 0) -> None:
    """Write a payload of 1 or 2 bits for each value, and the new residual.

    Args:
        bits: 1 or 2.
        gradient: float32.
        residual: float32, as long; written in place.
        threshold: of the codec.
        payload: uint32, one word for 32 or 16 values; what is left of the last one becomes 0.
        stream: in whose order it happens.

    Raises:
        SpecMismatchError: an array does not fit.
    """
    Launch(encode_bits_spec(bits), [[gradient, residual, payload]], stream).run([[threshold, 1]], stream)


def decode_bits(bits: int, payload: Any, threshold: float, out: Any, *, adds: bool = False, stream: Any = 0) -> None:
    """Write the values of a payload of 1 or 2 bits each, or add them.

    Raises:
        SpecMismatchError: an array does not fit.
    """
    Launch(decode_bits_spec(bits, adds=adds), [[payload, out]], stream).run([[threshold, 1]], stream)


# --- narrower floats ---


@functools.cache
def encode_half_spec(dtype: str, *, feeds_back: bool) -> Streaming:
    """Return the kernel that rounds to float16 or bfloat16: gradient, residual -> codes, residual."""
    return _encoding(f"encode_{dtype}", ("codes", dtype), ENCODE_HALF, ("most",), feeds_back=feeds_back)


ENCODE_HALF = """\
    limited = where(corrected > most, most, where(corrected < -most, -most, corrected))
    code = number(element(limited, like_codes))
    left = add(corrected, -code)
"""

ENCODE_FLOAT8 = """\
    units = divide(corrected, scale)
    code = to_float8(where(units > most, most, where(units < -most, -most, units)))
    left = add(corrected, -multiply(from_float8(code), scale))
"""

VALUE_FLOAT8 = "multiply(from_float8(codes), scale)"


@functools.cache
def encode_float8_spec(*, feeds_back: bool = True) -> Streaming:
    """Return the kernel that rounds to 8-bit floats in units of a scale: gradient, residual -> codes, residual."""
    return _encoding("encode_float8", ("codes", "uint8"), ENCODE_FLOAT8, ("scale", "most"), feeds_back=feeds_back)


@functools.cache
def decode_float8_spec(*, adds: bool) -> Streaming:
    """Return the kernel that makes values of 8-bit floats, or adds them to what is there."""
    reads = (("codes", "uint8"),) + (("out", "float32"),) * adds
    taken, result = ("codes, out, scale", f"add(out, {VALUE_FLOAT8})") if adds else ("codes, scale", VALUE_FLOAT8)
    source = f"def element_of({taken}):\n    return {result},"
    name = "accumulate_float8" if adds else "decode_float8"
    return Streaming(name, reads, (("out", "float32"),), source, ("scale",))


@functools.cache
def largest_spec(*, feeds_back: bool = True) -> Streaming:
    """Return the kernel that finds the largest magnitude of each part; a NaN counts as an infinity."""
    reads = (GRADIENT, *[RESIDUAL] * feeds_back)
    names = [*[name for name, _ in reads], "most", "infinity"]
    size = f"abs({'add(gradient, residual)' if feeds_back else 'gradient'})"
    source = f"def element_of({', '.join(names)}):\n    size = {size}\n"
    source += "    return wide(where(size <= most, size, infinity)),"
    return Streaming("largest", reads, (), source, ("most", "infinity"), reduction="largest")


MOST = """\
def kernel(results, largest):
    if cuda.grid(1) == 0:
        found = wide(0)
        for i in range(results.size):
            found = max(found, results[i])
        largest[0] = found
"""


@functools.cache
def most_kernel() -> Any:
    """Return the kernel that finds the largest of the results of parts."""
    return make_kernel(MOST, "float64", {})


LIMITS = [np.finfo(np.float32).max, np.inf]
"""The numbers of `largest_spec`."""


def largest(gradient: Any, residual: Any, *, stream: Any = 0) -> Any:
    """Return the largest magnitude of a gradient with its residual, float64[1] on the device: it is a float32.

    It is infinite where one of them is no number, too.
    """
    results = Launch(largest_spec(), [[gradient, residual]], stream).run([LIMITS], stream)
    if results is None:
        return launch.to_device(np.zeros(1), stream)
    found = launch.new_on_device(1, np.float64, stream)
    most_kernel()[(*launch.geometry(1), stream)](results, found)
    return found


def encode_half(gradient: Any, residual: Any, codes: Any, most: float, *, stream: Any = 0) -> None:
    """Round values to float16 or bfloat16, and write what that left out to the residual.

    Args:
        gradient: float32.
        residual: float32, written in place; None without error feedback.
        codes: float16 or bfloat16.
        most: the largest number that they can hold.
        stream: in whose order it happens.

    Raises:
        SpecMismatchError: an array does not fit.
    """
    codes = tensor_of("codes", codes)
    spec = encode_half_spec(codes.dtype.name, feeds_back=residual is not None)
    named = {"gradient": gradient, "residual": residual, "codes": codes}
    Launch(spec, [[named[name] for name in spec.arrays]], stream).run([[most]], stream)


def encode_float8(gradient: Any, residual: Any, scale: float, codes: Any, *, stream: Any = 0) -> None:
    """Round values to 8-bit floats in units of a scale that is not 0, and write what that left out to the residual.

    Raises:
        SpecMismatchError: an array does not fit.
    """
    Launch(encode_float8_spec(), [[gradient, residual, codes]], stream).run([[scale, FLOAT8_MAX]], stream)


def decode_float8(scale: float, codes: Any, out: Any, *, adds: bool = False, stream: Any = 0) -> None:
    """Write the values of 8-bit floats in units of a scale, or add them.

    Raises:
        SpecMismatchError: an array does not fit.
    """
    Launch(decode_float8_spec(adds=adds), [[codes, out]], stream).run([[scale]], stream)
