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

WORKER = """
import numpy, aiokv

kv = aiokv.blocking.connect()
kv.start()
weights, fresh = numpy.zeros((2, 40_000), numpy.float32)
kv.init("w", weights)
kv.set_optimizer("sgd", learning_rate=1.0)
step = 0
while step < 8:
    try:
        kv.pushpull("w", numpy.full(40_000, 2.0**step * (1 + kv.rank), numpy.float32), out=fresh)
        weights, fresh = fresh, weights
        step += 1
        print("step", step)
    except aiokv.errors.ServerLostError:
        kv.rejoin()
        step = kv.reseed({"w": weights}, step).step
        kv.set_optimizer("sgd", learning_rate=1.0)
        print("goes on")
kv.close()
print("weights", *sorted(set(weights.tolist())))
"""


def test_scenario_72_a_job_one_of_whose_servers_is_killed_ends_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of both workers are 3 times the powers of two, which are taken off: -3 * (2**8 - 1) in the end."""
    said: list[str] = []

    def on_show(_source: str, text: str) -> None:
        said.append(text)
        if text == "step 3" and said.count(text) == 1:
            for event, facts in output.notes:
                if event == "started" and facts["node"] == "server-1":
                    os.kill(facts["pid"], signal.SIGKILL)

    output = Recorder(on_show)
    recovery = Recovery(restarts=1, reseeds=True)
    job = Job(command=[sys.executable, "-c", WORKER], workers=2, servers=2, recovery=recovery)
    settings = {"heartbeat": "0.2", "death_timeout": "1.0", "reconnect_grace": "0.1", "backend": "reference"}
    for name, value in settings.items():
        monkeypatch.setenv(f"AIOKV_{name.upper()}", value)
    outcome, _ = launch(job, output)
    assert outcome == Outcome(0), output.lines[-9:]
    for worker in ("worker-0", "worker-1"):
        assert output.printed(worker).count("goes on") == 1
        assert output.printed(worker)[-1] == "weights -765.0"
    assert ("reseeding", {"left": 0}) in output.notes
