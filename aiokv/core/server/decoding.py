"""Compressed pushes on a server: what waits while a payload is being decoded."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from msgspec import structs

from aiokv.core.compression import check_length
from aiokv.core.effects import Decode, Effect
from aiokv.core.stimuli import PeerLost, Received
from aiokv.types import TensorSpec
from aiokv.wire.messages import Push, PushBundle

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.compression import Codecs
    from aiokv.core.server.catalog import Catalog
    from aiokv.types import Peer, Slot


class Decoding:
    """Pushes whose payload is being decoded, and what came over the same connections since.

    Args:
        catalog: the server's keys.
        codecs: those that its workers have set.
        new_slot: returns a number for a payload that is made here.
    """

    def __init__(self, catalog: Catalog, codecs: Codecs, new_slot: Callable[[], Slot]) -> None:
        self._catalog = catalog
        self._codecs = codecs
        self._new_slot = new_slot
        self._pushes: dict[Slot, Received] = {}
        """What was pushed, as it is when it is decoded, by where it is decoded to."""
        self.behind: dict[Peer, deque[Received | PeerLost]] = {}
        """What came, by the connections that wait."""

    def begin(self, received: Received, message: Push | PushBundle) -> list[Effect]:
        """Have a payload decoded; until that is done, what else comes over the connection waits.

        Raises:
            AiokvError: it can't be decoded.
        """
        codec = self._codecs.find(message.codec)
        if isinstance(message, Push):
            self._catalog.lookup(message)
            key, dtype, sizes = message.key, message.dtype, [message.stop - message.start]
        else:
            bundle = self._catalog.bundle(message.bundle)
            key, dtype, sizes = bundle.keys[0], bundle.specs[0].dtype, [spec.size for spec in bundle.specs]
        codec.check_dtype(key, dtype)
        check_length(codec, sizes, received.nbytes)
        target = self._new_slot()
        plain = structs.replace(message, codec=0)
        nbytes = TensorSpec((sum(sizes),), dtype).nbytes
        self._pushes[target] = Received(received.peer, received.request, plain, target, nbytes)
        self.behind[received.peer] = deque()
        return [Decode(received.slot, target, codec, dtype, sizes)]

    def hold(self, stimulus: Received | PeerLost) -> bool:
        """Keep what came over a connection that waits; False if it does not."""
        behind = self.behind.get(stimulus.peer)
        if behind is None:
            return False
        behind.append(stimulus)
        return True

    def end(self, target: Slot) -> tuple[Received, deque[Received | PeerLost]]:
        """Return the push that was decoded, and what came after it: its connection waits no longer."""
        push = self._pushes.pop(target)
        return push, self.behind.pop(push.peer)
