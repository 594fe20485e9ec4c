"""Workers that are started to join a running job: no other nodes are started with them."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from click.testing import CliRunner

import aiokv
from aiokv.cli import cli
from aiokv.launch import Job, LocalLauncher, Outcome
from aiokv.types import Role
from tests.launch.fake_nodes import Recorder

if TYPE_CHECKING:
    import pytest

WORKER = """
import numpy, aiokv
with aiokv.blocking.connect() as kv:
    kv.init("w", numpy.zeros(1))
    kv.resume_step()
    for _ in range(2):
        kv.push("w", numpy.full(1, 1000.0))
    kv.leave()
"""


def test_a_job_that_joins_has_workers_only_with_names_of_their_own() -> None:
    one = Job(command=["true"], workers=2, servers=3, joins=("10.0.0.1", 9091), label="host-7")
    assert one.names() == {"worker-host-7-0": Role.WORKER, "worker-host-7-1": Role.WORKER}


async def test_workers_join_a_running_job(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"token": "secret", "cluster": "joined", "backend": "reference"}
    sums: list[float] = []
    async with (
        aiokv.Scheduler(num_workers=1, num_servers=1, max_workers=3, bind_port=0, **settings) as scheduler,
        aiokv.Server(scheduler=scheduler.address, **settings),
        aiokv.connect(scheduler.address, **settings) as kv,
    ):
        await kv.init("w", np.zeros(1))

        async def train() -> None:
            # Until two workers have come, made two steps and left, and one step more.
            while sum(sums) - len(sums) != 4000.0 or sums[-1] != 1.0:
                sums.append(float((await kv.pushpull("w", np.ones(1)))[0]))
                await asyncio.sleep(0.005)

        host, port = scheduler.address.rsplit(":", 1)
        job = Job(
            command=[sys.executable, "-c", WORKER],
            workers=2,
            cluster="joined",
            token="secret",
            joins=(host, int(port)),
        )
        output = Recorder()
        training = asyncio.create_task(train())
        outcome = await LocalLauncher(job, output).run()
        assert outcome == Outcome(0), (outcome, output.lines[-5:])
        await asyncio.wait_for(training, 20)
    assert [facts["role"] for event, facts in output.notes if event == "started"] == ["worker", "worker"]


def test_the_command_needs_to_know_which_job() -> None:
    result = CliRunner().invoke(cli, ["run", "--join", "127.0.0.1:9091", "--", "true"])
    assert result.exit_code == 2
    assert "--join needs the --cluster of the running job" in result.output
