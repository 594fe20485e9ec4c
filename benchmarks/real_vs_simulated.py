"""The simulator against a real cluster: the same policies, the same step times, on loopback.

The workers of the real cluster compute nothing: each step is a sleep, drawn from the seed as the simulator draws it.
All nodes live in this process and speak over TCP. From the first policy two constants are taken for all: how much
longer a sleep takes than it should, and what a message costs. Then mean step times and mean staleness are compared.

    python benchmarks/real_vs_simulated.py --workers 4 8 --steps 100
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import aiokv
from sim.cluster import simulate
from sim.compute import ShiftedExponential, step_times
from sim.scenario import Scenario
from sim.sections import ClusterSection, NetworkSection, TensorSection

if TYPE_CHECKING:
    from collections.abc import Sequence

POLICIES = ("asp", "bsp", "ssp:2", "backup:1", "k_async:2", "k_batch_async:2")
"""The first one gives the constants."""
SHAPE = (256,)
MOST_STEP, MOST_STALENESS = 0.07, 0.05
"""How far simulated numbers may be from real ones, as shares."""
TIMEOUT = 60.0


@dataclass(frozen=True)
class Plan:
    """What is run: seconds of a step are `shift` and an exponential time with mean `scale`."""

    workers: int
    steps: int
    seed: int
    shift: float
    scale: float


@dataclass(frozen=True)
class Constants:
    """Seconds that a sleep takes longer than it should, and that a message is under way."""

    overshoot: float = 0.0
    message: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Mean seconds of a step, mean staleness of what was applied in versions, and the share of gradients dropped."""

    step: float
    staleness: float
    dropped: float


@dataclass(frozen=True)
class Row:
    """One comparison."""

    policy: str
    workers: int
    real: Outcome
    simulated: Outcome

    @property
    def step_error(self) -> float:
        """How far the simulated step time is off, as a share of the real one."""
        return self.simulated.step / self.real.step - 1.0

    @property
    def staleness_error(self) -> float:
        """How far the simulated staleness is off, as a share of the real one; 0 when both are 0."""
        if not self.real.staleness:
            return 0.0 if not self.simulated.staleness else float("inf")
        return self.simulated.staleness / self.real.staleness - 1.0

    @property
    def ok(self) -> bool:
        """Whether both are near enough."""
        return abs(self.step_error) <= MOST_STEP and abs(self.staleness_error) <= MOST_STALENESS


# --- the real cluster ---


@dataclass(frozen=True)
class Timed:
    """Seconds of one real step: what it was to sleep, what it slept, and how long it then waited for its answer."""

    wanted: float
    slept: float
    waited: float


async def _work(address: str, settings: dict[str, Any], policy: str, plan: Plan, rank: int) -> tuple[list[Timed], Any]:
    """Take all steps as one worker, and leave; returns their times, and the tallies of all workers at that moment."""
    name, loop = f"worker-{rank}", asyncio.get_running_loop()
    law = ShiftedExponential(shift=plan.shift, scale=plan.scale)
    times = step_times(law, factor=1.0, seed=plan.seed, worker=name, rank=rank)
    gradient, out = np.ones(SHAPE, np.float32), np.empty(SHAPE, np.float32)
    done = []
    async with aiokv.connect(address, name=name, policy=policy, **settings) as kv:
        await kv.init("weights", gradient)
        for wanted in itertools.islice(times, plan.steps):
            start = loop.time()
            await asyncio.sleep(wanted)
            computed = loop.time()
            await kv.pushpull("weights", gradient, out=out)
            done.append(Timed(wanted, computed - start, loop.time() - computed))
        return done, await kv.tallies()


async def run_real(policy: str, plan: Plan) -> tuple[Outcome, list[Timed]]:
    """Run a cluster on loopback; returns the numbers to compare, and the times of all steps."""
    settings: dict[str, Any] = {"token": "loopback", "backend": "reference", "call_timeout": TIMEOUT}
    async with contextlib.AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(
            aiokv.Scheduler(num_workers=plan.workers, num_servers=1, bind_port=0, **settings)
        )
        await stack.enter_async_context(aiokv.Server(scheduler=scheduler.address, name="server-0", **settings))
        workers = [_work(scheduler.address, settings, policy, plan, rank) for rank in range(plan.workers)]
        results = await asyncio.gather(*workers)
    times = [timed for each, _ in results for timed in each]
    # The last one to leave has seen the most.
    tallies = max((tallies for _, tallies in results), key=lambda seen: sum(one.applied for one in seen.values()))
    applied = sum(one.applied for one in tallies.values())
    behind = sum(versions * count for one in tallies.values() for versions, count in one.staleness.items())
    dropped = sum(sum(one.dropped.values()) for one in tallies.values())
    step = statistics.fmean(timed.slept + timed.waited for timed in times)
    return Outcome(step, behind / max(1, applied), dropped / len(times)), times


def fit(times: Sequence[Timed]) -> Constants:
    """Take the constants from a run under a policy that lets nobody wait: there, an answer takes two messages."""
    overshoot = statistics.fmean(timed.slept - timed.wanted for timed in times)
    return Constants(overshoot, statistics.fmean(timed.waited for timed in times) / 2.0)


# --- the simulated one ---


def run_simulated(policy: str, plan: Plan, constants: Constants) -> Outcome:
    """Run the same cluster in the simulator."""
    scenario = Scenario(
        policies=(policy,),
        steps=plan.steps,
        cluster=ClusterSection(workers=plan.workers),
        # The draws are those of the real workers; every sleep is longer by the same.
        compute=ShiftedExponential(shift=plan.shift + constants.overshoot, scale=plan.scale),
        network=NetworkSection(latency=constants.message),
        tensor=(TensorSection(key="weights", shape=SHAPE),),
    )
    run = simulate(scenario, policy, plan.seed)
    steps = [step.end - step.start for worker in run.workers for step in worker.steps]
    behind = [staleness for update in run.updates for staleness in update.staleness]
    return Outcome(statistics.fmean(steps), statistics.fmean(behind), len(run.drops) / len(steps))


# --- the comparison ---


def compare(policies: Sequence[str], plans: Sequence[Plan]) -> tuple[Constants, list[Row]]:
    """Run everything, the first policy first: it gives the constants."""
    constants, rows = None, []
    for plan in plans:
        for policy in policies:
            real, times = asyncio.run(run_real(policy, plan))
            constants = constants or fit(times)
            rows.append(Row(policy, plan.workers, real, run_simulated(policy, plan, constants)))
    assert constants is not None, "there is something to run"
    return constants, rows


COLUMNS = [
    *("policy", "workers"),
    *("step (ms)", "simulated", "off"),
    *("staleness", "simulated", "off"),
    *("dropped", "simulated"),
]


def _table(constants: Constants, rows: Sequence[Row]) -> str:
    lines = [
        f"overshoot of a sleep {1e3 * constants.overshoot:.2f} ms, a message {1e3 * constants.message:.2f} ms, "
        f"from {rows[0].policy} with {rows[0].workers} workers",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for row in rows:
        real, simulated = row.real, row.simulated
        cells = [f"`{row.policy}`", f"{row.workers}"]
        cells += [f"{1e3 * real.step:.1f}", f"{1e3 * simulated.step:.1f}", f"{row.step_error:+.1%}"]
        cells += [f"{real.staleness:.3f}", f"{simulated.staleness:.3f}", f"{row.staleness_error:+.1%}"]
        cells += [f"{real.dropped:.1%}", f"{simulated.dropped:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and return 1 when a number is too far off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="the first one gives the constants")
    parser.add_argument("--steps", type=int, default=100, help="of each worker")
    parser.add_argument("--shift", type=float, default=0.02, help="seconds that every step takes at least")
    parser.add_argument("--scale", type=float, default=0.04, help="mean seconds on top, exponential")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    plans = [Plan(workers, given.steps, given.seed, given.shift, given.scale) for workers in given.workers]
    constants, rows = compare(given.policies, plans)
    if given.json:
        errors = [{"step_error": row.step_error, "staleness_error": row.staleness_error, "ok": row.ok} for row in rows]
        results = [asdict(row) | more for row, more in zip(rows, errors, strict=True)]
        print(json.dumps({"constants": asdict(constants), "results": results}, indent=2))
    else:
        print(_table(constants, rows))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
