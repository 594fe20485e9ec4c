"""The keys that a server holds: what a message about one must agree with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.chunk import Chunk
from aiokv.core.keys import check_key, check_kind, check_same_spec, check_spec
from aiokv.errors import AlreadyInitializedError, PolicyError, ProtocolError, SpecMismatchError, UnknownKeyError
from aiokv.policy import get_policy
from aiokv.types import Key, TensorSpec

if TYPE_CHECKING:
    from aiokv.optim import Optimizer
    from aiokv.wire.messages import Init, Pull, Push


class Catalog:
    """All keys and chunks of one server. Every method raises the error that the sender of the message should get."""

    def __init__(self) -> None:
        self.chunks: dict[tuple[Key, int], Chunk] = {}
        self._keys: dict[Key, tuple[TensorSpec, str]] = {}
        self._kind: type | None = None

    def find(self, key: Key, start: int) -> Chunk | None:
        """Return a chunk by its key and first element."""
        return self.chunks.get((key, start))

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Compare a rule with all keys.

        Raises:
            OptimizerError: it can't update one of them.
        """
        for key, (spec, _) in self._keys.items():
            optimizer.check_dtype(key, spec.dtype)

    def create(self, message: Init, nbytes: int) -> Chunk:
        """Enter a new chunk.

        Raises:
            AlreadyInitializedError: it exists.
            KeyUseError, SpecMismatchError, PolicyError: key, spec or policy can't be, or differ from the key's
                other chunks.
        """
        key, start, stop = message.key, message.start, message.stop
        if (key, start) in self.chunks:
            raise AlreadyInitializedError(f"key {key!r} has a value already", key=key)
        kind = check_kind(check_key(key), self._kind)
        spec = TensorSpec(message.shape, message.dtype)
        check_spec(key, spec)
        policy = get_policy(message.policy)
        self.check_init(message)
        chunk = Chunk(key, start, stop, spec, policy)
        if not 0 <= start <= stop <= spec.size or nbytes != chunk.nbytes:
            raise SpecMismatchError(
                f"key {key!r}: {nbytes} bytes for elements {start} to {stop} of {spec}",
                key=key,
                expected=f"{chunk.nbytes} bytes",
                got=f"{nbytes} bytes",
            )
        self._kind = kind
        self._keys[key] = (spec, message.policy)
        self.chunks[key, start] = chunk
        return chunk

    def check_init(self, message: Init) -> None:
        """Compare another rank's init with the key, or with what a new key may be.

        Raises:
            KeyUseError: str and int keys are mixed.
            SpecMismatchError, PolicyError: they differ.
        """
        if message.key not in self._keys:
            check_kind(check_key(message.key), self._kind)
            return
        spec, policy = self._keys[message.key]
        check_same_spec(message.key, spec, TensorSpec(message.shape, message.dtype))
        if policy != message.policy:
            raise PolicyError(
                f"key {message.key!r} is kept under policy {policy}, not {message.policy}",
                key=message.key,
                expected=policy,
                got=message.policy,
            )

    def lookup(self, message: Push | Pull) -> Chunk:
        """Return the chunk that a push or pull is about.

        Raises:
            KeyUseError, UnknownKeyError: no such key here.
            SpecMismatchError: another shape or dtype.
            ProtocolError: cut in other places than the key is.
        """
        key = message.key
        known = self._keys.get(key)
        if known is None:
            check_kind(check_key(key), self._kind)
            raise UnknownKeyError(f"key {key!r} is not initialized: call init first", key=key)
        check_same_spec(key, known[0], TensorSpec(message.shape, message.dtype))
        chunk = self.chunks.get((key, message.start))
        if chunk is None or chunk.stop != message.stop:
            held = "not" if chunk is None else f"as {chunk.start} to {chunk.stop}"
            raise ProtocolError(
                f"key {key!r}: asked for elements {message.start} to {message.stop}, which are {held} held here"
            )
        return chunk
