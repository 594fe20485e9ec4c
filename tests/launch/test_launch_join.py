"""Workers that are started to join a running job: no other nodes are started with them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import aiokv
from aiokv.cli import cli
from aiokv.launch import Job, LocalLauncher, Outcome
from aiokv.types import Role
from tests.launch.fake_nodes import Recorder

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
    settings: dict[str, Any] = {"token": "secret", "cluster": "joined", "backend": "reference", "settle_time": 0.0}
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


LEAVER = """
import itertools, numpy, aiokv
with aiokv.blocking.connect(leave_on_sigterm=True) as kv:
    kv.init("w", numpy.zeros(1))
    for step in itertools.count(kv.resume_step()):
        if kv.rank not in kv.members(step):
            break
        kv.push("w", numpy.ones(1))
        if step == 2:
            print("working")
print("left")
"""


async def test_a_job_that_is_asked_to_end_lets_its_workers_leave_before_anything_else_ends() -> None:
    """Else the workers' last steps would fail, and they would not get to their last line."""
    working: list[str] = []

    def on_show(_source: str, text: str) -> None:
        working.extend([text] if text == "working" else [])
        if text == "working" and len(working) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    job = Job(command=[sys.executable, "-c", LEAVER], workers=2, servers=1, drain=20.0)
    output = Recorder(on_show)
    outcome = await LocalLauncher(job, output, environ={**os.environ, "AIOKV_MAX_WORKERS": "3"}).run()
    assert outcome == Outcome(143, "ended by SIGTERM"), output.lines[-5:]
    ended = {facts["node"]: facts["exit_code"] for event, facts in output.notes if event == "exited"}
    assert [ended[f"worker-{number}"] for number in range(2)] == [0, 0], output.lines[-9:]
    assert [output.printed(f"worker-{number}")[-1] for number in range(2)] == ["left", "left"]


@pytest.mark.parametrize(("options", "seconds"), [([], 0.0), (["--max-workers", "3"], 30.0), (["--drain", "5"], 5.0)])
def test_how_long_workers_may_take_to_leave(
    monkeypatch: pytest.MonkeyPatch, options: list[str], seconds: float
) -> None:
    jobs: list[Job] = []

    async def run(self: LocalLauncher) -> Outcome:
        jobs.append(self._job)
        return Outcome(0)

    monkeypatch.setattr(LocalLauncher, "run", run)
    result = CliRunner().invoke(cli, ["run", "--workers", "2", *options, "--", "true"])
    assert (result.exit_code, [job.drain for job in jobs]) == (0, [seconds]), result.output
