"""The scheduler: `Membership` behind a listening socket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.config import Config, load_config
from aiokv.core import effects as ef
from aiokv.core.membership import ClusterPlan, Membership
from aiokv.errors import ProtocolError
from aiokv.net.node import Node
from aiokv.types import Role

if TYPE_CHECKING:
    from aiokv.net.driver import Log
    from aiokv.net.link import AnyLink
    from aiokv.wire.receiver import Head, Landing


class Scheduler(Node):
    """Keeps the members of one cluster together.

        async with aiokv.Scheduler(num_workers=2, num_servers=1, bind_port=0) as scheduler:
            print(scheduler.address)
            await scheduler.wait_stopped()

    Args:
        config: all settings; from the environment when not given.
        log: where stimuli and effects are recorded, if they are.
        settings: fields of `Config` that win over the environment.
    """

    def __init__(self, config: Config | None = None, *, log: Log | None = None, **settings: Any) -> None:
        super().__init__(config or load_config(role=Role.SCHEDULER, **settings), log)

    async def start(self) -> None:
        """Listen. See `Node.start`."""
        config = self.config
        config.check_token()
        await self._listen(config.bind_host, config.bind_port)
        plan = ClusterPlan(
            num_workers=config.num_workers,
            num_servers=config.num_servers,
            heartbeat=config.heartbeat,
            death_timeout=config.death_timeout,
            chunk_bytes=config.chunk_bytes,
            split_bytes=config.split_bytes,
            on_worker_loss=config.on_worker_loss,
            respawn_timeout=config.respawn_timeout,
        )
        self._start(Membership(plan))

    def land(self, link: AnyLink, head: Head) -> Landing:
        """Refuse: nothing that a scheduler is told has a payload."""
        raise ProtocolError(f"a scheduler takes no payload, got {head.payload_nbytes} bytes with {head.message!r}")

    def _perform_own(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Stop():
                self._stop(effect)
            case _:
                super()._perform_own(effect)
