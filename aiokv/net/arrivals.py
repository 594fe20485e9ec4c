"""What has landed for chunks on devices: the store is told at once, so that copies begin while other payloads come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.keys import BUNDLE_START
from aiokv.wire.messages import Bundled, InitBundle, Push, PushBundle

if TYPE_CHECKING:
    from aiokv.core.effects import Send
    from aiokv.store.device import DeviceStore
    from aiokv.types import Key, Peer
    from aiokv.wire.receiver import Frame


class Arrivals:
    """Knows for which chunk a payload is.

    Args:
        store: the server's memory.
    """

    def __init__(self, store: DeviceStore) -> None:
        self._store = store
        self._asked: dict[tuple[Peer, int], Key] = {}
        """The first key of bundles that are not answered yet."""
        self._bundles: dict[int, Key] = {}
        """That of each bundle, under which its chunk stands."""

    def received(self, peer: Peer, frame: Frame) -> None:
        """Take note of a whole frame."""
        message, slot = frame.message, frame.slot
        if isinstance(message, InitBundle) and message.keys:
            self._asked[peer, frame.request] = message.keys[0]
        elif isinstance(message, Push) and slot is not None:
            self._store.arrived(slot, message.key, message.start, encoded=bool(message.codec))
        elif isinstance(message, PushBundle) and slot is not None and message.bundle in self._bundles:
            self._store.arrived(slot, self._bundles[message.bundle], BUNDLE_START, encoded=bool(message.codec))

    def answered(self, effect: Send) -> None:
        """Take note of what is sent: a new bundle's number."""
        if isinstance(effect.message, Bundled):
            key = self._asked.pop((effect.peer, effect.request), None)
            if key is not None:
                self._bundles[effect.message.bundle] = key

    def gone(self, peer: Peer) -> None:
        """Forget what a peer has asked for."""
        for name in [name for name in self._asked if name[0] == peer]:
            del self._asked[name]
