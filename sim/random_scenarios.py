"""Small scenarios drawn at random, in which much goes wrong: what the fuzzer runs."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

import msgspec

from aiokv.errors import PolicyError
from aiokv.policy import get_policy, policy_names
from sim import faults as f
from sim.compute import Constant, Erlang, Exponential, Normal, Pareto, ShiftedExponential
from sim.scenario import Scenario
from sim.sections import (
    SCHEDULER,
    ChangeSection,
    ClusterSection,
    JobSection,
    LearningSection,
    NetworkSection,
    ServerSection,
    TensorSection,
)

if TYPE_CHECKING:
    from sim.compute import Law

HEARTBEAT: Final = 1.0
DEATH: Final = 6.0
CALL: Final = 20.0
JOIN: Final = 30.0

STEP: Final = 0.5
"""Mean seconds of a step; faults come within the first `SPAN` seconds."""
SPAN: Final = 5.0
COMMON: Final = ("asp", "asp", "bsp", "sum")
"""Policies that are drawn as often as all together."""

UNMEETING: Final = ("adasync", "backup", "k_async", "k_sync", "quorum")
"""Policies under which a push may have to wait for workers that wait at a barrier already."""

DTYPES: Final = ("float32", "float64", "int32")


def random_scenario(seed: int) -> Scenario:
    """Return the scenario of a seed: the same everywhere.

    Half of them are mild: whatever happens is over before anybody has to be given up. In the others nodes die.
    """
    stream = random.Random(f"{seed}:fuzz")
    workers, servers = stream.choice((1, 2, 2, 3, 3, 4, 5)), stream.choice((1, 1, 2, 3))
    steps = stream.randint(1, 8)
    overlap = _happens(stream, 0.2)
    mild = _happens(stream, 0.5)
    policy = _policy(stream, workers, steps)
    meets = not overlap and policy.split(":")[0] not in UNMEETING
    cluster = ClusterSection(
        workers=workers,
        servers=servers,
        racks=stream.choice((1, 1, 2)),
        heartbeat=HEARTBEAT,
        death_timeout=DEATH,
        call_timeout=CALL,
        join_timeout=JOIN,
        chunk_bytes=64,
        split_bytes=stream.choice((32, 64)),
    )
    scenario = Scenario(
        name=f"fuzz-{seed}",
        title=f"drawn from seed {seed}",
        policies=(policy,),
        steps=steps,
        cluster=cluster,
        compute=_law(stream, mild=mild),
        uneven=_uneven(stream, workers, steps),
        network=_network(stream),
        server=_server(stream),
        job=JobSection(
            overlap=overlap,
            separate=_happens(stream, 0.4),
            barrier_every=stream.choice((0, 0, 1, 2)) if meets else 0,
            linger=stream.choice((0.0, CALL + DEATH)),
        ),
        tensor=_tensors(stream, workers),
        # It goes by the loss.
        learning=LearningSection(workload="quadratic" if policy.startswith("adasync") else "none"),
    )
    scenario = msgspec.structs.replace(scenario, cluster=_checkpoints(cluster, seed))
    count = stream.choice((0, 1, 1, 2, 3))
    draw = _mild if mild else _harsh
    drawn = [draw(stream, scenario, count) for _ in range(count)]
    made = msgspec.structs.replace(scenario, fault=tuple(drawn), change=_changes(seed, scenario))
    grace = random.Random(f"{seed}:grace").choice((0.0, 0.0, 1.0))
    made = msgspec.structs.replace(made, cluster=msgspec.structs.replace(made.cluster, reconnect_grace=grace))
    made = _shrinking(random.Random(f"{seed}:shrink"), _saving(seed, made))
    made = _respawning(random.Random(f"{seed}:respawn"), _tearing(seed, made))
    made = _parting_servers(random.Random(f"{seed}:servers"), made)
    made = _joining(random.Random(f"{seed}:join"), made)
    made = _copying(random.Random(f"{seed}:copies"), made)
    made = _spreading(random.Random(f"{seed}:places"), made)
    made = _losing_the_scheduler(random.Random(f"{seed}:scheduler"), made)
    return _working_between(random.Random(f"{seed}:between"), made)


def _joining(stream: random.Random, scenario: Scenario) -> Scenario:
    """Let workers join and leave while others train, in some scenarios."""
    cluster, job = scenario.cluster, scenario.job
    policies = (*scenario.policies, *(change.policy for change in scenario.change))
    fixed = job.overlap or job.save_every or job.cancel or cluster.restarts
    # What is trained is dealt to workers that are the same from the beginning to the end.
    fixed = fixed or scenario.learning.workload != "none"
    # Who comes can't tell which of two times it is if the policy is the same again.
    admits = all(get_policy(policy).admits for policy in policies) and len(set(policies)) == len(policies)
    if fixed or not admits or not _happens(stream, 0.4):
        return scenario
    count = stream.choice((1, 1, 2))
    times = sorted(round(stream.uniform(0.1, SPAN), 3) for _ in range(count))
    names = [f"worker-{cluster.workers + number}" for number in range(count)]
    faults: list[f.AnyFault] = [f.Join(node=name, at=at) for name, at in zip(names, times, strict=True)]
    if _happens(stream, 0.5):
        leaver = stream.choice((*names, *scenario.workers[1:])) if cluster.workers > 1 else names[0]
        leave = f.Leave(node=leaver, after=stream.randint(1, 3), planned=_happens(stream, 0.6))
        faults += [leave] if leave.after <= scenario.steps_of(leaver) else []
    cluster = msgspec.structs.replace(cluster, max_workers=cluster.workers + count)
    # Nobody learns where workers come and go.
    learning = LearningSection()
    return msgspec.structs.replace(scenario, cluster=cluster, fault=(*scenario.fault, *faults), learning=learning)


def _copying(stream: random.Random, scenario: Scenario) -> Scenario:
    """Let every parameter be on two servers in some scenarios where it may be; in half of these a server crashes."""
    cluster = scenario.cluster
    policies = (*scenario.policies, *(change.policy for change in scenario.change))
    may_be = len(scenario.servers) > 1 and not cluster.restarts
    # Few are drawn under which workers go on before their push is in a value.
    often = 0.3 if all(get_policy(policy).waits for policy in policies) else 0.7
    if not may_be or not _happens(stream, often):
        return scenario
    cluster = msgspec.structs.replace(cluster, replication=2)
    scenario = msgspec.structs.replace(scenario, cluster=cluster)
    if _happens(stream, 0.5):
        return scenario
    at, restart = round(stream.uniform(STEP, SPAN), 3), stream.choice((None, STEP, 4.0 * STEP))
    crash = f.Crash(node=stream.choice(scenario.servers), at=at, restart=restart)
    workers = [one for one in scenario.fault if isinstance(one, f.Crash) and one.node in scenario.workers]
    if workers and _happens(stream, 0.7):
        # Both are lost in the same step.
        at = max(STEP, round(stream.choice(workers).at + stream.uniform(-STEP / 3, STEP), 3))
        crash = msgspec.structs.replace(crash, at=at)
    return msgspec.structs.replace(scenario, fault=(*scenario.fault, crash))


def _spreading(stream: random.Random, scenario: Scenario) -> Scenario:
    """Cut keys for more places than there are servers, in some scenarios; in some of these servers join."""
    cluster = scenario.cluster
    if cluster.restarts or not _happens(stream, 0.2):
        return scenario
    cluster = msgspec.structs.replace(cluster, places=cluster.servers + stream.randint(1, 3))
    count = stream.choice((0, 1, 1, 2))
    times = sorted(round(stream.uniform(STEP, SPAN), 3) for _ in range(count))
    joins = [f.Join(node=f"server-{cluster.servers + number}", at=at) for number, at in enumerate(times)]
    return msgspec.structs.replace(scenario, cluster=cluster, fault=(*scenario.fault, *joins))


def _losing_the_scheduler(stream: random.Random, scenario: Scenario) -> Scenario:
    """Let the scheduler crash in some scenarios, and be started again in most of these."""
    if not _happens(stream, 0.2):
        return scenario
    at, restart = _at(stream), stream.choice((None, 0.1, 0.1, 1.0, 1.0, 8.0))
    times = 1 if restart is None else stream.choice((1, 1, 2))
    crash = f.Crash(node=SCHEDULER, at=at, restart=restart, times=times, every=3.0)
    return msgspec.structs.replace(scenario, fault=(*scenario.fault, crash))


def _tearing(seed: int, scenario: Scenario) -> Scenario:
    """Let files of checkpoints be torn, in some scenarios; drawn from a stream of their own."""
    stream, cluster = random.Random(f"{seed}:torn"), scenario.cluster
    if not (cluster.checkpoint_every or cluster.checkpoint_seconds) or not _happens(stream, 0.3):
        return scenario
    node, noticed = stream.choice(scenario.servers), _happens(stream, 0.5)
    torn = f.Torn(node=node, at=_at(stream), duration=SPAN, noticed=noticed)
    return msgspec.structs.replace(scenario, fault=(*scenario.fault, torn))


def _shrinking(stream: random.Random, scenario: Scenario) -> Scenario:
    """Let the others go on without lost workers in some scenarios; half of these lose some in the middle of a push."""
    if not _happens(stream, 0.4):
        return scenario
    least = stream.choice((1, 1, min(2, scenario.cluster.workers)))
    if scenario.change:
        # Who takes a lost worker's place does not know of other policies.
        least = 1
    cluster = msgspec.structs.replace(
        scenario.cluster, on_worker_loss="shrink", min_workers=least, respawn_timeout=DEATH
    )
    scenario = msgspec.structs.replace(scenario, cluster=cluster)
    if _happens(stream, 0.5):
        return scenario
    times = [round(stream.uniform(STEP, SPAN), 3) for _ in range(stream.randint(1, 2))]
    crashes = [f.Crash(node=stream.choice(scenario.workers), at=at) for at in times]
    network = msgspec.structs.replace(scenario.network, bandwidth=stream.choice((2_000.0, 8_000.0)))
    return msgspec.structs.replace(scenario, network=network, fault=tuple(crashes))


def _respawning(stream: random.Random, scenario: Scenario) -> Scenario:
    """Let a worker die and come back into its place in some scenarios, and connections end around that time."""
    cluster, job = scenario.cluster, scenario.job
    steps_alone = not (job.overlap or job.barrier_every or job.save_every or scenario.change)
    saves = cluster.checkpoint_every or cluster.checkpoint_seconds or cluster.restarts
    if cluster.on_worker_loss != "fail" or saves or not steps_alone or not _happens(stream, 0.3):
        return scenario
    at, restart = round(stream.uniform(STEP, SPAN), 3), stream.choice((0.0, 0.1, 1.0, DEATH / 2))
    faults: list[f.AnyFault] = [f.Crash(node=stream.choice(scenario.workers), at=at, restart=restart)]
    if _happens(stream, 0.5):
        faults.append(f.Reset(node="workers", to="servers", at=at, times=2, every=STEP))
    cluster = msgspec.structs.replace(cluster, on_worker_loss="respawn", respawn_timeout=DEATH)
    return msgspec.structs.replace(scenario, cluster=cluster, fault=tuple(faults))


def _parting_servers(stream: random.Random, scenario: Scenario) -> Scenario:
    """Let the connections between servers end, or be cut for a while, in some scenarios with several."""
    if len(scenario.servers) == 1 or not _happens(stream, 0.4):
        return scenario
    at = round(stream.uniform(0.0, SPAN), 3)
    faults: list[f.AnyFault] = [
        f.Reset(node="servers", to="server-0", at=at, times=stream.choice((1, 2)), every=STEP / 3),
        f.Link(node="servers", to="servers", cut=True, at=at, duration=round(stream.uniform(0.1, 1.0), 3)),
    ]
    return msgspec.structs.replace(scenario, fault=(*scenario.fault, stream.choice(faults)))


def _changes(seed: int, scenario: Scenario) -> tuple[ChangeSection, ...]:
    """Return changes of the policy, in some scenarios; from a stream of their own."""
    stream = random.Random(f"{seed}:change")
    last = scenario.steps - 1
    if not last or not _happens(stream, 0.2):
        return ()
    steps = sorted(stream.sample(range(1, scenario.steps), stream.randint(1, min(2, last))))
    policies = [_policy(stream, scenario.cluster.workers, scenario.steps) for _ in steps]
    names = [policy.split(":")[0] for policy in policies]
    if "sum" in (*names, *scenario.policies) or (scenario.job.barrier_every and set(names) & set(UNMEETING)):
        return ()
    return tuple(ChangeSection(after=after, policy=policy) for after, policy in zip(steps, policies, strict=True))


def _saving(seed: int, scenario: Scenario) -> Scenario:
    """Let all workers save together, in some scenarios; drawn from a stream of their own."""
    stream, job = random.Random(f"{seed}:save"), scenario.job
    policies = (*scenario.policies, *(change.policy for change in scenario.change))
    meets = not job.overlap and not {policy.split(":")[0] for policy in policies} & set(UNMEETING)
    if not _happens(stream, 0.2) or not meets or scenario.workers[0] in scenario.uneven:
        return scenario
    job = msgspec.structs.replace(job, save_every=stream.choice((1, 2)), save_bandwidth=stream.choice((1e3, 1e9)))
    return msgspec.structs.replace(scenario, job=job)


def _checkpoints(cluster: ClusterSection, seed: int) -> ClusterSection:
    """Let there be checkpoints in half of the scenarios."""
    stream = random.Random(f"{seed}:checkpoints")
    if _happens(stream, 0.5):
        return cluster
    return msgspec.structs.replace(
        cluster,
        checkpoint_every=stream.choice((0, 1, 2, 3)),
        checkpoint_seconds=stream.choice((0.0, STEP, 3.0 * STEP)),
        checkpoint_write=stream.choice((0.0, 0.01, 4.0 * STEP)),
    )


def _working_between(stream: random.Random, scenario: Scenario) -> Scenario:
    """Let workers do something between push and pull, where these are one call for all keys otherwise."""
    job = scenario.job
    if job.overlap or job.cancel or not _happens(stream, 0.25):
        return scenario
    job = msgspec.structs.replace(job, between=stream.choice((0.1, 0.5)))
    return msgspec.structs.replace(scenario, job=job)


def _policy(stream: random.Random, workers: int, steps: int) -> str:
    """Return a policy and its options."""
    name = stream.choice(COMMON if _happens(stream, 0.5) else policy_names())
    small, k = stream.randint(0, 2), stream.randint(1, workers)
    options = {
        "adasync": f"{stream.choice((1, 3))}",
        "backup": f"{stream.randint(0, workers - 1)}",
        "dssp": f"{small}:{small + stream.randint(0, 2)}",
        "quorum": f"{k}:{stream.choice((0.0, STEP / 2, 3.0 * STEP))}:{stream.choice((0, 1, 2))}",
        "pssp": f"{stream.randint(0, workers)}:{small}",
        "ringmaster": f"{stream.randint(1, 2 * workers)}",
        "sync_switch": f"{stream.choice((0.0, 0.5, 1.0))}:{steps}",
        **dict.fromkeys(("k_async", "k_sync", "k_batch_async", "k_batch_sync"), f"{k}"),
        **dict.fromkeys(("essp", "ssp"), f"{small}"),
        "pbsp": f"{stream.randint(0, workers)}",
    }
    try:
        return str(get_policy(f"{name}:{options[name]}" if name in options else name))
    except PolicyError:
        # One of somebody else, with options that nobody knows here.
        return "bsp"


def _happens(stream: random.Random, probability: float) -> bool:
    return stream.random() < probability


def _law(stream: random.Random, *, mild: bool) -> Law:
    # The longer ones are still at work when somebody is given up.
    step = STEP if mild else stream.choice((STEP, DEATH / 3))
    laws: list[Law] = [
        Constant(mean=step),
        Exponential(mean=step),
        ShiftedExponential(shift=step / 2, scale=step / 2),
        Normal(mean=step, sd=step / 4),
        Erlang(phases=3, mean=step / 3),
    ]
    if not mild:
        laws.append(Pareto(minimum=step / 3, shape=1.5))
    return stream.choice(laws)


def _uneven(stream: random.Random, workers: int, steps: int) -> dict[str, int]:
    if not _happens(stream, 0.3):
        return {}
    return {f"worker-{stream.randrange(workers)}": stream.randint(1, steps)}


def _network(stream: random.Random) -> NetworkSection:
    return NetworkSection(
        latency=stream.choice((0.0, 0.001, 0.02)),
        jitter=stream.choice((0.0, 0.001, 0.02)),
        rack_latency=stream.choice((0.0, 0.005)),
        bandwidth=stream.choice((float("inf"), 20_000.0)),
        sharing=stream.choice(("fair", "fifo")),
        loss=stream.choice((0.0, 0.0, 0.01)),
        retransmit=0.05,
    )


def _server(stream: random.Random) -> ServerSection:
    slow = stream.choice((0.0, 0.0, 0.01))
    return ServerSection(
        fold=slow / 2, apply=slow, per_message=slow / 10, law=stream.choice(("constant", "exponential"))
    )


def _tensors(stream: random.Random, workers: int) -> tuple[TensorSection, ...]:
    tensors = []
    for number in range(stream.choice((1, 1, 2, 3, 4))):
        # Some are cut into chunks, some go in bundles.
        shape: tuple[int, ...] = stream.choice(((1,), (4,), (3, 5), (40,)))
        group: tuple[int, ...] = ()
        # The first is everybody's, so that all have something to do.
        if number and _happens(stream, 0.25):
            group = tuple(sorted(stream.sample(range(workers), stream.randint(1, workers))))
        tensors.append(TensorSection(key=f"key-{number}", shape=shape, dtype=stream.choice(DTYPES), group=group))
    return tuple(tensors)


# --- faults ---


def _node(stream: random.Random, scenario: Scenario) -> str:
    """Return a node: mostly a worker."""
    names = [*scenario.workers, *scenario.workers, *scenario.servers, SCHEDULER]
    return stream.choice(names)


def _pair(stream: random.Random, scenario: Scenario) -> tuple[str, str]:
    worker = stream.choice(scenario.workers)
    return worker, stream.choice([*scenario.servers, SCHEDULER])


def _at(stream: random.Random) -> float:
    return round(stream.choice((stream.uniform(0.0, 0.2), stream.uniform(0.0, SPAN))), 3)


def _link(stream: random.Random, scenario: Scenario, longest: float) -> f.Link:
    node, to = _pair(stream, scenario)
    kind = stream.choice(("latency", "bandwidth", "loss", "duplicate", "reorder", "clog", "cut"))
    values: dict[str, Any] = {
        "latency": longest / 40,
        "bandwidth": 0.1,
        "loss": 0.2,
        "duplicate": 0.5,
        "reorder": 0.5,
        "clog": True,
        "cut": True,
    }
    return f.Link(
        node=node,
        to=to,
        both=_happens(stream, 0.5),
        at=_at(stream),
        duration=round(stream.uniform(0.1, longest), 3),
        **{kind: values[kind]},
    )


def _mild(stream: random.Random, scenario: Scenario, count: int) -> f.AnyFault:
    """Return a fault that is over before anybody is given up, also together with the others."""
    longest = (DEATH - 2.0 * HEARTBEAT) / 2.0 / count
    node = _node(stream, scenario)
    worker = stream.choice(scenario.workers)
    made: list[f.AnyFault] = [
        f.Pause(node=node, at=_at(stream), duration=round(stream.uniform(0.1, longest), 3)),
        f.Slow(node=worker, factor=3.0, at=_at(stream), shape=stream.choice(("window", "ar1")), duration=longest),
        f.Bursts(node=worker, factor=3.0, gap=1.0, duration=0.5),
        f.HeartbeatLoss(node=node, at=_at(stream), duration=round(stream.uniform(0.1, longest), 3)),
        f.Late(node=stream.choice([*scenario.workers, *scenario.servers]), at=round(stream.uniform(0.1, 3.0), 3)),
        f.Poison(node=worker, step=1),
        f.Reset(
            node=worker, to=stream.choice((*scenario.servers, "servers")), at=_at(stream), times=stream.randint(1, 3)
        ),
    ]
    links = [_link(stream, scenario, longest) for _ in range(3)]
    return stream.choice([*made, *links])


def _harsh(stream: random.Random, scenario: Scenario, count: int) -> f.AnyFault:
    node = _node(stream, scenario)
    worker = stream.choice(scenario.workers)
    restart = stream.choice((None, 0.1, 1.0, 8.0))
    most = 1 if restart is None else 2
    made: list[f.AnyFault] = [
        f.Crash(node=node, at=_at(stream), restart=restart, times=min(stream.choice((1, 1, 2)), most), every=3.0),
        f.Crash(node=worker, at=_at(stream)),
        f.Hang(node=node, at=_at(stream)),
        f.Hang(node=worker, at=_at(stream)),
        f.Spot(node="workers", scale=8.0, shape=1.2, restart=restart),
        f.Pause(node=node, at=_at(stream), duration=round(stream.uniform(1.0, 2.0 * DEATH), 3)),
        f.Slow(node=worker, factor=100.0, at=_at(stream)),
        f.HeartbeatLoss(node=node, at=_at(stream), duration=round(stream.uniform(1.0, 2.0 * DEATH), 3)),
        f.HeartbeatLoss(node=worker, at=_at(stream), duration=2.0 * DEATH),
        f.Late(node=node if node != SCHEDULER else worker, at=round(stream.uniform(0.1, 1.5 * JOIN), 3)),
    ]
    cut = f.Link(node=worker, to=SCHEDULER, cut=True, at=_at(stream), duration=2.0 * DEATH)
    links = [cut, *(_link(stream, scenario, 2.0 * DEATH) for _ in range(3))]
    return stream.choice([*made, *links, _mild(stream, scenario, count)])
