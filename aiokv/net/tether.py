"""What an event loop holds of a client, so that one of which its program has let go is not kept alive by the loop."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from aiokv.net.link import Owner
from aiokv.wire.receiver import Landing

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.errors import AiokvError
    from aiokv.net.link import AnyLink
    from aiokv.types import Peer
    from aiokv.wire.receiver import Frame, Head


class Moved(Owner, Protocol):
    """A driver, as an event loop sees it: what its connections, its timer and those who connect for it report to."""

    def tick(self) -> None:
        """Take note that the timer has fired."""

    async def connect(self, peer: Peer, host: str, port: int) -> None:
        """Open a connection that was waited with until now."""


class Tether:
    """Passes on to a driver what an event loop has for it, without keeping it alive, unless it is held.

    While calls are open it is held: then only the loop may know of who waits for them.

    Args:
        driver: what is not kept alive.
    """

    def __init__(self, driver: Moved) -> None:
        self._driver = weakref.ref(driver)
        self._held: Moved | None = None

    def hold(self) -> None:
        """Keep the driver alive from now on."""
        self._held = self._driver()

    def let_go(self) -> None:
        """Do so no longer."""
        self._held = None

    @property
    def busy(self) -> bool:
        """Whether what is received has to wait."""
        driver = self._driver()
        return driver is not None and driver.busy

    def land(self, link: AnyLink, head: Head) -> Landing:
        """Choose where a payload goes."""
        driver = self._driver()
        if driver is None:
            return Landing(memoryview(bytearray(head.payload_nbytes)), None)
        return driver.land(link, head)

    def link_up(self, link: AnyLink) -> None:
        """Take note that a handshake is done."""
        driver = self._driver()
        if driver is None:
            link.abort()
        else:
            driver.link_up(link)

    def frames_received(self, link: AnyLink, frames: list[Frame]) -> None:
        """Take in whole frames."""
        driver = self._driver()
        if driver is not None:
            driver.frames_received(link, frames)

    def link_down(self, link: AnyLink, reason: str, error: AiokvError | None) -> None:
        """Take note that a connection is over."""
        driver = self._driver()
        if driver is not None:
            driver.link_down(link, reason, error)

    def tick(self) -> None:
        """Take note that the timer has fired."""
        driver = self._driver()
        if driver is not None:
            driver.tick()

    async def connect(self, peer: Peer, host: str, port: int) -> None:
        """Open a connection."""
        driver = self._driver()
        if driver is not None:
            await driver.connect(peer, host, port)


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return what calls a method of an object as long as that is there, and does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        there = reference()
        if there is not None:
            there(*arguments)

    return call
