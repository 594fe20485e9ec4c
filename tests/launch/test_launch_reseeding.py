"""All servers are lost: the launcher starts them again, and the workers bring their weights."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from aiokv.launch import Job, Outcome
from aiokv.launch.supervisor import Recovery
from tests.launch.fake_nodes import Recorder, launch

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="servers are killed by a POSIX signal")

# With an argument worker-1 is done after so many steps, and worker-0 goes on when a server is lost.
WORKER = """
import sys, numpy, aiokv

kv = aiokv.blocking.connect()
kv.start()
weights, fresh = numpy.zeros((2, 40_000), numpy.float32)
kv.init("w", weights)
kv.set_optimizer("sgd", learning_rate=1.0)
alone = int(sys.argv[1]) if len(sys.argv) > 1 else 0
step, went_on = 0, False
while step < (alone if kv.rank == 1 and alone else 8):
    try:
        while step == alone > 0 and not went_on:
            kv.pull("w", out=fresh)
        kv.pushpull("w", numpy.full(40_000, 2.0**step * (1 + kv.rank), numpy.float32), out=fresh)
        weights, fresh = fresh, weights
        step += 1
        print("step", step)
    except aiokv.errors.ServerLostError:
        kv.rejoin()
        step = kv.reseed({"w": weights}, step).step
        kv.set_optimizer("sgd", learning_rate=1.0)
        print("goes on")
        went_on = True
kv.close()
print("weights", *sorted(set(weights.tolist())))
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, killed_at: str) -> tuple[Outcome, Recorder]:
    """Run two workers; kill a server when some words are shown for the first time."""
    said: list[str] = []

    def on_show(_source: str, text: str) -> None:
        said.append(text)
        if text == killed_at and said.count(text) == 1:
            for event, facts in output.notes:
                if event == "started" and facts["node"] == "server-1":
                    os.kill(facts["pid"], signal.SIGKILL)

    output = Recorder(on_show)
    recovery = Recovery(restarts=1, reseeds=True)
    command = [sys.executable, "-c", WORKER, *arguments]
    job = Job(command=command, workers=2, servers=2, recovery=recovery)
    settings = {"heartbeat": "0.2", "death_timeout": "1.0", "reconnect_grace": "0.1", "backend": "reference"}
    for name, value in settings.items():
        monkeypatch.setenv(f"AIOKV_{name.upper()}", value)
    outcome, _ = launch(job, output)
    return outcome, output


def test_scenario_72_a_job_one_of_whose_servers_is_killed_ends_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of both workers are 3 times the powers of two, which are taken off: -3 * (2**8 - 1) in the end."""
    outcome, output = run(monkeypatch, killed_at="step 3")
    assert outcome == Outcome(0), output.lines[-9:]
    for worker in ("worker-0", "worker-1"):
        assert output.printed(worker).count("goes on") == 1
        assert output.printed(worker)[-1] == "weights -765.0"
    assert ("reseeding", {"left": 0}) in output.notes


def test_a_job_goes_on_with_the_weights_of_those_that_are_not_done_when_a_server_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two steps are 3 times the powers of two, the last six once: -(3 * 3 + 252) in the end."""
    outcome, output = run(monkeypatch, "2", killed_at="worker-1 is done")
    assert outcome == Outcome(0), output.lines[-9:]
    assert output.printed("worker-1")[-1] == "weights -9.0"
    assert output.printed("worker-0").count("goes on") == 1
    assert output.printed("worker-0")[-1] == "weights -261.0"
