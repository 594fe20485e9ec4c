"""What a server knows of a part of a key, as it is saved; `aiokv.cluster_files` writes and reads it as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from aiokv.types import Key, TensorSpec, Version


class ChunkState(msgspec.Struct, eq=False):
    """Elements, or rows, [start, stop) of a key, and what was pushed to them.

    `counts` are ranks with the number of their pushes that the value holds. `bundle` are the keys with which it is one
    chunk, if it is, in their order. `made` is how many updates were made under its policy. Where rounds are decided for
    all keys at once, `round` is the last one that the value has, and `pushes` says of each rank which of its pushes has
    come last, and with which clock. All else is as in `aiokv.wire.messages.Init` or, of a `sparse` key, `InitRows`.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    version: Version
    counts: tuple[tuple[int, int], ...]
    policy: str
    group: tuple[int, ...] = ()
    digest: bytes = b""
    sparse: bool = False
    lazy: bool = True
    initializer: dict[str, Any] = {}
    bundle: tuple[Key, ...] = ()
    made: int = 0
    round: int = 0
    pushes: tuple[tuple[int, int, int], ...] = ()

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype of the whole key."""
        return TensorSpec(self.shape, self.dtype)
