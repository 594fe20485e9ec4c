"""What a server's peers have of the values that they receive compressed.

Compressed, a value travels as its difference to what the peer has: the server keeps a replica for each chunk and peer,
and adds to it what the payload says, as the peer does. So the error of a payload is in the next difference, and is
corrected by later ones: error feedback, as in EF21 (Richtarik, Sokolov and Fatkhullin, NeurIPS 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.codec import PRECISIONS
from aiokv.codec.decoder import Decoder
from aiokv.codec.encoder import Encoder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiokv.codec import Codec
    from aiokv.types import Key, Peer

    Array = NDArray[Any]


@dataclass(slots=True, eq=False)
class Replica:
    """What one peer has of one chunk, in at least float32, and what encodes the next difference."""

    values: Array
    encoder: Encoder | None = None


class Replicas:
    """All replicas of a server's peers."""

    def __init__(self) -> None:
        self._peers: dict[Peer, dict[tuple[Key, int], Replica]] = {}
        self._backends: dict[Codec, str] = {}

    def prepare(self, codec: Codec, backend: str) -> None:
        """Let a backend compute a codec from now on."""
        self._backends[codec] = backend

    def difference(self, key: Key, start: int, peer: Peer, value: Array, codec: Codec | None) -> memoryview:
        """Return the payload that brings a peer's replica up to date, or nearer to it.

        Args:
            key: the chunk's key.
            start: its first element.
            peer: whose replica.
            value: the elements now.
            codec: how to compress the difference; None: there is no replica yet, the payload is the value itself.

        Raises:
            NotFiniteError: the value has a NaN or an infinity; the replica is unchanged.
        """
        replicas = self._peers.setdefault(peer, {})
        if codec is None:
            replicas[key, start] = Replica(value.astype(PRECISIONS[value.dtype.name]))
            return memoryview(value.tobytes())
        replica = replicas[key, start]
        encoder = replica.encoder
        if encoder is None or encoder.codec != codec:
            dtype, size = replica.values.dtype.name, replica.values.size
            encoder = Encoder(codec, key, size, dtype, rank=peer, backend=self._backends[codec])
            replica.encoder = encoder
        # A NaN is found by the encoder.
        with np.errstate(all="ignore"):
            (payload,) = encoder.encode(value - replica.values)
        # The replica shows what was not said: it is not to be said twice.
        encoder.flush()
        Decoder(codec, backend=self._backends[codec]).accumulate_into(payload, replica.values)
        return payload

    def forget_chunk(self, key: Key, start: int) -> None:
        """Drop the replicas of a chunk that is no more."""
        for replicas in self._peers.values():
            replicas.pop((key, start), None)

    def forget_peer(self, peer: Peer) -> None:
        """Drop the replicas of a peer that is gone."""
        self._peers.pop(peer, None)
