"""What has to come of a run once all that was wrong with it has healed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from aiokv.errors import (
    CallTimeoutError,
    ClosedError,
    JoinTimeoutError,
    MembershipError,
    ServerLostError,
    StaleEpochError,
    UnknownKeyError,
)
from aiokv.policy import get_policy
from sim.faults import (
    Bursts,
    Crash,
    Fault,
    Hang,
    HeartbeatLoss,
    Join,
    Late,
    Leave,
    Link,
    Pause,
    Poison,
    Reset,
    Slow,
    Spot,
    Torn,
)
from sim.sections import SCHEDULER

if TYPE_CHECKING:
    from sim.record import Run, WorkerRecord
    from sim.scenario import Scenario

FAIR_ENDS = (MembershipError, CallTimeoutError, ClosedError)
"""Errors with which a worker may end when nodes are lost: they name who, or what took too long."""


RECONNECTION = 0.5
"""Seconds in which a connection that has ended is there again, where nothing else goes wrong."""

HOLD_UP = (Bursts, Link, Pause, Slow)
"""Faults that may keep a worker busy without anybody taking it for lost."""

LOOKING = 1.5
"""Seconds in which all nodes have found a scheduler that is there again, and it knows them."""


def lost_time(scenario: Scenario) -> float:
    """Return for how many seconds all faults together can keep nodes from hearing of each other; inf: for good."""
    total = 0.0
    for fault in scenario.fault:
        match fault:
            case Crash(restart=float(restart), times=times) if fault.node == SCHEDULER:
                # Nodes look for it once a second, and have to hear of each other from the new one.
                total += times * (restart + LOOKING)
            case Crash() | Hang() | Spot():
                return math.inf
            case Leave() if scenario.cluster.min_workers > 1:
                # The others may wait for somebody in its place.
                return math.inf
            case Link(clog=clog, cut=cut, duration=duration, latency=latency):
                total += latency + (duration if clog or cut else 0.0)
            case Pause(duration=duration) | HeartbeatLoss(duration=duration):
                total += duration
            case Reset(times=times):
                total += RECONNECTION * times
            case Slow() | Bursts() | Late() | Poison() | Torn() | Join() | Leave():
                pass
    return total


def heals(run: Run) -> bool:
    """Say whether all that goes wrong in a run is over before anybody has to be given up.

    Of every time-out half is left for messages that are sent again, and for how the others are late because of it.
    """
    cluster = run.scenario.cluster
    longest = max((step.computed - step.start for worker in run.workers for step in worker.steps), default=0.0)
    if run.changes:
        # Who asks for another policy waits until the slowest has come as far.
        longest = max(worker.ended - worker.begun for worker in run.workers)
    late = max((fault.at for fault in run.scenario.fault if isinstance(fault, Late)), default=0.0)
    gone = lost_time(run.scenario)
    return (
        gone + cluster.heartbeat <= cluster.death_timeout / 2
        and longest + gone <= cluster.call_timeout / 2
        and late + gone <= cluster.join_timeout / 2
    )


def _is_complete(run: Run, worker: WorkerRecord) -> bool:
    return (worker.error is None and run.is_through(worker)) or _came_too_late(run, worker)


def _came_too_late(run: Run, worker: WorkerRecord) -> bool:
    """Say whether a worker has not come to join because the job was over by then."""
    is_over = isinstance(worker.error, JoinTimeoutError | ServerLostError)
    return worker.name in run.scenario.comers and is_over and not worker.number


def lacking_progress(run: Run) -> list[str]:
    """Return what should have come to a good end and has not, in sentences.

    - When all faults heal in time, every worker takes all its steps.
    - Otherwise a worker takes all its steps, is ended by a fault, or is told who is lost or what took too long.
    - Where no update waits for others, workers to which nothing happens take all their steps although others are lost.
    - When all workers have ended, so do the others.

    What became of who was there in the beginning of another cluster is not known.
    """
    found: list[str] = []
    if run.begun_anew:
        return found
    bystanders = _bystanders(run)
    for worker in run.workers:
        if _is_complete(run, worker):
            continue
        done = worker.steps.answered
        how = "was ended by a fault" if worker.struck else f"ended with {worker.error!r}"
        text = f"{worker.name} {how} after {done} of {run.scenario.steps_of(worker.name)} steps"
        if heals(run):
            found.append(f"{text}, although all faults heal in time")
        elif worker.name in bystanders:
            found.append(f"{text}, although nothing happened to it and no update waits for others")
        elif not worker.struck and not isinstance(worker.error, FAIR_ENDS) and not _never_came(run, worker):
            found.append(f"{text}; that is no reason which faults can give")
    left = [name for name in run.unstopped if heals(run) or not _may_stay(run, name)]
    return [*found, *(f"{name} goes on, although all workers have ended" for name in left)]


def _never_came(run: Run, worker: WorkerRecord) -> bool:
    """Say whether a worker was told of a key that is not there because who was to bring it has got lost."""
    if not isinstance(worker.error, UnknownKeyError):
        return False
    groups = {tensor.key: tensor.group for tensor in run.scenario.tensors}
    key = worker.error.details.get("key")
    if key not in groups:
        # It has no key at all.
        return False
    group = groups[key]
    root = group[0] if group else 0
    bringer = next((other for other in run.workers if other.rank == root), None)
    return bringer is None or bringer.struck or isinstance(bringer.error, StaleEpochError)


def _bystanders(run: Run) -> list[str]:
    """Return the workers that must get through because only other workers are hit."""
    scenario = run.scenario
    if run.changes or scenario.job.save_every:
        return []
    policy = get_policy(run.policy)
    waits_for_nobody = (policy.per_step or policy.name == "asp") and not scenario.job.barrier_every
    if scenario.job.overlap and policy.decides:
        # A step is several calls. Where one of them is in a round, so are the others, and wait for who is away or slow.
        is_held_up = scenario.cluster.min_workers > 1 or any(isinstance(one, HOLD_UP) for one in scenario.fault)
        waits_for_nobody = waits_for_nobody and not is_held_up
    if not waits_for_nobody and not _goes_on(run):
        return []
    if not all(worker.steps for worker in run.workers):
        # To join and to initialise they need each other.
        return []
    hit: set[str] = set()
    for fault in scenario.fault:
        if isinstance(fault, Torn):
            # It happens to files.
            continue
        nodes = scenario.select(fault.node)
        if isinstance(fault, Link | Reset):
            # It is as bad for a worker as if it stood at either end.
            ends = {*nodes, *scenario.select(fault.to)}
            nodes = [name for name in ends if name in scenario.workers] or list(ends)
        hit.update(nodes)
    if not hit <= set(scenario.workers):
        return []
    return [name for name in scenario.workers if name not in hit]


def _goes_on(run: Run) -> bool:
    """Say whether the others go on soon enough when any of the workers is lost."""
    cluster = run.scenario.cluster
    if cluster.on_worker_loss != "shrink" or cluster.min_workers > 1:
        return False
    if any(isinstance(fault, Link | Slow | Bursts | Late) for fault in run.scenario.fault):
        # These hold up everybody, without anybody being lost.
        return False
    longest = max((step.computed - step.start for worker in run.workers for step in worker.steps), default=0.0)
    stops = sum(fault.times * fault.duration for fault in run.scenario.fault if isinstance(fault, Pause))
    return longest + stops + cluster.death_timeout + cluster.heartbeat < cluster.call_timeout


def _may_stay(run: Run, name: str) -> bool:
    """Say whether a node may go on when nodes are lost.

    A scheduler listens until its cluster is complete, and a server without a scheduler serves its workers until they
    leave, also one that has fallen silent.
    """
    never_complete = any(worker.rank < 0 for worker in run.workers)
    if name == SCHEDULER and never_complete:
        return True
    # A standby is in the process of a server, with whose name its own begins.
    ends = (name.partition("/")[0], SCHEDULER)
    return any(_hits(run.scenario, fault, end) for fault in run.scenario.fault for end in ends)


def _hits(scenario: Scenario, fault: Fault, name: str) -> bool:
    ends = scenario.select(fault.node)
    if isinstance(fault, Link | Reset):
        ends = [*ends, *scenario.select(fault.to)]
    return name in ends
