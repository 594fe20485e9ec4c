"""What each policy promises, looked at from outside: written anew here, the policies are not asked."""

from __future__ import annotations

import bisect
import copy
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from aiokv.policy import get_policy
from aiokv.policy.adasync import AdaSync
from aiokv.policy.asp import ASP
from aiokv.policy.bsp import BSP
from aiokv.policy.dssp import DSSP
from aiokv.policy.kofn import Backup, KAsync, KBatchAsync, KBatchSync, KSync
from aiokv.policy.quorum import Quorum
from aiokv.policy.ringmaster import Ringmaster
from aiokv.policy.round_robin import RoundRobin
from aiokv.policy.ssp import SSP
from aiokv.policy.sync_switch import SyncSwitch
from sim.faults import Crash, Join, Link, Reset
from sim.sections import StopSection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aiokv.types import Key, Rank, Version
    from sim.record import DropRecord, Run, UpdateRecord, WorkerRecord
    from sim.tokens import Token


PARAMETERS_LOST: Final = "nobody has a copy of its parameters"
"""What a scheduler says when a server is lost, and what it had is lost, too."""


def _any(_: Version) -> float:
    return math.inf


def _none(_: Version) -> float:
    return 0


def _one(_: int, __: Version) -> tuple[int, int]:
    return 1, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What holds of a policy.

    Attributes:
        size: the fewest and the most gradients in an update, of so many workers that take part, and of its version.
        stalest: the largest staleness in an update.
        distinct: no worker has two gradients in an update.
        lead: by how many applied pushes a worker may lead the slowest when it begins a step.
        turns: updates are made in the order of the ranks.
        drops: why gradients may be in no update.
    """

    size: Callable[[int, Version], tuple[int, int]]
    stalest: Callable[[Version], float] = _any
    distinct: bool = True
    lead: float = math.inf
    turns: bool = False
    drops: tuple[str, ...] = ()


def _exactly(size: Callable[[int], int]) -> Callable[[int, Version], tuple[int, int]]:
    return lambda workers, version: (size(workers), size(workers))


def _batch(size: int) -> Callable[[int, Version], tuple[int, int]]:
    """So many; what is left when nobody is to come any more makes the last round."""
    return lambda workers, version: (size if workers else 1, size)


def rule_of(policy: str) -> Rule | None:  # noqa: C901, PLR0911, PLR0912 - one case for each policy
    """Return what a policy promises; None: nothing that is known here."""
    rule = get_policy(policy)
    match rule:
        case BSP():
            return Rule(size=_exactly(lambda n: n), stalest=_none)
        case KSync():
            return Rule(size=_exactly(lambda n: min(rule.k, n)), stalest=_none, drops=("late",))
        case Backup():
            return Rule(size=_exactly(lambda n: max(1, n - rule.spare)), stalest=_none, drops=("late",))
        case KBatchSync():
            return Rule(size=_batch(rule.k), stalest=_none, distinct=False, drops=("late",))
        case Quorum():
            drops = ("late", "evicted") if rule.strikes else ("late",)
            return Rule(size=lambda n, _: (min(rule.k, n), n), stalest=_none, drops=drops)
        case KAsync():
            return Rule(size=_exactly(lambda n: min(rule.k, n)))
        case KBatchAsync():
            return Rule(size=_batch(rule.k), distinct=False)
        case AdaSync():
            # What losses workers have reported is not known here.
            return Rule(size=lambda n, _: (1, n))
        case Ringmaster():
            return Rule(size=_one, stalest=lambda _: rule.r - 1, drops=("stale",))
        case RoundRobin():
            return Rule(size=_one, turns=True)
        case SyncSwitch():
            rounds = round(rule.fraction * rule.steps)
            return Rule(
                size=lambda n, v: (n, n) if v <= rounds else (1, 1),
                stalest=lambda v: 0 if v <= rounds else math.inf,
            )
        case DSSP():
            return Rule(size=_one, lead=rule.upper)
        case SSP():
            return Rule(size=_one, lead=rule.staleness)
        case ASP():
            return Rule(size=_one)
        case _:
            return None


def phase_of(run: Run, token: Token) -> int:
    """Return how many changes of the policy the worker had asked for before this push."""
    name, number = token
    changes = run.worker_by_name[name].changes
    return bisect.bisect_left(changes, number, key=lambda change: change[1])


@dataclass(slots=True)
class _Progress:
    """Applied pushes of a chunk, by rank."""

    counts: Counter[Rank] = field(default_factory=Counter)
    """Where nobody may lead by any number of them."""
    ranks: list[Rank] = field(default_factory=list)
    """Who pushes it."""
    last: Rank = -1
    """Whose gradient was the last of the newest update."""
    round: int = -1
    """The number of its newest round."""
    version: Version = 0
    """The newest one."""
    base: Version = 0
    """The newest one when the policy came into force."""


class Promises:
    """Looks at the updates and drops of a run.

    Rounds that one server decides for all are to be the same everywhere: the same gradients in each chunk's update,
    in the same order, except for gradients of a worker that did not come to sending all its parts. And nothing is
    both dropped and applied.

    There, all parts of a step are computed from values of one round, so none is too old, unless its worker has counted
    a torn read.

    Args:
        run: what is looked at.
        phase: how many changes of the policy were before; what belongs to other phases is not looked at.
    """

    def __init__(self, run: Run, phase: int = 0) -> None:
        self._run = run
        self._phase = phase
        self._policy = run.policies[phase]
        self._rule = rule_of(self._policy)
        self._decides = get_policy(self._policy).decides
        self._chunks: dict[tuple[Key, int], _Progress] = {}
        # Keys of different groups go through different rounds.
        self._agrees = not any(tensor.group for tensor in run.scenario.tensors)
        self._rounds: dict[Token, int] = {}
        self._tokens: list[frozenset[Token]] = []
        """The gradients of each round, by its number."""
        self._ages: dict[Token, list[int]] = {}
        """The staleness of each part of a gradient whose age is limited."""

    def on_update(self, update: UpdateRecord, ranks: list[Rank]) -> list[str]:
        """Return what is wrong with an update of a chunk that these ranks push."""
        progress = self._chunks.get((update.key, update.start))
        if progress is None:
            progress = _Progress(ranks=ranks, base=update.version - 1)
            self._chunks[update.key, update.start] = progress
        found = []
        if self._agrees and self._run.dropped:
            found = [
                f"push {number} of {name} was applied, but dropped elsewhere as {self._run.dropped[name, number]}"
                for name, number in update.tokens
                if (name, number) in self._run.dropped
            ]
        if self._decides and self._agrees:
            found += self._check_round(progress, update)
        if self._rule is not None:
            found += self._check_rule(self._rule, progress, update, ranks)
        return found

    def on_drop(self, drop: DropRecord) -> list[str]:
        """Return what is wrong with a dropped gradient."""
        name, number = drop.token
        found = []
        if self._rule is not None and drop.reason not in self._rule.drops:
            found.append(f"push {number} of {name} was dropped as {drop.reason}; {self._policy} drops none as that")
        if not self._agrees:
            return found
        if drop.token in self._rounds:
            found.append(f"push {number} of {name} was dropped as {drop.reason}, but applied elsewhere")
        if drop.reason != self._run.dropped.get(drop.token):
            found.append(f"push {number} of {name} was dropped as {drop.reason}, elsewhere for another reason")
        return found

    def on_step(self, worker: WorkerRecord, number: int) -> list[str]:
        """Return what is wrong with a worker going on after its push `number`."""
        if self._rule is None or self._rule.lead == math.inf or worker.name in self._run.since:
            # The number of who has joined is that of the others.
            return []
        found = []
        before = worker.changes[self._phase - 1][1] if self._phase else 0
        for (key, start), progress in self._chunks.items():
            if worker.rank not in progress.ranks:
                continue
            lead = number - before - self._slowest(progress, worker.ended)
            if lead > self._rule.lead:
                text = f"{worker.name} goes on after push {number}, {lead} ahead of the slowest"
                found.append(f"key {key!r} from element {start}: {text}")
        return found

    def divide(self, place: tuple[Key, int], keys: Iterable[Key]) -> None:
        """Take note that a chunk is now one chunk of each of these keys."""
        whole = self._chunks.pop(place, None)
        if whole is not None:
            self._chunks |= {(key, 0): copy.deepcopy(whole) for key in keys}

    def finish(self) -> list[str]:
        """Return what is wrong with the whole run."""
        if self._rule is None:
            return []
        most = self._rule.stalest(1)
        scenario = self._run.scenario
        # Layers that are pushed one by one are read one by one, too: the first one decides.
        age_of = min if scenario.job.overlap else max
        found = [
            f"push {number} of {name} was applied at staleness {age_of(ages)}, {self._policy} drops such"
            for (name, number), ages in self._ages.items()
            if age_of(ages) > most and not self._run.worker_by_name[name].torn_reads
        ]
        if scenario.fault or scenario.stop != StopSection(departures=scenario.stop.departures):
            # Rounds that were closed need not have been made.
            return found
        ages: dict[Token, int] = {}
        for drop in self._run.drops:
            if phase_of(self._run, drop.token) != self._phase:
                continue
            progress = self._chunks.get((drop.key, drop.start))
            age = progress.version - drop.read if progress is not None else 0
            ages[drop.token] = max(ages.get(drop.token, 0), age)
        return found + [
            f"push {number} of {name} was dropped as {self._run.dropped[name, number]}, at staleness {age} at most"
            for (name, number), age in ages.items()
            if age <= most
        ]

    def _check_round(self, progress: _Progress, update: UpdateRecord) -> list[str]:
        tokens = frozenset(update.tokens)
        known = sorted({self._rounds[token] for token in update.tokens if token in self._rounds})
        if not known:
            number = len(self._tokens)
            self._tokens.append(tokens)
            self._rounds |= dict.fromkeys(tokens, number)
            known = [number]
        found = []
        [number, *others] = known
        here = self._tokens[number]
        strange = [name for name, _ in tokens ^ here if not self._may_be_torn(name, update.time)]
        if others or strange:
            found.append(f"version {update.version} holds {sorted(tokens)}, elsewhere it is {sorted(here)}")
        if number <= progress.round:
            found.append(f"version {update.version} is made of a round that was before the last one elsewhere")
        progress.round = number
        return found

    def _may_be_torn(self, name: str, now: float) -> bool:
        """Say whether some of a worker's gradient may be missing."""
        return has_failed(self._run, self._run.worker_by_name[name], now) and not counts_together(self._run)

    def _check_rule(self, rule: Rule, progress: _Progress, update: UpdateRecord, ranks: list[Rank]) -> list[str]:
        version = update.version
        found = []
        size, nth = len(update.tokens), version - progress.base
        least, most = rule.size(len(ranks), nth)
        if not least <= size <= most:
            # Some have left, and the server may know of some of them.
            live = self._live(ranks, update.time)
            least = rule.size(len(live), nth)[0]
            if not counts_together(self._run):
                # Those who were evicted, or have given up, have brought some keys of their last step, and not others. A
                # round is none of a key that they alone would have brought.
                gone = sum(has_failed(self._run, worker, update.time) for worker in self._run.workers)
                least, most = least - gone, max(most, rule.size(len(ranks), nth + gone)[1])
            if not least <= size <= most:
                expected = str(most) if least == most else f"{least} to {most}"
                found.append(f"version {version} holds {size} gradients, {self._policy} wants {expected}")
        stalest = rule.stalest(nth)
        if stalest < math.inf:
            found += self._check_ages(update, stalest)
        if rule.distinct and size > 1 and len(set(update.ranks)) < size:
            found.append(f"version {version} holds two gradients of a worker: ranks {update.ranks}")
        progress.version = version
        if rule.lead < math.inf:
            progress.counts.update(update.ranks)
            found += self._check_lead(rule, progress, update)
        if rule.turns and len(self._live(ranks, update.time)) == len(ranks):
            turn = ranks[(ranks.index(progress.last) + 1) % len(ranks)] if progress.last in ranks else ranks[0]
            if update.ranks != [turn]:
                found.append(f"version {version} holds a gradient of rank {update.ranks}, it is the turn of {turn}")
        progress.last = update.ranks[-1]
        return found

    def _check_ages(self, update: UpdateRecord, stalest: float) -> list[str]:
        if not (self._phase or self._decides):
            if max(update.staleness, default=0) > stalest:
                return [f"version {update.version} has gradients of staleness {update.staleness}"]
            return []
        # That they are as many is looked at elsewhere.
        ages = list(zip(update.tokens, update.staleness, strict=False))
        if self._phase:
            # What a worker pushes first was computed from what it had read under the policy before.
            workers, last = self._run.worker_by_name, self._phase - 1
            ages = [(token, age) for token, age in ages if token[1] > workers[token[0]].changes[last][1] + 1]
        if self._decides:
            for token, age in ages:
                self._ages.setdefault(token, []).append(age)
        elif max((age for _, age in ages), default=0) > stalest:
            return [f"version {update.version} has gradients of staleness {update.staleness}"]
        return []

    def _check_lead(self, rule: Rule, progress: _Progress, update: UpdateRecord) -> list[str]:
        slowest = self._slowest(progress, update.time)
        return [
            f"rank {rank} has made {progress.counts[rank]} pushes, the slowest {slowest}"
            for rank in update.ranks
            if progress.counts[rank] - slowest > rule.lead + 1
        ]

    def _slowest(self, progress: _Progress, now: float) -> int:
        """Return the fewest applied pushes of a worker that takes part."""
        live = self._live(progress.ranks, now)
        return min((progress.counts[rank] for rank in live), default=max(progress.counts.values(), default=0))

    def _live(self, ranks: Iterable[Rank], now: float) -> list[Rank]:
        """Return those of the ranks that certainly take part at a time."""
        # Who has not joined in the end does not know its rank; those go by the names.
        gone = {
            rank
            for rank, worker in enumerate(self._run.workers)
            if has_failed(self._run, worker, now) or self._is_done(worker, now)
        }
        # When those come is not looked at here.
        gone.update(
            range(self._run.scenario.cluster.workers, len(self._run.workers)), self._comers_again(), self._leavers()
        )
        return [rank for rank in ranks if rank not in gone]

    def _leavers(self) -> list[Rank]:
        return [worker.rank for worker in self._run.workers if worker.name in self._run.until]

    def _comers_again(self) -> list[Rank]:
        return [worker.rank for worker in self._run.workers if worker.name in self._run.since]

    def _is_done(self, worker: WorkerRecord, now: float) -> bool:
        if len(worker.changes) > self._phase:
            return worker.changes[self._phase][0] <= now
        done = worker.left or len(worker.steps) >= self._run.scenario.steps_of(worker.name)
        return done and worker.ended <= now


def has_failed(run: Run, worker: WorkerRecord, now: float) -> bool:
    """Say whether a worker takes part no longer, because of what has happened to it."""
    ended = (worker.error is not None or worker.struck) and worker.ended <= now
    return ended or run.evicted.get(worker.name, math.inf) <= now


def counts_together(run: Run) -> bool:
    """Say whether all that a worker pushes in a step is to be in updates, or nothing of it, whatever happens to it."""
    scenario = run.scenario
    # A connection that ends is made again, also one between servers.
    lasting = [fault for fault in scenario.fault if not isinstance(fault, Reset | Join)]
    if scenario.cluster.replication > 1 and not any(PARAMETERS_LOST in log.text for log in run.logs):
        # A server that crashes has a successor, which knows what counts.
        lasting = [fault for fault in lasting if not (isinstance(fault, Crash) and fault.node in scenario.servers)]
    nodes = {name for fault in lasting for name in scenario.select(fault.node)}
    nodes |= {name for fault in lasting if isinstance(fault, Link) for name in scenario.select(fault.to)}
    # Of a step that is pushed in several calls each counts by itself.
    is_one_call = not scenario.job.overlap
    is_whole = scenario.cluster.on_worker_loss == "shrink" or all(get_policy(one).per_step for one in run.policies)
    return is_whole and is_one_call and nodes <= set(scenario.workers)
