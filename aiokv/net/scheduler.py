"""The scheduler: `Membership` behind a listening socket."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiokv.checkpoint.folder import complete, make_plan, remove
from aiokv.config import Config, load_config
from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.scheduler.cluster_plan import ClusterPlan
from aiokv.core.scheduler.membership import Membership
from aiokv.errors import AiokvError, ProtocolError
from aiokv.net.driver import make_incarnation
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
        self._work: dict[asyncio.Task[None], None] = {}
        self._files = asyncio.Lock()
        """Held by who writes or deletes files: one after the other."""

    async def start(self) -> None:
        """Listen. See `Node.start`."""
        config = self.config
        config.check_token()
        self._loop = asyncio.get_running_loop()
        checkpoints = await asyncio.to_thread(make_plan, config, self.note_from_thread)
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
            min_workers=config.min_workers,
            max_workers=config.max_workers,
            reconnect_grace=min(config.reconnect_grace, config.death_timeout),
            replication=config.replication,
            elastic_servers=config.elastic_servers,
            num_places=config.num_places,
            settle_time=config.settle_time,
            checkpoints=checkpoints,
        )
        self._start(Membership(plan, incarnation=make_incarnation(), started=self._loop.time()))

    def land(self, link: AnyLink, head: Head) -> Landing:
        """Refuse: nothing that a scheduler is told has a payload."""
        raise ProtocolError(f"a scheduler takes no payload, got {head.payload_nbytes} bytes with {head.message!r}")

    def _perform_own(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Stop():
                self._stop(effect)
            case ef.WriteManifest() | ef.RemoveCheckpoints():
                task = self._loop.create_task(self._perform_on_files(effect))
                self._work[task] = None
                task.add_done_callback(self._work.pop)
            case _:
                super()._perform_own(effect)

    async def _perform_on_files(self, effect: ef.WriteManifest | ef.RemoveCheckpoints) -> None:
        folder = self.config.checkpoint_folder
        async with self._files:
            if isinstance(effect, ef.RemoveCheckpoints):
                await asyncio.to_thread(remove, effect.places, folder, self.note_from_thread)
                return
            reason = ""
            try:
                await asyncio.to_thread(complete, effect, folder)
            except AiokvError as error:
                reason = error.message
        self.feed(st.ManifestWritten(effect.clock, reason))

    async def close(self) -> None:
        """Stop listening and close all connections. See `Node.close`."""
        await super().close()
        # What is being written can't be stopped.
        await asyncio.gather(*self._work, return_exceptions=True)
