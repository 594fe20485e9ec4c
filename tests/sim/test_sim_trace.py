"""Equal seeds give equal runs, in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import sim
from aiokv.core.effects import Refuse, Send
from aiokv.errors import WorkerLostError
from aiokv.wire.messages import Done, SetOptimizer
from sim.cluster import simulate
from sim.trace import Trace, canonical, digest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.scenario import Scenario

ROOT = Path(next(iter(sim.__path__))).parent


def traces_under(hash_seed: int, directory: Path) -> dict[str, list[str]]:
    """Run a shipped scenario in a process of its own, and return the fingerprints by policy."""
    command = "from sim.cli import sim; sim()"
    result = subprocess.run(
        [sys.executable, "-c", command, "run", "crash", "--seed", "7", "--json", "--out", str(directory)],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    return {policy: numbers["traces"] for policy, numbers in json.loads(result.stdout)["policies"].items()}


def test_equal_seeds_give_equal_traces_whatever_the_hash_seed(tmp_path: Path) -> None:
    assert traces_under(1, tmp_path) == traces_under(2, tmp_path)


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_other_seeds_give_other_traces(make_scenario: Callable[..., Scenario], policy: str) -> None:
    digests = [simulate(make_scenario(3, 5), policy, seed).digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_a_line_of_the_trace_says_all_of_an_effect() -> None:
    line = canonical(1.5, "server-0", Send(3, 12, Done(4)), digest_of)
    effect = b'{"peer":3,"request":12,"message":[4,""],"payload":null,"priority":1073741824}'
    assert line == b'[1.5,"server-0","Send Done",' + effect + b"]\n"


def test_the_order_of_a_dict_has_no_part_in_the_trace() -> None:
    one, other = (
        Send(0, 2, SetOptimizer("sgd", dict(items), "sum", 1.0))
        for items in ([("a", 1), ("b", 2)], [("b", 2), ("a", 1)])
    )
    assert canonical(0.0, "worker-0", one, digest_of) == canonical(0.0, "worker-0", other, digest_of)


def test_an_error_is_part_of_the_trace_with_its_class_and_details() -> None:
    line = canonical(0.0, "server-0", Refuse(0, 2, WorkerLostError("gone", ranks=[1])), digest_of)
    assert b'"error":["WorkerLostError","gone",{"ranks":[1]}]' in line


def test_the_digest_depends_on_the_order() -> None:
    def digest(*times: float) -> str:
        trace = Trace()
        for time in times:
            trace.decided.append((time, "server-0", [Send(0, 2, Done())]))
        return trace.digest

    assert digest(1.0, 2.0) != digest(2.0, 1.0)
