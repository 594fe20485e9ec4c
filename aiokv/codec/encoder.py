"""Gradients to payloads. An encoder keeps what the payloads of one key did not say: its residual."""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.codec.formats import make_format
from aiokv.codec.records import MAX_COUNT, PRECISIONS, QSGD, RandomK
from aiokv.codec.reference import FLOAT32_MAX
from aiokv.errors import NotFiniteError, SpecMismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokv.codec.records import Codec
    from aiokv.codec.reference import Array
    from aiokv.types import Key, Rank

MAX_STEP = 2**64 - 1


class Encoder:
    """What one sender has for one key: a worker for its gradients, or a server for what it sends to one worker.

    With error feedback the sum of all values that its payloads say, plus the residual, is the sum of all gradients.
    It is not safe to call one encoder from two threads at once.

    Args:
        codec: how to compress.
        key: of the tensor; errors name it, and random choices depend on it.
        size: number of elements of the whole tensor.
        dtype: of the gradients. float16, bfloat16 and float32 are corrected in float32, float64 in float64.
        rank: of the worker. Random choices depend on it, so that the errors of the workers average out.
        backend: "auto", "cpu" or "reference"; see `aiokv.codec.formats.make_format`.
        step: how many gradients were encoded before.

    Raises:
        SpecMismatchError: gradients of that dtype can't be compressed.
        ConfigError: there is no such backend.
        MissingExtraError: the backend's packages are not installed.
    """

    def __init__(
        self,
        codec: Codec,
        key: Key,
        size: int,
        dtype: str = "float32",
        *,
        rank: Rank = 0,
        backend: str = "auto",
        step: int = 0,
    ) -> None:
        codec.check_dtype(key, dtype)
        self._codec = codec
        self._key = key
        self._size = size
        self._dtype = dtype
        self._precision = np.dtype(PRECISIONS[dtype])
        self._format = make_format(codec, backend)
        self._residual = self._zeros() if codec.error_feedback else None
        self._step = step
        self._random_key = _random_key(codec, key, rank)

    def __repr__(self) -> str:
        return f"Encoder({self._codec!r}, {self._key!r}, {self._dtype}[{self._size}])"

    @property
    def codec(self) -> Codec:
        """How it compresses."""
        return self._codec

    @property
    def step(self) -> int:
        """How many gradients were encoded."""
        return self._step

    def encode(self, gradient: Array, cuts: Sequence[tuple[int, int]] | None = None) -> list[memoryview]:
        """Compress a gradient and cut it; on an error nothing has changed.

        Cut in any way, the payloads say the same as the payload of the whole tensor. To send a gradient again, send
        its payloads again: they are the caller's, and encoding it twice would count it twice.

        Args:
            gradient: all elements of the tensor, in any shape.
            cuts: neighbouring ranges [start, stop) of elements, from 0 to the size; None for one.

        Returns:
            A payload for each cut, read-only.

        Raises:
            SpecMismatchError: the gradient has another size or dtype, or the cuts do not cover the tensor.
            NotFiniteError: the gradient has a NaN or an infinity, or is, with the residual, too large for float32.
        """
        return self.encode_checked(self.check(gradient), self._check_cuts(cuts))

    def check(self, gradient: Array) -> Array:
        """Return a gradient as `encode_checked` takes it: for who must know first that several can be encoded.

        Raises:
            SpecMismatchError, NotFiniteError: as `encode`.
        """
        flat = self._check_gradient(gradient)
        with np.errstate(all="ignore"):
            if not self._format.fits(flat, self._residual):
                raise not_encodable(self._codec, self._key, flat)
        return flat

    def encode_checked(self, flat: Array, cuts: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Compress what `check` has returned, if nothing was encoded or restored meanwhile. See `encode`."""
        with np.errstate(all="ignore"):
            payloads, self._residual = self._format.encode(flat, self._residual, cuts, self._draw)
        self._step += 1
        return [payload.data.toreadonly() for payload in payloads]

    def flush(self) -> Array:
        """Forget the residual and return it, one-dimensional: add it to the next gradient that is sent as it is.

        Without error feedback it is all zeros.
        """
        residual = self._residual
        if residual is None:
            return self._zeros()
        self._residual = self._zeros()
        return residual

    def put_back(self, values: Array) -> None:
        """Add values to the residual, which there is with error feedback alone: what was not sent after all.

        Args:
            values: one-dimensional, as many as the tensor has elements, in the precision of the residual.
        """
        assert self._residual is not None, "without error feedback nothing is kept"
        self._residual += values

    def state(self) -> dict[str, Any]:
        """Return copies of what the next payloads depend on: `step`, and with error feedback `residual`."""
        if self._residual is None:
            return {"step": self._step}
        return {"step": self._step, "residual": self._residual.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as the encoder of the same codec, key, size and dtype would have that the state is from.

        Raises:
            SpecMismatchError: the state is of another encoder. Nothing has changed.
        """
        names = {"step"} if self._residual is None else {"step", "residual"}
        if state.keys() != names:
            raise self._mismatch("state", " and ".join(sorted(names)), " and ".join(sorted(state)) or "nothing")
        step = state["step"]
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= MAX_STEP:
            raise self._mismatch("step", f"an integer from 0 to {MAX_STEP}", repr(step))
        if self._residual is not None:
            self._residual = self._check_residual(state["residual"])
        self._step = step

    def _check_gradient(self, gradient: Array) -> Array:
        """Return the gradient flat, in the precision of the residual, read-only."""
        if not isinstance(gradient, np.ndarray):
            raise self._mismatch("gradient", f"{self._dtype}[{self._size}]", type(gradient).__name__)
        if gradient.dtype != self._dtype or gradient.size != self._size:
            raise self._mismatch("gradient", f"{self._dtype}[{self._size}]", f"{gradient.dtype}[{gradient.size}]")
        flat = np.require(gradient, self._precision, ["C", "A"]).reshape(-1).view()
        # Compiled functions are compiled once for read-only arrays, and again for others.
        flat.flags.writeable = False
        return flat

    def _check_cuts(self, cuts: Sequence[tuple[int, int]] | None) -> Sequence[tuple[int, int]]:
        if cuts is None:
            cuts = [(0, self._size)]
        bounds = [0, *itertools.chain.from_iterable(cuts), self._size]
        # In turns where a range ends and where the next one starts.
        if bounds[0::2] != bounds[1::2] or any(not 0 <= stop - start < MAX_COUNT for start, stop in cuts):
            raise self._mismatch("cuts", f"neighbouring ranges from 0 to {self._size}", f"{list(cuts)[:10]}")
        return cuts

    def _check_residual(self, residual: Any) -> Array:
        """Return a copy of a residual that came from outside."""
        expected = f"finite {self._precision}[{self._size}]"
        if not isinstance(residual, np.ndarray):
            raise self._mismatch("residual", expected, type(residual).__name__)
        if residual.dtype != self._precision or residual.shape != (self._size,):
            raise self._mismatch("residual", expected, f"{residual.dtype}{list(residual.shape)}")
        if not np.isfinite(residual).all():
            raise self._mismatch("residual", expected, "NaN or infinity")
        return residual.copy()

    def _draw(self) -> np.random.Generator:
        """Return the generator of this step's random choices: it depends on no earlier step."""
        # The generator counts in the lowest of the four words of its counter; the step is the highest one.
        return np.random.Generator(np.random.Philox(key=self._random_key, counter=self._step << 192))

    def _zeros(self) -> Array:
        return np.zeros(self._size, self._precision)

    def _mismatch(self, what: str, expected: str, got: str) -> SpecMismatchError:
        return SpecMismatchError(
            f"{what} of key {self._key!r} must be {expected}, got {got}", key=self._key, expected=expected, got=got
        )


def not_encodable(codec: Codec, key: Key, gradient: Array) -> NotFiniteError:
    """Return the error that says why a gradient can't be encoded with its residual."""
    outside = np.flatnonzero(~(np.abs(gradient) <= FLOAT32_MAX))
    if outside.size:
        got = f"{gradient[outside[0]]} at element {outside[0]}, and {outside.size - 1} more"
        what = f"the gradient of key {key!r} has {got}"
    else:
        got = "a sum that is too large"
        what = f"the gradient of key {key!r} and its residual have {got}"
    return NotFiniteError(
        f"{what}: codec {codec.name!r} needs finite numbers that float32 can hold. The residual is unchanged",
        key=key,
        expected="finite numbers",
        got=got,
    )


def _random_key(codec: Codec, key: Key, rank: Rank) -> int:
    """Return the 128 bits that make the random choices of this encoder its own."""
    seed = codec.seed if isinstance(codec, RandomK | QSGD) else 0
    # The type of the key is part of the text, so that 1 and "1" differ.
    text = repr((seed, rank, key)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
