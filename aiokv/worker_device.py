"""What a worker uses a device for. `aiokv.kernels.cuda.devices` has it; nothing else needs a CUDA package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.codec import Codec
    from aiokv.types import Key

    Cuts = Sequence[tuple[int, int]]

Array = NDArray[Any]
Ids = NDArray[np.int64]


class Device(Protocol):
    """What a worker uses a device for."""

    def sum_lists(self, lists: Sequence[Sequence[Any]], squares: list[float | None] | None = None, /) -> list[Array]:
        """Return the sum of each list of arrays of one float dtype, in their order, in the host's memory.

        Low precisions are added in float32, and rounded once. `squares` takes the sum of the squares of each, added in
        float64: it is finite if and only if all elements are. None for sums of float64.
        """
        ...

    def fetch(self, arrays: Sequence[Any], /) -> list[Array]:
        """Return copies in the host's memory of arrays on the device, of any dtypes."""
        ...

    def sum_rows(self, ids: Ids, values: Any, /) -> tuple[Ids, Array]:
        """Return row ids, increasing and each once, and the sums of their rows in the host's memory.

        Rows of one id are added in their order, low precisions in float32, and rounded once.
        """
        ...

    def encodes(self, codec: Codec, dtype: str, /) -> bool:
        """Say whether gradients of a dtype can be encoded there."""
        ...

    def keep_sums(self, lists: Sequence[Sequence[Any]], squares: list[float | None] | None = None, /) -> list[Any]:
        """Return the sums that `sum_lists` makes, in float32 on the device; one array of float32 is its own sum."""
        ...

    def new_encoder(self, codec: Codec, key: Key, size: int, dtype: str, step: int, /) -> Any:
        """Return what encodes gradients of a key there; it has what `aiokv.codec.encoder.Encoder` has of a residual."""
        ...

    def check(self, gradients: Sequence[tuple[Any, Any, Cuts]], /) -> Any:
        """Return what `encode` takes of encoders, sums and cuts. Raises NotFiniteError: one can't be encoded."""
        ...

    def encode(self, checked: Any, /) -> list[list[memoryview]]:
        """Return the payloads of each gradient, one for each cut."""
        ...

    # --- values that are received ---

    def allocate(self, nbytes: int, /) -> Array:
        """Return page-locked memory of the host, uint8: new, or such that nobody refers to it any longer."""
        ...

    def writable(self, array: Any, /) -> Any:
        """Return what `start` takes of an array on the device. Raises SpecMismatchError: it can't be written."""
        ...

    def start(self, memory: Array, target: Any, rows: Array | None, first: int, /) -> None:
        """Begin to copy a part of the target, from byte `first` on, or some rows of it: the others become zero."""
        ...

    def wait(self) -> None:
        """Return when all copies are there that were begun."""
        ...
