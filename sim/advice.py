"""What would help: figures from one run, with the formulae that they follow from."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from aiokv.policy import get_policy
from sim.report import summarise
from sim.saving_advice import SavingAdvice, saving_advice, sentences_on_saving
from sim.waits_advice import on_waits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.blame import WhatIf
    from sim.record import Run

SMALL: Final = 0.05
"""A gain below this share is not worth an advice."""

PERSISTENT: Final = 0.5
"""From this share on, what stragglers cost is laid to workers rather than to chance."""

MOST_BACKUPS: Final = 0.25
"""Of more workers than this share, no gradients are thrown away."""

OFTEN: Final = 0.25
"""So is it when one worker is the slowest in this share of the steps, and three times as often as by chance."""


class Skew(msgspec.Struct, frozen=True, kw_only=True):
    """How unequal the steps are. All times are seconds of computing."""

    mean: float
    """Of all steps of all workers."""
    barrier: float
    """Mean of the slowest worker's time, step by step."""
    loss: float
    """Share of a step that the others wait for the slowest: 1 - mean / barrier."""
    persistent: float
    """Share of that loss which would go if every worker had the same mean: 1 if it is always the same who is slow."""
    slowest: str
    """The worker with the largest mean."""
    slowest_mean: float
    slowest_share: float
    """In which share of the steps it is the slowest of all; by chance it would be 1/N."""
    workers: int

    @property
    def is_persistent(self) -> bool:
        """Whether it is rather the same workers that are slow than any of them by chance."""
        return self.persistent >= PERSISTENT or self.slowest_share >= max(OFTEN, 3.0 / self.workers)


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """Batches in proportion to speed (Chen and others 2018, "LB-BSP"): step time, and gradients a second."""

    step_s: float
    gradients_per_s: float


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """Doing without the slowest worker."""

    worker: str
    step_s: float
    gradients_per_s: float


class Backups(msgspec.Struct, frozen=True, kw_only=True):
    """Not waiting for the slowest `count` (Chen and others 2016): the number with the most gradients a second."""

    count: int
    step_s: float
    gradients_per_s: float
    excluded: float
    """The largest share of its gradients that a worker would lose."""


class Saturation(msgspec.Struct, frozen=True, kw_only=True):
    """Workers and the busiest server as a closed queue: with more than `knee` workers, they queue."""

    think_s: float
    """Z: what a step takes without the server."""
    service_s: float
    """S: what the busiest server, or its network card, is busy with one worker's step."""
    bottleneck: str
    knee: float
    """N* = (Z + S) / S."""
    most_steps_per_s: float
    """Of all workers together: min(N / (Z + S), 1 / S)."""
    servers: int
    """With so many servers, and an even split, the knee is at the number of workers."""


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to bring the gradients of all workers to the servers at once, and to bring values back."""

    nbytes: float
    """M: what a worker sends in a step."""
    round_s: float
    """max(M/B, N M / (S B)), each way, with S servers and cards of B bytes a second."""
    ring_s: float
    """What a ring all-reduce of as many bytes would take: 2 M (N - 1) / (N B)."""
    servers_as_ring: int
    """With so many servers a round takes no longer, its two ways going on at once: S >= N^2 / (2 (N - 1))."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a run under one policy; None where there is nothing to say."""

    policy: str
    step_s: float
    gradients_per_s: float
    overhead_s: float
    """What a step takes besides the slowest worker's computing."""
    skew: Skew | None
    balance: Balance | None
    eviction: Eviction | None
    backups: Backups | None
    saturation: Saturation | None
    transfers: Transfers | None
    saving: SavingAdvice | None
    sentences: list[str]


# --- stragglers ---


def step_matrix(run: Run) -> dict[str, list[float]]:
    """Return the seconds of computing of each worker's steps after the warm-up, of those steps that all have made."""
    warmup = run.scenario.warmup
    columns = {w.name: [step.work for step in w.steps if step.answered][warmup:] for w in run.workers}
    common = min(map(len, columns.values()))
    return {name: times[:common] for name, times in columns.items()}


def barrier(columns: Sequence[Sequence[float]], absent: int = 0) -> float:
    """Return the mean time after which all workers but the slowest `absent` are done with a step."""
    return statistics.fmean(sorted(row)[len(row) - 1 - absent] for row in zip(*columns, strict=True))


def skew_of(times: dict[str, list[float]]) -> Skew:
    """Return how unequal workers and steps are."""
    columns = list(times.values())
    mean = statistics.fmean(statistics.fmean(column) for column in columns)
    slow = barrier(columns)
    means = {name: statistics.fmean(column) for name, column in times.items()}
    slowest = max(means, key=means.__getitem__)
    loss = slow - mean
    left = barrier(balanced(columns)) - mean
    rows = list(zip(*columns, strict=True))
    firsts = Counter(list(times)[row.index(max(row))] for row in rows)
    return Skew(
        mean=mean,
        barrier=slow,
        loss=loss / slow if slow > 0 else 0.0,
        persistent=min(1.0, max(0.0, 1.0 - left / loss)) if loss > 0 else 0.0,
        slowest=slowest,
        slowest_mean=means[slowest],
        slowest_share=firsts[slowest] / len(rows),
        workers=len(times),
    )


def balanced(columns: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the times if all workers had the same mean, as with batches in proportion to their speed."""
    mean = statistics.fmean(statistics.fmean(column) for column in columns)
    return [[time * mean / statistics.fmean(column) for time in column] for column in columns]


def best_backups(times: dict[str, list[float]], overhead: float = 0.0) -> Backups:
    """Return how many of the slowest not to wait for, so that most gradients count a second: K / E[T_K].

    Args:
        times: of each worker's steps.
        overhead: seconds that a step takes besides.
    """
    columns = list(times.values())
    count = len(columns)
    rates = {b: (count - b) / (overhead + barrier(columns, b)) for b in range(1 + int(count * MOST_BACKUPS))}
    best = max(rates, key=rates.__getitem__)
    return Backups(
        count=best,
        step_s=overhead + barrier(columns, best),
        gradients_per_s=rates[best],
        excluded=_excluded(columns, best),
    )


def _excluded(columns: Sequence[Sequence[float]], absent: int) -> float:
    """Return the largest share of its steps in which a worker is among the slowest `absent`."""
    rows = list(zip(*columns, strict=True))
    out = Counter(
        worker for row in rows for worker in sorted(range(len(row)), key=row.__getitem__)[len(row) - absent :]
    )
    return max(out.values(), default=0) / len(rows)


def evict(times: dict[str, list[float]], worker: str, overhead: float = 0.0) -> Eviction:
    """Return what becomes of a step without a worker, each of the others doing as much as before."""
    columns = [column for name, column in times.items() if name != worker]
    step = overhead + barrier(columns)
    return Eviction(worker=worker, step_s=step, gradients_per_s=len(columns) / step)


# --- servers ---


def knee(think: float, service: float) -> float:
    """Return the number of workers from which on they queue at a server: N* = (Z + S) / S."""
    return (think + service) / service


def break_even_servers(workers: int, think: float, service: float, servers: int = 1) -> int:
    """Return with how many servers, among which the work is split evenly, the knee is at the number of workers.

    More than there are workers never help: then the workers' own network cards are as busy as those of the servers.

    Args:
        workers: N.
        think: Z, seconds.
        service: S, seconds of the busiest of the servers that there are.
        servers: how many there are.
    """
    if workers == 1:
        return 1
    return min(workers, max(1, math.ceil(service * servers * (workers - 1) / think - 1e-9)))


def saturation_of(run: Run, think: float) -> Saturation | None:
    """Return where the servers of a run are saturated; None when a step costs them nothing.

    Args:
        run: says what went over the links and what was updated.
        think: seconds of a step without the servers.
    """
    scenario = run.scenario
    steps = sum(len(worker.steps) for worker in run.workers)
    net, section = scenario.network, scenario.server
    per_push = get_policy(run.policy).per_push
    costs: dict[str, float] = {}
    for name in scenario.servers if steps else ():
        received = sum(link.sent for link in run.links if link.target == name)
        sent = sum(link.sent for link in run.links if link.source == name)
        parts = {(update.key, update.start) for update in run.updates if update.node == name}
        each = section.apply if per_push else section.fold + section.apply / scenario.cluster.workers
        work = len(parts) * (each + section.per_message) + section.per_byte * received / steps
        costs[f"{name}'s arithmetic"] = work
        costs[f"{name}'s network card"] = max(received, sent) / steps / net.bandwidth
    bottleneck = max(costs, key=costs.__getitem__, default="")
    service = costs.get(bottleneck, 0.0)
    if service <= 0 or think <= 0:
        return None
    workers = scenario.cluster.workers
    return Saturation(
        think_s=think,
        service_s=service,
        bottleneck=bottleneck,
        knee=knee(think, service),
        most_steps_per_s=min(workers / (think + service), 1.0 / service),
        servers=break_even_servers(workers, think, service, scenario.cluster.servers),
    )


def transfers_of(run: Run) -> Transfers | None:
    """Return what the gradients of a round take; None when the network cards have no limit, or nothing was sent."""
    scenario, bandwidth = run.scenario, run.scenario.network.bandwidth
    steps = sum(len(worker.steps) for worker in run.workers)
    workers, servers = scenario.cluster.workers, scenario.cluster.servers
    if math.isinf(bandwidth) or not steps or workers == 1:
        return None
    nbytes = sum(tensor.spec.nbytes for tensor in scenario.tensors)
    return Transfers(
        nbytes=nbytes,
        round_s=max(nbytes / bandwidth, workers * nbytes / (servers * bandwidth)),
        ring_s=2.0 * nbytes * (workers - 1) / (workers * bandwidth),
        servers_as_ring=math.ceil(workers**2 / (2.0 * (workers - 1))),
    )


# --- all together ---


def advise(run: Run) -> Advice:
    """Return what a run says about how the cluster could do better."""
    summary = summarise(run)
    times = step_matrix(run)
    usable = len(times) > 1 and bool(next(iter(times.values())))
    skew = skew_of(times) if usable else None
    step = summary.step_time_s.mean
    in_step = get_policy(run.policy).in_step
    waited = 0.0 if skew is None else (skew.barrier if in_step else skew.mean)
    overhead = max(0.0, step - waited) if not math.isnan(step) else 0.0
    balance = eviction = backups = None
    if skew is not None and in_step:
        even = overhead + barrier(balanced(list(times.values())))
        balance = Balance(step_s=even, gradients_per_s=len(times) / even)
        eviction = evict(times, skew.slowest, overhead)
        backups = best_backups(times, overhead)
    own = skew.mean if skew is not None else statistics.fmean(next(iter(times.values())) or [0.0])
    advice = Advice(
        policy=run.policy,
        step_s=step,
        gradients_per_s=summary.gradients_per_s,
        overhead_s=overhead,
        skew=skew,
        balance=balance,
        eviction=eviction,
        backups=backups,
        saturation=saturation_of(run, own + 2.0 * _latency(run)),
        transfers=transfers_of(run),
        saving=saving_advice(run, step),
        sentences=[],
    )
    about = _on_skew(advice, run) if in_step else on_waits(run, summary, skew)
    sentences = [*about, *_on_servers(advice, run), *sentences_on_saving(advice.saving)]
    return msgspec.structs.replace(advice, sentences=sentences or ["nothing stands out: every cause costs little"])


def _latency(run: Run) -> float:
    net = run.scenario.network
    return net.jitter + (net.latency if isinstance(net.latency, int | float) else 0.0)


def _on_skew(advice: Advice, run: Run) -> list[str]:
    skew = advice.skew
    if skew is None:
        return []
    if skew.loss < SMALL:
        return [f"stragglers cost {skew.loss:.1%} of a step: nothing to gain there"]
    found = [f"workers wait {skew.loss:.0%} of a step for the slowest; {skew.persistent:.0%} of that is persistent"]
    balance, eviction, backups = advice.balance, advice.eviction, advice.backups
    assert balance is not None, "it goes with the skew"
    assert eviction is not None, "it goes with the skew"
    assert backups is not None, "it goes with the skew"
    now = len(run.workers) / (advice.overhead_s + skew.barrier)
    if skew.is_persistent:
        found.append(
            f"the same workers are slow ({skew.slowest} takes {skew.slowest_mean:.3g} s, the mean is {skew.mean:.3g} s)"
        )
        gain = _gain(balance.gradients_per_s, now)
        found.append(f"batches in proportion to speed give steps of {balance.step_s:.3g} s, {gain}")
        found.append(
            f"without {eviction.worker} a step takes {eviction.step_s:.3g} s, {_gain(eviction.gradients_per_s, now)}"
        )
        found.append("bounded staleness would not help for long: all end up at the pace of the slowest")
    if backups.count and _is_gain(backups.gradients_per_s, now):
        found.append(
            f"not waiting for the slowest {backups.count} of {len(run.workers)} gives steps of {backups.step_s:.3g} s, "
            f"{_gain(backups.gradients_per_s, now)}; one worker would lose {backups.excluded:.0%} of its gradients"
        )
    return found


def _on_servers(advice: Advice, run: Run) -> list[str]:
    found = advice.saturation
    if found is None:
        return []
    workers, servers = run.scenario.cluster.workers, run.scenario.cluster.servers
    state = f"{found.bottleneck} is saturated from {found.knee:.1f} workers on"
    if workers <= found.knee:
        return [f"{state}; there are {workers}"]
    transfers = advice.transfers
    if transfers is not None and get_policy(run.policy).in_step:
        state_of_round = (
            f"the gradients of a round take {transfers.round_s:.3g} s to the servers; with {transfers.servers_as_ring} "
            f"of them it would be no more than a ring all-reduce ({transfers.ring_s:.3g} s), and more than {workers} "
            "never help"
        )
        return [f"{state}, and there are {workers}", state_of_round]
    return [
        f"{state}, and there are {workers}: together they make at most {found.most_steps_per_s:.4g} steps a second",
        f"{found.servers} servers instead of {servers} would be enough, if the parameters are split evenly",
    ]


def _is_gain(rate: float, now: float) -> bool:
    return rate > now * (1.0 + SMALL)


def _gain(rate: float, now: float) -> str:
    return f"{rate:.4g} gradients a second ({rate / now - 1.0:+.0%})"


def to_json(advice: Advice, causes: Sequence[WhatIf]) -> bytes:
    """Return an advice, and what the run would have been without each cause, as one JSON object."""
    document = {**msgspec.to_builtins(advice), "causes": msgspec.to_builtins(causes)}
    # msgspec writes NaN as null.
    return msgspec.json.format(msgspec.json.encode(document), indent=2)
