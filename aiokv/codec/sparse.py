"""The payloads of `topk` and `randomk`: indices in their chunk (uint32, increasing), then as many values (float32)."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import numpy as np

from aiokv.codec.records import PAIR
from aiokv.codec.reference import FLOAT32_MAX
from aiokv.codec.whole import Compressed, WholeFormat, as_bytes

if TYPE_CHECKING:
    from aiokv.codec.records import RandomK, SparseCodec, TopK
    from aiokv.codec.reference import Array
    from aiokv.codec.whole import Draw


class _SparseFormat(WholeFormat):
    """Base of the two; they differ in which values they choose."""

    def __init__(self, codec: SparseCodec) -> None:
        self._codec = codec

    @abc.abstractmethod
    def choose(self, corrected: Array, count: int, draw: Draw) -> Array:
        """Return the places of the values to send, int64[count], increasing."""

    def compress(self, corrected: Array, draw: Draw) -> Compressed:
        """Take the values at the chosen places."""
        places = self.choose(corrected, self._codec.count(corrected.size), draw)
        return _Chosen(places, corrected[places].astype(np.float32))

    def values(self, payload: Array, size: int) -> Array:
        """Return what a payload says, with zeros for what was not sent."""
        indices, chosen = self._read(payload, size)
        values = np.zeros(size, np.float32)
        values[indices] = chosen
        return values

    def accumulate_into(self, payload: Array, target: Array) -> None:
        """Add the payload's values: only those that were sent."""
        indices, chosen = self._read(payload, target.size)
        target[indices] += chosen

    def _read(self, payload: Array, size: int) -> tuple[Array, Array]:
        count = payload.size // PAIR
        indices, values = payload[: count * 4].view(np.uint32), payload[count * 4 :].view(np.float32)
        if count and (indices[-1] >= size or (indices[1:] <= indices[:-1]).any()):
            expected = f"increasing indices below {size}"
            raise self._codec.malformed(f"of {size} elements", expected, f"{indices[:10].tolist()}, ...")
        if not np.isfinite(values).all():
            raise self._codec.malformed(f"of {size} elements", "finite numbers", "NaN or infinity")
        return indices, values


class TopKFormat(_SparseFormat):
    """The values with the largest magnitudes; of equal ones the first."""

    def __init__(self, codec: TopK) -> None:
        super().__init__(codec)

    def choose(self, corrected: Array, count: int, draw: Draw) -> Array:
        """Return the places of the largest magnitudes."""
        magnitudes = np.abs(corrected)
        # The smallest magnitude that is sent: which of several equal ones `argpartition` returns is its own affair.
        least = np.partition(magnitudes, corrected.size - count)[corrected.size - count]
        larger = np.flatnonzero(magnitudes > least)
        equal = np.flatnonzero(magnitudes == least)[: count - larger.size]
        return np.sort(np.concatenate([larger, equal]))


class RandomKFormat(_SparseFormat):
    """Values at random places."""

    def __init__(self, codec: RandomK) -> None:
        super().__init__(codec)

    def choose(self, corrected: Array, count: int, draw: Draw) -> Array:
        """Return places that are drawn without replacement."""
        return np.sort(draw().choice(corrected.size, count, replace=False, shuffle=False))

    def compress(self, corrected: Array, draw: Draw) -> Compressed:
        """Take the values at the chosen places, and without error feedback multiply them by size / k."""
        if self._codec.error_feedback:
            return super().compress(corrected, draw)
        count = self._codec.count(corrected.size)
        places = self.choose(corrected, count, draw)
        enlarged = corrected[places] * (corrected.size / count)
        return _Chosen(places, np.clip(enlarged, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32))


class _Chosen(Compressed):
    def __init__(self, places: Array, values: Array) -> None:
        self._places = places
        self._values = values

    def cut(self, start: int, stop: int) -> Array:
        first, end = np.searchsorted(self._places, [start, stop])
        indices = (self._places[first:end] - start).astype(np.uint32)
        return np.concatenate([as_bytes(indices), as_bytes(self._values[first:end])])

    def subtract_from(self, corrected: Array) -> None:
        corrected[self._places] -= self._values
