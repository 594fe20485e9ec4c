"""The decisions of a live run are those of the state machine alone: the same stimuli give the same effects."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiokv
from aiokv.core.joiner import Joiner
from aiokv.core.scheduler.cluster_plan import ClusterPlan
from aiokv.core.scheduler.membership import Membership
from aiokv.core.server.coordinator import Coordinator
from aiokv.core.worker.session import Session
from aiokv.errors import AiokvError
from aiokv.net.driver import Log
from aiokv.types import Role
from aiokv.wire.messages import Register, View


def comparable(effects: list[Any]) -> list[str]:
    """Effects as text: exceptions and records compare by what they say."""
    return [repr(effect) for effect in effects]


def registered(log: Log) -> Register:
    """Return how the node of a log introduced itself."""
    messages = [getattr(effect, "message", None) for event in log.events for effect in event.effects]
    return next(message for message in messages if isinstance(message, Register))


def founder_of(log: Log) -> int:
    """Return the incarnation that a scheduler has named."""
    messages = [getattr(effect, "message", None) for event in log.events for effect in event.effects]
    return next(message.founder for message in messages if isinstance(message, View))


def joiner(log: Log, role: Role, scheduler: aiokv.Scheduler) -> Joiner:
    me = registered(log)
    return Joiner(
        role=role,
        name=me.name,
        incarnation=me.incarnation,
        scheduler=(scheduler.host, scheduler.port),
        advertised=(me.host, me.port),
    )


@pytest.mark.parametrize(("policy", "rule"), [("bsp", "sgd"), ("asp", "sgd"), ("essp:1", "sgd"), ("bsp", "lamb")])
async def test_a_live_run_replayed_into_fresh_machines_gives_the_same_effects(policy: str, rule: str) -> None:
    """With lamb the servers talk to each other."""
    scheduler_log, server_logs, worker_logs = Log(), [Log(), Log()], [Log(), Log()]

    async def work(scheduler: aiokv.Scheduler, rank: int) -> None:
        client = aiokv.connect(scheduler.address, name=f"w{rank}", policy=policy, log=worker_logs[rank])
        async with client as kv:
            await kv.init({"w": np.zeros((300, 700), np.float32), "b": np.zeros((), np.float64)})
            await kv.set_optimizer(rule, learning_rate=0.1)
            for step in range(5):
                await kv.pushpull({"w": np.full((300, 700), step, np.float32), "b": np.float64(rank)})
                with pytest.raises(AiokvError):
                    await kv.push("nope", np.zeros(1))
            await kv.barrier()
            await kv.pull("w")
            # Under essp it comes behind the push.
            await kv.push("w", np.ones((300, 700), np.float32))
            await kv.pull("w")

    async with (
        aiokv.Scheduler(num_workers=2, num_servers=2, bind_port=0, chunk_bytes=65536, log=scheduler_log) as scheduler,
        aiokv.Server(scheduler=scheduler.address, log=server_logs[0]),
        aiokv.Server(scheduler=scheduler.address, log=server_logs[1]),
    ):
        await asyncio.gather(work(scheduler, 0), work(scheduler, 1))
        await scheduler.wait_stopped()
        config = scheduler.config

    plan = ClusterPlan(
        config.num_workers,
        config.num_servers,
        config.heartbeat,
        config.death_timeout,
        config.chunk_bytes,
        config.split_bytes,
    )
    replays: list[tuple[Log, Any]] = [
        (scheduler_log, Membership(plan, incarnation=founder_of(scheduler_log), started=0.0)),
        *((log, Coordinator(joiner(log, Role.SERVER, scheduler))) for log in server_logs),
        *((log, Session(joiner(log, Role.WORKER, scheduler), policy=policy)) for log in worker_logs),
    ]
    for log, machine in replays:
        assert len(log.events) >= 8
        for event in log.events:
            assert comparable(machine.handle(event.stimulus, now=event.now)) == comparable(event.effects)
            machine.validate()
