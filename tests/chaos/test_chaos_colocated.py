"""A process that is a worker and hosts a server is killed: both come back, and the weights keep their bits."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import msgspec
import pytest

from aiokv.chaos.copies import wait_for_copies
from aiokv.chaos.job import JobPlan
from aiokv.chaos.run import SETTINGS, Watch
from aiokv.config import load_config
from aiokv.launch import Job, LocalLauncher
from aiokv.launch.supervisor import Recovery

STEPS = 60


async def train(*, dies: bool) -> set[str]:
    """Train on three processes, of which one may be killed; return the digests of what the workers end with."""
    address = asyncio.get_running_loop().create_future()

    def listens(_: str, host: str, port: int) -> None:
        if not address.done():
            address.set_result(f"{host}:{port}")

    watch = Watch(listens)
    plan = msgspec.json.encode(JobPlan(7, STEPS, 0.02 if dies else 0.0)).decode()
    recovery = Recovery(restarts=1, on_worker_loss="respawn", replicated=True, colocated=True)
    command = [sys.executable, "-m", "aiokv.chaos.job", plan]
    job = Job(command=command, workers=3, colocate=True, recovery=recovery)
    environ = dict(os.environ) | SETTINGS | {"AIOKV_REPLICATION": "2", "AIOKV_ON_WORKER_LOSS": "respawn"}
    launched = asyncio.create_task(LocalLauncher(job, watch, environ=environ).run())
    if dies:
        asks = {"scheduler": await address, "cluster": job.cluster, "token": job.token}
        await wait_for_copies(load_config(environ=SETTINGS, **asks), 3, since=0.0)
        await watch.moved.wait()
        os.kill(watch.pids["worker-1"], signal.SIGKILL)
    outcome = await launched
    assert outcome.exit_code == 0, (outcome, watch.errors)
    assert [end["step"] for end in watch.ends] == [STEPS] * 3
    return {end["digest"] for end in watch.ends}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_both_come_back_with_the_bits_that_they_had() -> None:
    disturbed, undisturbed = asyncio.run(train(dies=True)), asyncio.run(train(dies=False))
    assert len(undisturbed) == 1
    assert disturbed == undisturbed
