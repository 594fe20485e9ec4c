"""What can't be in a scenario although each key by itself has a value that it may have."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final

from aiokv.core.keys import check_key, check_kind, check_spec
from aiokv.core.merging import Merging
from aiokv.errors import AiokvError, ConfigError
from aiokv.optim import make_optimizer
from aiokv.policy import get_policy
from sim.assertions import LEARNED, OF_JOB, parse_assertion
from sim.compute import Recorded, read_trace
from sim.decoding import closest
from sim.faults import Bursts, Crash, Join, Leave, Link, Poison, Reset, Slow, Torn
from sim.problems import WORKLOADS
from sim.sections import LearningSection, StopSection
from sim.service import Service
from sim.updating import check_rule

if TYPE_CHECKING:
    from sim.faults import AnyFault
    from sim.scenario import Scenario

MAX_CHUNKS: Final = 1_000_000
"""Of all tensors together: more would take longer to simulate than anybody waits."""

HARMS: Final = ("latency", "bandwidth", "loss", "duplicate", "reorder", "clog", "cut")
"""Keys of a link of which one at least says what is wrong with it."""

Found = tuple[str, str] | None
"""The path of a key and what is wrong with it."""


def first_mistake(scenario: Scenario) -> Found:
    """Return the first thing in a scenario that can't be."""
    checks = (
        *(_check_policies, _check_changes, _check_restarts, _check_times, _check_places, _check_joins, _check_names),
        *(_check_faults, _check_tensors, _check_trace, _check_learning, _check_assertions),
    )
    return next((found for check in checks if (found := check(scenario)) is not None), None)


def _check_policies(scenario: Scenario) -> Found:
    for policy in scenario.policies:
        try:
            get_policy(policy)
        except AiokvError as error:
            return "policies", str(error)
    if len(set(scenario.policies)) < len(scenario.policies):
        return "policies", f"a policy stands there twice: {', '.join(scenario.policies)}"
    return None


def _check_changes(scenario: Scenario) -> Found:
    before = 0
    for number, change in enumerate(scenario.change):
        place = f"change[{number}]"
        try:
            policies = [get_policy(policy) for policy in (*scenario.policies, change.policy)]
        except AiokvError as error:
            return f"{place}.policy", str(error)
        if any(policy.keeps_sum for policy in policies):
            return f"{place}.policy", "keys of policy sum keep it, and no other key can get it"
        if not before < change.after < scenario.steps:
            return f"{place}.after", f"expected {before + 1} to {scenario.steps - 1}, got {change.after}"
        before = change.after
    if scenario.change and scenario.job.cancel:
        return "job.cancel", "when a gradient is too old depends on the policy; leave out [[change]]"
    keeps_places = scenario.cluster.on_worker_loss == "respawn" or scenario.cluster.min_workers > 1
    if scenario.change and keeps_places:
        return (
            "cluster.min_workers" if scenario.cluster.min_workers > 1 else "cluster.on_worker_loss",
            "a worker that comes back does not know of other policies; leave out [[change]]",
        )
    return None


def _check_restarts(scenario: Scenario) -> Found:
    stop = scenario.stop
    if not scenario.cluster.restarts:
        return None
    if scenario.cluster.on_worker_loss == "respawn":
        return (
            "cluster.restarts",
            'workers come back by themselves with on_worker_loss = "respawn"; leave one of them out',
        )
    if scenario.change:
        return "cluster.restarts", "a job that is started again begins with its first policy; leave out [[change]]"
    if scenario.learning.workload != "none":
        return "cluster.restarts", "losses are those of one run; leave out [learning]"
    if stop.updates or stop.time < StopSection().time:
        return "cluster.restarts", "a job is started again until it is done; leave out [stop]"
    return None


def _check_times(scenario: Scenario) -> Found:
    if scenario.warmup >= scenario.steps:
        return "warmup", f"expected less than steps = {scenario.steps}, got {scenario.warmup}"
    if scenario.job.save_every and scenario.job.overlap:
        return "job.save_every", "nobody may push while all save; set overlap = false"
    first = scenario.workers[0]
    if scenario.job.save_every and scenario.steps_of(first) < scenario.steps:
        return "job.save_every", f"{first} writes, so it has to take all steps; leave it out of [uneven]"
    if scenario.job.cancel and scenario.job.overlap:
        return "job.cancel", "a computation whose layers are pushed one by one can't be abandoned; set overlap = false"
    if scenario.job.between and (scenario.job.overlap or scenario.job.cancel):
        return "job.between", "with overlap or cancel a step is not one push and one pull; set it to 0"
    if scenario.job.cancel and any(tensor.group for tensor in scenario.tensor):
        return "job.cancel", "keys of different groups go through different rounds; leave the groups out"
    cluster = scenario.cluster
    if not cluster.heartbeat < cluster.death_timeout < cluster.call_timeout <= cluster.join_timeout:
        got = ", ".join(
            f"{name} = {getattr(cluster, name):g}"
            for name in ("heartbeat", "death_timeout", "call_timeout", "join_timeout")
        )
        return "cluster", f"expected heartbeat < death_timeout < call_timeout <= join_timeout, got {got}"
    return None


def _check_places(scenario: Scenario) -> Found:
    """Look at the places for parts of the keys, and at the servers that join to get some."""
    cluster, more = scenario.cluster, scenario.more_servers
    if 0 < cluster.places < cluster.servers:
        return "cluster.places", f"expected {cluster.servers} at least, one for each server, got {cluster.places}"
    place = next((number for number, fault in enumerate(scenario.fault) if isinstance(fault, Join)), 0)
    expected = [f"server-{cluster.servers + number}" for number in range(len(more))]
    if more != expected:
        return f"fault[{place}].node", f"expected {', '.join(expected)}, in the order in which they come, got {more}"
    if more and not cluster.moves:
        return "cluster.places", f"expected more than {cluster.servers}, for servers join, got {cluster.places}"
    return None


def _check_joins(scenario: Scenario) -> Found:
    """Look at the workers that come and go while others train."""
    cluster, job, comers = scenario.cluster, scenario.job, scenario.comers
    expected = [f"worker-{cluster.workers + number}" for number in range(len(comers))]
    place = next((number for number, fault in enumerate(scenario.fault) if isinstance(fault, Join)), 0)
    if comers != expected:
        return f"fault[{place}].node", f"expected {', '.join(expected)}, in the order in which they come, got {comers}"
    if comers and cluster.workers + len(comers) > cluster.max_workers:
        most = cluster.workers + len(comers)
        return "cluster.max_workers", f"expected {most}, for that many workers are there, got {cluster.max_workers}"
    moves = comers or any(isinstance(fault, Leave) for fault in scenario.fault)
    for path, is_set in (
        ("cluster.restarts", cluster.restarts),
        ("job.cancel", job.cancel),
        ("job.overlap", job.overlap),
        ("job.save_every", job.save_every),
        ("learning.workload", scenario.learning.workload != "none"),
    ):
        if moves and is_set:
            return path, "the workers are the same from the beginning to the end there; leave out joins and leaves"
    changed = (change.policy for change in scenario.change)
    for policy in (get_policy(text) for text in (*scenario.policies, *changed)):
        if comers and not policy.admits:
            return "policies", f"nobody can join a running job with {policy}; leave out the joins"
    return None


def _check_names(scenario: Scenario) -> Found:
    for table, workers in (("slow", list(scenario.slow)), ("uneven", list(scenario.uneven))):
        for name in workers:
            if name not in scenario.workers:
                last = scenario.workers[-1]
                hint = closest(name, scenario.workers)
                return f"{table}.{name}", f"no such worker{hint}; there are worker-0 to {last}"
    for name, steps in scenario.uneven.items():
        if steps > scenario.steps:
            return f"uneven.{name}", f"expected at most steps = {scenario.steps}, got {steps}"
    return None


def _check_faults(scenario: Scenario) -> Found:
    for number, fault in enumerate(scenario.fault):
        found = _in_fault(scenario, fault)
        if found is not None:
            return f"fault[{number}].{found[0]}", found[1]
    return None


def _in_fault(scenario: Scenario, fault: AnyFault) -> Found:
    """Return the key of a fault that can't be, or that would change nothing, and what is wrong with it."""
    for field in ("node", "to") if isinstance(fault, Link | Reset) else ("node",):
        try:
            scenario.select(getattr(fault, field))
        except ConfigError as error:
            return field, str(error)
    nodes = scenario.select(fault.node)
    workers = [name for name in nodes if name in scenario.workers]
    if isinstance(fault, Torn) and not set(nodes) <= set(scenario.servers):
        return "node", f"expected servers, got {fault.node!r}"
    if isinstance(fault, Poison | Leave) and len(workers) < len(nodes):
        return "node", f"expected workers, got {fault.node!r}"
    match fault:
        case Poison(step=after) | Leave(after=after):
            field = "step" if isinstance(fault, Poison) else "after"
            steps = max(map(scenario.steps_of, workers), default=0)
            return (field, f"{fault.node!r} takes only {steps} steps, got {after}") if after > steps else None
        case Slow() | Bursts():
            return _in_slow(scenario, fault, nodes)
        case Crash(restart=None, times=times) if times > 1:
            return "times", f"who is not started again crashes once, got {times}; set restart"
        case Link() | Reset():
            return _in_link(scenario, fault, nodes)
    return None


def _in_slow(scenario: Scenario, fault: Slow | Bursts, nodes: list[str]) -> Found:
    takes_time = Service(scenario.server).takes_time
    if not any(name in scenario.workers or (name in scenario.servers and takes_time) for name in nodes):
        hint = "; servers take no time here, see [server]" if set(nodes) & set(scenario.servers) else ""
        return "node", f"expected nodes that compute, got {fault.node!r}{hint}"
    if isinstance(fault, Slow) and fault.shape == "ramp" and math.isinf(fault.duration):
        return "duration", "expected the seconds until a ramp has reached its factor, got inf"
    return None


def _in_link(scenario: Scenario, fault: Link | Reset, nodes: list[str]) -> Found:
    if {(node, other) for node in nodes for other in scenario.select(fault.to)} <= {(node, node) for node in nodes}:
        return "to", f"expected another node than {fault.node!r}, got {fault.to!r}"
    harmless = Link(node=fault.node, to=fault.to)
    if isinstance(fault, Link) and all(getattr(fault, name) == getattr(harmless, name) for name in HARMS):
        return "kind", f"says nothing that is wrong with the way; expected one of {', '.join(HARMS)}"
    return None


def _check_tensors(scenario: Scenario) -> Found:
    kind: type | None = None
    chunks = 0
    seen: list[str | int] = []
    if scenario.tensor and all(tensor.group for tensor in scenario.tensor):
        idle = set(range(scenario.cluster.workers)).difference(*(tensor.group for tensor in scenario.tensor))
        if idle:
            return "tensor", f"expected that every worker has a tensor, but rank {min(idle)} is in no group"
    for number, tensor in enumerate(scenario.tensor):
        try:
            kind = check_kind(check_key(tensor.key), kind)
            check_spec(tensor.key, tensor.spec)
        except AiokvError as error:
            return f"tensor[{number}]", str(error)
        chunks += -(-tensor.spec.nbytes // scenario.cluster.chunk_bytes)
        if chunks > MAX_CHUNKS:
            text = f"expected at most {MAX_CHUNKS:,} chunks of all tensors together, got {chunks:,}"
            return f"tensor[{number}].shape", f"{text} with cluster.chunk_bytes = {scenario.cluster.chunk_bytes:,}"
        if tensor.key in seen:
            return f"tensor[{number}].key", f"key {tensor.key!r} stands there twice"
        if tensor.group and max(tensor.group) >= scenario.cluster.workers:
            last = scenario.cluster.workers - 1
            return f"tensor[{number}].group", f"expected ranks from 0 to {last}, got {list(tensor.group)}"
        seen.append(tensor.key)
    return None


def _check_trace(scenario: Scenario) -> Found:
    if not isinstance(scenario.compute, Recorded):
        return None
    try:
        rows = read_trace(scenario.compute)
    except ConfigError as error:
        return "compute.file", str(error)
    if len(rows) < scenario.cluster.workers:
        return "cluster.workers", f"expected at most the trace's {len(rows)} workers, got {scenario.cluster.workers}"
    if len(rows[0]) < scenario.steps:
        return "steps", f"expected at most the trace's {len(rows[0])} steps, got {scenario.steps}"
    return None


def _check_learning(scenario: Scenario) -> Found:
    learning = scenario.learning
    if learning.workload == "none" and learning != LearningSection():
        return "learning.workload", f"is missing; expected {', '.join(WORKLOADS[1:])} or module:function"
    if learning.workload not in WORKLOADS and not re.fullmatch(r"[\w.]+:\w+", learning.workload):
        hint = closest(learning.workload, WORKLOADS)
        expected = f"{', '.join(WORKLOADS)} or module:function"
        return "learning.workload", f"expected {expected}, got {learning.workload!r}{hint}"
    try:
        rule = make_optimizer(learning.optimizer, learning.params)
        Merging(learning.reduction, learning.staleness_rate).check(rule)
        check_rule(rule)
    except AiokvError as error:
        return "learning.optimizer", str(error)
    return None


def _check_assertions(scenario: Scenario) -> Found:
    for number, text in enumerate(scenario.assertions):
        try:
            metric = parse_assertion(text, scenario.policies).metric
        except ConfigError as error:
            return f"assertions[{number}]", str(error)
        if metric in LEARNED and scenario.learning.workload == "none":
            return f"assertions[{number}]", f"{metric!r} needs a workload: set learning.workload"
        if metric in OF_JOB and not scenario.cluster.restarts:
            return f"assertions[{number}]", f"{metric!r} needs a job that is started again: set cluster.restarts"
        if metric.endswith("_to_target") and scenario.learning.target_loss is None:
            return f"assertions[{number}]", f"{metric!r} needs a target: set learning.target_loss"
    return None
