"""Waits until all that the servers of a cluster have is there twice."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from aiokv.errors import AiokvError
from aiokv.net.inquiry import ask_waiting
from aiokv.types import Role
from aiokv.wire.messages import Waiting

if TYPE_CHECKING:
    from aiokv.config import Config

ASK_SECONDS = 1.0
"""How long the scheduler and the servers may take to answer."""

LOOK_SECONDS = 0.1
"""From one look to the next."""

LOOKS = 600
"""How often to look; then something is wrong."""


async def wait_for_copies(config: Config, servers: int, since: float) -> None:
    """Wait until each server has a standby that is ready.

    Args:
        config: where the scheduler is, and the token.
        servers: how many serve.
        since: when the last one was killed, by the monotonic clock: who was not heard since then may be dead.

    Raises:
        AiokvError: that takes too long.
    """
    for _ in range(LOOKS):
        if await _are_copied(config, servers, since):
            return
        await asyncio.sleep(LOOK_SECONDS)
    raise AiokvError(f"there were servers without a copy for more than {LOOKS * LOOK_SECONDS:g} s")


async def _are_copied(config: Config, servers: int, since: float) -> bool:
    ago = time.monotonic() - since
    try:
        answers = await ask_waiting(config, timeout=ASK_SECONDS)
    except AiokvError:
        # It is being started again.
        return False
    scheduler = answers["scheduler"]
    assert isinstance(scheduler, Waiting), "without the scheduler there is no answer at all"
    nodes = [member for member in scheduler.members if member.role is Role.SERVER]
    states = [node.state for node in nodes if node.seconds < ago]
    return (
        len(states) == len(nodes)
        and states.count("alive") == sum(state.endswith(", ready") for state in states) == servers
    )
