"""The payloads of `topk` and `randomk`: indices in their chunk (uint32, increasing), then as many values (float32)."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import numpy as np

from aiokv.codec.records import PAIR
from aiokv.codec.reference import FLOAT32_MAX
from aiokv.codec.whole import Cut, WholeFormat, as_bytes

if TYPE_CHECKING:
    from aiokv.codec.backends import Kernels
    from aiokv.codec.records import RandomK, SparseCodec, TopK
    from aiokv.codec.reference import Array
    from aiokv.codec.whole import Draw


class _SparseFormat(WholeFormat):
    """Base of the two; they differ in which values they choose."""

    def __init__(self, codec: SparseCodec, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._codec = codec

    @abc.abstractmethod
    def choose(self, corrected: Array, count: int, draw: Draw) -> Array:
        """Return the places of the values to send, int64[count], increasing."""

    def compress(self, gradient: Array, residual: Array | None, draw: Draw) -> Cut:
        """Take the values at the chosen places."""
        corrected = gradient if residual is None else np.add(gradient, residual, out=residual)
        places = self.choose(corrected, self._codec.count(corrected.size), draw)
        values = self.sent(corrected, places)
        if residual is not None:
            residual[places] -= values

        def cut(start: int, stop: int) -> Array:
            first, end = np.searchsorted(places, [start, stop])
            indices = (places[first:end] - start).astype(np.uint32)
            return np.concatenate([as_bytes(indices), as_bytes(values[first:end])])

        return cut

    def sent(self, corrected: Array, places: Array) -> Array:
        """Return what is said of the values at the chosen places, float32."""
        return corrected[places].astype(np.float32)

    def read_into(self, payload: Array, out: Array) -> None:
        """Write what a payload says, with zeros for what was not sent."""
        indices, chosen = self._read(payload, out.size)
        out[...] = 0
        out[indices] = chosen

    def add_to(self, payload: Array, target: Array) -> None:
        """Add what a payload says: only the values that were sent."""
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

    def __init__(self, codec: TopK, kernels: Kernels) -> None:
        super().__init__(codec, kernels)

    def choose(self, corrected: Array, count: int, draw: Draw) -> Array:
        """Return the places of the largest magnitudes."""
        return self._kernels.largest_places(corrected, count)


class RandomKFormat(_SparseFormat):
    """Values at random places."""

    def __init__(self, codec: RandomK, kernels: Kernels) -> None:
        super().__init__(codec, kernels)

    def choose(self, corrected: Array, count: int, draw: Draw) -> Array:
        """Return places that are drawn without replacement."""
        return np.sort(draw().choice(corrected.size, count, replace=False, shuffle=False))

    def sent(self, corrected: Array, places: Array) -> Array:
        """Return what is said of the chosen values: without error feedback they are multiplied by size / k."""
        if self._codec.error_feedback:
            return super().sent(corrected, places)
        enlarged = corrected[places] * (corrected.size / places.size)
        return np.clip(enlarged, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)
