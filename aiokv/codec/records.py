"""Codecs as typed data: a name and validated parameters, and how long their payloads are. No arrays here."""

from __future__ import annotations

import hashlib
import math
import struct
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from aiokv.errors import CodecError, ProtocolError, SpecMismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.types import Key

PRECISIONS: Mapping[str, str] = MappingProxyType(
    {"bfloat16": "float32", "float16": "float32", "float32": "float32", "float64": "float64"}
)
"""In what precision gradients of a dtype are corrected, and their residual is kept."""

WORD = 4
"""Bytes to a multiple of which the payloads of `1bit` and `2bit` are padded."""

SCALE = 4
"""Bytes of the float32 in front of the codes of `fp8` and `qsgd`."""

PAIR = 8
"""Bytes that one value takes in the payloads of `topk` and `randomk`: its index (uint32) and itself (float32)."""

MAX_LEVELS = 2**15 - 1
MAX_COUNT = 2**32
MAX_SEED = 2**64 - 1


class Codec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of all codecs. A codec checks its parameters however it is made.

    Args:
        error_feedback: keep what a payload did not say, and add it to the next gradient (Seide et al. 2014,
            Karimireddy et al. 2019).
    """

    error_feedback: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.error_feedback, bool):
            raise self.wrong("error_feedback", "true or false")

    @property
    def name(self) -> str:
        """The name that `make_codec` takes."""
        return str(self.__struct_config__.tag)

    def nbytes(self, size: int) -> int | None:
        """Return how long the payload of a chunk of `size` elements is, None when that depends on the values.

        A chunk without elements has an empty payload.
        """
        raise NotImplementedError

    def max_nbytes(self, size: int) -> int:
        """Return how long the payload of a chunk of `size` elements is at most."""
        exact = self.nbytes(size)
        assert exact is not None
        return exact

    def check_nbytes(self, size: int, nbytes: int) -> None:
        """Refuse a length that the payload of a chunk of `size` elements can't have: before anything is allocated.

        Raises:
            ProtocolError: no encoder makes a payload of that length.
        """
        exact = self.nbytes(size)
        if nbytes != exact:
            raise self.malformed(f"of {size} elements", f"{exact} bytes", f"{nbytes}")

    def whole_nbytes(self, size: int) -> int:
        """Return how long the payload of a whole tensor of `size` elements is, if it is not cut."""
        return self.max_nbytes(size)

    @property
    def number(self) -> int:
        """A number by which messages name this codec with its parameters; it fits in 63 bits, and is never 0."""
        digest = hashlib.blake2b(msgspec.json.encode(self), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1 or 1

    @property
    def params(self) -> dict[str, Any]:
        """All parameters, as `make_codec` takes them."""
        return msgspec.structs.asdict(self)

    def check_dtype(self, key: Key, dtype: str) -> None:
        """Refuse a key whose gradients can't be compressed.

        Raises:
            SpecMismatchError: they are no floats.
        """
        if dtype not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise SpecMismatchError(
                f"codec {self.name!r} compresses floats ({known}), but key {key!r} has {dtype}",
                key=key,
                expected=known,
                got=dtype,
            )

    def wrong(self, param: str, expected: str) -> CodecError:
        """Return the error that says what a parameter must be."""
        got = repr(getattr(self, param))
        return CodecError(f"codec {self.name!r}: {param} must be {expected}, got {got}", expected=expected, got=got)

    def malformed(self, what: str, expected: str, got: str) -> ProtocolError:
        """Return the error that says what is wrong with a payload."""
        return ProtocolError(
            f"a payload of codec {self.name!r} {what} must have {expected}, got {got}", expected=expected, got=got
        )

    def _check_int(self, param: str, low: int, high: int) -> None:
        value = getattr(self, param)
        # To Python a bool is an int, but a flag where a number belongs is a mistake.
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(param, f"an integer from {low} to {high}")


class BitCodec(Codec, frozen=True):
    """Base of the codecs that send a few bits for each value, with a threshold in float32.

    The threshold travels as the number that it is: both sides round the same number to float32, once.
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        threshold = _to_float(self.threshold)
        if not math.isfinite(_to_float32(threshold)):
            raise self.wrong("threshold", "a finite number in float32")
        msgspec.structs.force_setattr(self, "threshold", threshold)

    @property
    def bits(self) -> int:
        """Bits for each value."""
        raise NotImplementedError

    def nbytes(self, size: int) -> int:
        """Return the length of a payload: whole words of 4 bytes."""
        return WORD * -(-size * self.bits // (8 * WORD))


class OneBit(BitCodec, tag="1bit", frozen=True):
    """One bit for each value, as MXNet has it, after Seide et al. 2014.

    p = gradient + residual;  p > threshold: bit 1, the value +1;  else bit 0, the value -1;  residual = p - value

    A value is 1 or -1 whatever the threshold is, and never 0: a gradient of 0 moves weights too. Scale gradients so
    that most magnitudes are below 1: where they are larger for long, the residual grows without bound.
    """

    @property
    def bits(self) -> int:
        """Bits for each value."""
        return 1


class TwoBit(BitCodec, tag="2bit", frozen=True):
    """Two bits for each value, as MXNet has it.

    p = gradient + residual;  p >= threshold: 11, the value +threshold;  p <= -threshold: 10, the value -threshold;
    else 00, the value 0;  residual = p - value

    Args:
        threshold: more than 0. Where gradients are larger for long, the residual grows without bound.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if _to_float32(self.threshold) <= 0:
            raise self.wrong("threshold", "more than 0 in float32")

    @property
    def bits(self) -> int:
        """Bits for each value."""
        return 2


class Float16(Codec, tag="fp16", frozen=True):
    """Each value rounded to IEEE half precision; what is too large for it becomes the largest, 65504."""

    def nbytes(self, size: int) -> int:
        """Return the length of a payload."""
        return 2 * size


class BFloat16(Codec, tag="bf16", frozen=True):
    """Each value rounded to bfloat16: the range of float32 with 8 bits of precision."""

    def nbytes(self, size: int) -> int:
        """Return the length of a payload."""
        return 2 * size


class Float8(Codec, tag="fp8", frozen=True):
    """Each value rounded to 8-bit floats (E4M3, Micikevicius et al. 2022), in units of a scale.

    The scale is the tensor's largest magnitude over 448, the largest 8-bit float.
    """

    def nbytes(self, size: int) -> int:
        """Return the length of a payload."""
        return SCALE + size if size else 0


class SparseCodec(Codec, frozen=True):
    """Base of the codecs that send some of the values, and leave the others to the residual.

    Args:
        fraction: how many of a tensor's values are sent: more than 0 and at most 1, rounded, at least one value.
        k: the same as a number. One of the two is given.
    """

    fraction: float | None = None
    k: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.fraction is None) == (self.k is None):
            raise CodecError(
                f"codec {self.name!r} takes one of fraction and k, got fraction {self.fraction!r}, k {self.k!r}",
                expected="one of fraction, k",
                got=f"{self.fraction!r}, {self.k!r}",
            )
        if self.k is not None:
            self._check_int("k", 1, MAX_COUNT)
            return
        fraction = _to_float(self.fraction)
        if not 0 < fraction <= 1:
            raise self.wrong("fraction", "a number in (0, 1]")
        msgspec.structs.force_setattr(self, "fraction", fraction)

    def count(self, size: int) -> int:
        """Return how many values of a whole tensor of `size` elements are sent."""
        if self.k is not None:
            return min(self.k, size)
        assert self.fraction is not None
        return min(size, max(1, round(self.fraction * size)))

    def nbytes(self, size: int) -> int | None:
        """Return None: how many of a tensor's values are in a chunk depends on them; 0 for a chunk without elements."""
        return None if size else 0

    def max_nbytes(self, size: int) -> int:
        """Return how long a payload is at most: all values that are sent may be in one chunk."""
        return PAIR * (size if self.k is None else min(self.k, size))

    def whole_nbytes(self, size: int) -> int:
        """Return the bytes of all values that are sent of a tensor."""
        return PAIR * self.count(size) if size else 0

    def check_nbytes(self, size: int, nbytes: int) -> None:
        """Refuse a length that is no number of pairs, or too large."""
        most = self.max_nbytes(size)
        if nbytes % PAIR or nbytes > most:
            raise self.malformed(f"of {size} elements", f"a multiple of {PAIR} bytes, at most {most}", f"{nbytes}")


class TopK(SparseCodec, tag="topk", frozen=True):
    """The values with the largest magnitudes (Stich et al. 2018, Lin et al. 2018); of equal ones the first."""


class RandomK(SparseCodec, tag="randomk", frozen=True):
    """Values at random places, each set of places equally likely (Stich et al. 2018).

    Without error feedback values are multiplied by size / k, so that the mean over all choices is the gradient.

    Args:
        seed: with the key, the rank and the step it gives the places.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("seed", 0, MAX_SEED)


class QSGD(Codec, tag="qsgd", frozen=True):
    """Each value rounded at random to one of the neighbouring levels (Alistarh et al. 2017).

    The levels divide the range from 0 to the tensor's largest magnitude evenly, as in the paper's experiments (its
    theorems divide by the 2-norm). Of two levels the nearer one is the likelier, so that the mean is the gradient.
    With error feedback the values are shrunk by 1 / (1 + v), where v is the variance of that rounding over the squared
    norm: without that few levels would make the residual many times larger.

    Args:
        levels: how many there are besides 0: 1 takes 2 bits a value with its sign, up to 7 4 bits, up to 127 8 bits,
            up to 32767 16 bits.
        seed: with the key, the rank and the step it gives the choices.
    """

    levels: int = 127
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("levels", 1, MAX_LEVELS)
        self._check_int("seed", 0, MAX_SEED)

    @property
    def bits(self) -> int:
        """Bits for each value: a power of two, so that none crosses a byte."""
        return next(bits for bits in (2, 4, 8, 16) if self.levels < 1 << (bits - 1))

    def nbytes(self, size: int) -> int:
        """Return the length of a payload."""
        return SCALE + -(-size * self.bits // 8) if size else 0


CODECS: Mapping[str, type[Codec]] = MappingProxyType(
    {
        "1bit": OneBit,
        "2bit": TwoBit,
        "bf16": BFloat16,
        "fp16": Float16,
        "fp8": Float8,
        "qsgd": QSGD,
        "randomk": RandomK,
        "topk": TopK,
    }
)
"""All codecs, by the name that `make_codec` takes."""


def make_codec(name: str, params: Mapping[str, Any]) -> Codec:
    """Validate a codec's name and parameters.

    Raises:
        CodecError: unknown name, unknown parameter, wrong type or a value out of its range.
    """
    codec = CODECS.get(name)
    if codec is None:
        known = ", ".join(CODECS)
        raise CodecError(f"unknown codec {name!r}; known: {known}", expected=known, got=name)
    fields = [field.name for field in msgspec.structs.fields(codec)]
    for param in params:
        if param not in fields:
            known = ", ".join(fields)
            raise CodecError(
                f"codec {name!r} has no parameter {param!r}; its parameters are: {known}", expected=known, got=param
            )
    return codec(**params)


def _to_float(value: Any) -> float:
    """Return a number as a float, and anything else as NaN, which is in no range."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _to_float32(number: float) -> float:
    """Return the number in the precision of float32, and what is too large for it as infinity."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", number))
    except OverflowError:
        return math.inf
    return float(rounded)
