"""A job that is started again from what it has saved, each time that it fails, until all its steps are done."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from aiokv.core.worker.reseeding import bringer
from aiokv.errors import ServerLostError
from aiokv.policy import get_policy
from sim.cluster import simulate
from sim.disk import saved_pushes
from sim.origin import Origin, remaining
from sim.record import Job, Life

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sim.record import Run
    from sim.scenario import Scenario


def simulate_job(
    scenario: Scenario,
    policy: str,
    seed: int,
    *,
    on_step: Callable[[], None] = lambda: None,
    check: bool = True,
) -> Run:
    """Return the run with which a job begins; its `job` says what became of it, if it may be started again.

    The job fails when a node crashes or a worker ends with an error: all are ended then, as by the launcher, unless it
    is a worker and the others go on without it. They are started again `restart_seconds` later, at most `restarts`
    times, with what the newest whole checkpoint of the cluster has, or the newest save if that is more; or, with
    `reseed`, with what a worker has read.

    Args:
        scenario: what is simulated.
        policy: as for `simulate`, which raises what this raises.
        seed: as for `simulate`; step i of a worker takes the same time in each life of the job.
        on_step: is called for each step that is taken.
        check: as for `simulate`.
    """
    done = dict.fromkeys(scenario.workers, 0)
    at, useful = 0.0, 0.0
    lives: list[Life] = []
    runs: list[Run] = []
    is_over = False
    while not is_over and len(lives) <= scenario.cluster.restarts:
        origin = Origin(at, done)
        run = simulate(remaining(scenario, origin), policy, seed, on_step=on_step, check=check, origin=origin)
        # What comes later is only counted.
        runs = runs or [run]
        made = {worker.name: worker.steps.answered for worker in run.workers}
        left = _left(run)
        is_over = bool(left) and all(made[name] == run.scenario.steps_of(name) for name in left)
        kept = made if is_over else brought_steps(run) or kept_steps(run)
        end = at + max(worker.ended for worker in run.workers)
        lives.append(Life(at, end, sum(done.values()), sum(made.values()), sum(kept.values()), _why(run)))
        useful += _work(run, kept)
        done = {name: done[name] + kept[name] for name in done}
        at = end + scenario.cluster.restart_seconds
    if scenario.cluster.restarts:
        seconds = lives[-1].end
        share = useful / (len(done) * seconds) if seconds else math.nan
        runs[0].job = Job(lives, seconds if is_over else math.inf, share)
    return runs[0]


def kept_steps(run: Run) -> dict[str, int]:
    """Return how many steps of each worker a job has when it goes on from what a run has saved."""
    pushes = saved_pushes(run)
    saved = run.saves[-1].steps if run.saves else 0
    most = {worker.name: run.scenario.steps_of(worker.name) for worker in run.workers}
    return {worker.name: min(most[worker.name], max(saved, pushes.get(worker.rank, 0))) for worker in run.workers}


def brought_steps(run: Run) -> dict[str, int]:
    """Return how many steps of each worker a job has when workers bring their weights to servers that begin anew.

    None where that is not so: the servers were not lost, or no worker is left.
    """
    servers, workers = run.scenario.servers, run.workers
    is_lost = run.crashed in servers or any(isinstance(worker.error, ServerLostError) for worker in workers)
    made = {worker.rank: worker.steps.answered for worker in workers if not worker.struck}
    if not (run.scenario.cluster.reseed and is_lost and made):
        return {}
    if get_policy(run.policy).in_step:
        step = made[bringer(made)]
        made = {worker.rank: step for worker in workers}
    return {worker.name: min(made.get(worker.rank, 0), run.scenario.steps_of(worker.name)) for worker in workers}


def _left(run: Run) -> list[str]:
    """Return the workers that have to take all steps: those that were lost on the way do not, where others go on."""
    shrinks = run.scenario.cluster.on_worker_loss == "shrink"
    return [worker.name for worker in run.workers if not (shrinks and (worker.struck or worker.error is not None))]


def _why(run: Run) -> str:
    """Return why a run was the last of a life of its job."""
    failed = [worker for worker in run.workers if worker.error is not None]
    if failed:
        return str(min(failed, key=lambda worker: worker.ended).error)
    return f"{run.crashed} crashed" if run.crashed else ""


def _work(run: Run, kept: Mapping[str, int]) -> float:
    """Return the seconds in which workers computed what is kept and counts."""
    return math.fsum(
        step.work
        for worker in run.workers
        for number, step in enumerate(worker.pushed[: kept[worker.name]], start=1)
        if (worker.name, number) not in run.dropped
    )
