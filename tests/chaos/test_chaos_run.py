"""A real cluster whose processes are killed while it trains ends with the bits of one that nobody harms."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from aiokv.chaos.job import SHAPES
from aiokv.chaos.plan import FaultPlan, Kind
from aiokv.chaos.run import ChaosPlan, Harm, Watch, run

PLAN = ChaosPlan(
    seconds=6.0,
    workers=2,
    servers=2,
    faults=FaultPlan(kill=("worker", "server", "scheduler"), disturb=(Kind.CUT,), every=0.05, longest=0.3, seed=24),
)
"""The first faults of this seed kill a worker, the scheduler and a server, each as soon as the job has gone on after
the one before; the first comes at once, so something is killed on a slow machine, too."""


REPLICATED = ChaosPlan(
    seconds=6.0,
    workers=2,
    servers=3,
    replication=2,
    faults=FaultPlan(kill=("server",), disturb=(), every=0.05, longest=0.3, seed=1),
)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGSTOP and no SIGKILL")
@pytest.mark.parametrize("plan", [PLAN, REPLICATED], ids=["from checkpoints", "with copies"])
def test_weights_are_bit_equal_and_nothing_is_lost_after_processes_were_killed(plan: ChaosPlan) -> None:
    report = asyncio.run(run(plan))
    assert report.problems == []
    assert report.bit_equal
    assert report.lost == 0
    assert report.kills >= 1
    assert report.applied == report.steps * len(SHAPES) * plan.workers > 0
    assert not (report.resumes and plan.replication > 1), "nobody had to begin again"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGSTOP and no SIGKILL")
def test_ctrl_c_ends_the_run_and_is_no_finding() -> None:
    def interrupt(_seconds: float, _watch: Watch, _harm: Harm) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run(PLAN, interrupt))
