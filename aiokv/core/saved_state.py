"""What is saved of a server's keys and their rounds; `aiokv.checkpoint.cluster_files` writes and reads it as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from aiokv.types import Key, Rank, Round, TensorSpec, Version


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


class RoundsState(msgspec.Struct, eq=False):
    """The decisions about keys with one policy and one group, up to a round.

    Attributes:
        policy: its text.
        group: the ranks; empty: all.
        round: the last round.
        last: its steps: rank and clock.
        steps: the last step of each rank that is decided: rank, clock, the round that it is in, or 0, and why it is in
            none. What a worker pushes behind it comes again.
        known: what the decider knows of ranks besides; see `aiokv.policy.Decider.known`.
    """

    policy: str
    group: tuple[Rank, ...]
    round: Round
    last: tuple[tuple[Rank, int], ...]
    steps: tuple[tuple[Rank, int, Round, str], ...]
    known: tuple[tuple[Rank, int], ...]
