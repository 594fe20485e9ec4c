"""Asks a live cluster for what its requests wait: `Inquiry` behind connections to the scheduler and the servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.inquiry import Inquiry
from aiokv.errors import ProtocolError
from aiokv.net.driver import Driver

if TYPE_CHECKING:
    import asyncio

    from aiokv.config import Config
    from aiokv.errors import AiokvError
    from aiokv.net.link import AnyLink
    from aiokv.wire.messages import Waiting
    from aiokv.wire.receiver import Head, Landing


async def ask_waiting(config: Config, *, timeout: float) -> dict[str, Waiting | str]:
    """Return what the scheduler and each server say, by their names; text: why one says nothing.

    Args:
        config: where the scheduler is, and the token.
        timeout: seconds for all answers together.

    Raises:
        SchedulerLostError: the scheduler does not answer.
        HandshakeError: another cluster, token or protocol version.
    """
    return await Inquirer(config).ask(timeout)


class Inquirer(Driver):
    """The driver of one `Inquiry`."""

    async def ask(self, timeout: float) -> dict[str, Waiting | str]:
        """Ask everybody once. See `ask_waiting`."""
        self._start(Inquiry((self.config.scheduler_host, self.config.scheduler_port)))
        self._answers: asyncio.Future[dict[str, Waiting | str]] = self._loop.create_future()
        try:
            self.feed(st.Join(0, timeout))
            return await self._answers
        finally:
            await self._close_links()

    def land(self, link: AnyLink, head: Head) -> Landing:
        """Refuse: no answer has a payload."""
        raise ProtocolError(f"nobody has asked for a payload, got {head.payload_nbytes} bytes with {head.message!r}")

    def _perform_own(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Complete(_, result):
                self._answers.set_result(result)
            case ef.Fail(_, error):
                self._failed(error)
            case _:
                super()._perform_own(effect)

    def _failed(self, error: AiokvError) -> None:
        self._answers.set_exception(error)
