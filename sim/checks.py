"""What must hold, looked at from outside: the state machines are not asked."""

from __future__ import annotations

import copy
import functools
import math
from collections import ChainMap, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from aiokv.policy import get_policy
from sim.dialogue import Dialogue
from sim.faults import Reset
from sim.network import HEAD_BYTES
from sim.phases import Phases
from sim.promises import Promises, counts_together, has_failed, rule_of
from sim.readings import Holdings
from sim.split import end_of, split

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from aiokv.types import Key, Rank, Version
    from sim.network import Network
    from sim.record import DivideRecord, DropRecord, Run, UpdateRecord, WorkerRecord
    from sim.steps import Step
    from sim.tokens import Token

ROUNDING: Final = 1e-9


class InvariantError(AssertionError):
    """Something does not hold that must: a bug of a state machine or of the simulator."""


@dataclass(slots=True, kw_only=True)
class _Chunk(Holdings):
    label: str
    ranks: list[Rank]
    """Of those who push it."""
    time: float = 0.0
    last: dict[Rank, Version] = field(default_factory=dict)
    """The version that holds a rank's newest gradient."""


class Checks:
    """Looks at every update and every step of a run as they happen.

    - Versions of a chunk go up by one, and time does not run backwards.
    - Every gradient whose push was answered is in exactly one update of every chunk, or in none and was dropped, or a
      server still holds it; none is in two.
    - An update names the ranks whose gradients it holds, in ascending order.
    - bsp: update r holds push r of every worker that still takes part, at staleness 0.
    - asp: an update holds one gradient, as stale as the versions made since its worker's last push.
    - A gradient is as stale as what its worker had read when it sent it, and none of a lost worker is taken.
    - All who ask which workers make a step are told the same, but for those that are lost or done, or leave unplanned.
    - What else the policy promises, see `sim.promises`; what holds of messages, see `sim.dialogue`.

    Args:
        run: what is looked at.
        strict: raise an error as soon as something does not hold; otherwise collect it in `found`.
    """

    def __init__(self, run: Run, *, strict: bool) -> None:
        self.found: list[str] = []
        self._run = run
        self._strict = strict
        self._chunks: dict[tuple[Key, int], _Chunk] = {}
        self._divided: dict[tuple[Key, int], _Chunk] = {}
        """Those that are one chunk of each of their keys by now: what waits for a standby still answers with them."""
        rule_for = None if run.changes else _RULES.get(run.policy)
        self._rule = None if rule_for is None else rule_for(run)
        self._waits = all(get_policy(policy).waits for policy in run.policies)
        self._promises = Phases(run) if run.changes else Promises(run)
        self._keeps_all = all((rule := rule_of(policy)) is not None and not rule.drops for policy in run.policies)
        self._told: dict[int, dict[tuple[Rank, ...], list[WorkerRecord]]] = {}
        """Who makes a step, by its number: all that was told, and who was told so."""
        self._groups = {tensor.key: tensor.group for tensor in run.scenario.tensors if tensor.group}
        self.dialogue = Dialogue(run, self.report, ChainMap[Any, Any](self._chunks, self._divided))
        """Looks at the messages."""

    @property
    def chunks(self) -> list[_Chunk]:
        """All chunks of which an update was seen."""
        return list(self._chunks.values())

    def report(self, texts: list[str]) -> None:
        """Take note of what does not hold.

        Raises:
            InvariantError: there is something, and the checks are strict.
        """
        self.found += texts
        if texts and self._strict:
            raise InvariantError("; ".join(texts))

    def on_update(self, update: UpdateRecord) -> None:
        """A server has made a version."""
        chunk = self._chunks.get((update.key, update.start))
        if chunk is None:
            label = f"key {update.key!r} from element {update.start}"
            ranks = sorted(self._groups.get(update.key, range(len(self._run.workers))))
            chunk = self._chunks[update.key, update.start] = _Chunk(label=label, ranks=ranks)
        found = _check_version(chunk, update) + self._check_gradients(chunk, update)
        if self._rule is not None:
            found += self._rule(chunk, update)
        found += self._promises.on_update(update, chunk.ranks)
        for rank in update.ranks:
            chunk.last[rank] = update.version
        if found:
            self.report([f"{chunk.label}: {text}" for text in found])

    def on_divide(self, division: DivideRecord) -> None:
        """A server has divided a chunk."""
        place = division.key, division.start
        self._promises.divide(place, division.keys)
        whole = self._chunks.pop(place, None)
        if whole is not None:
            self._divided[place] = whole
            for each in division.keys:
                part = self._chunks[each, 0] = copy.deepcopy(whole)
                part.label = f"key {each!r} from element 0"

    def _check_gradients(self, chunk: _Chunk, update: UpdateRecord) -> list[str]:
        found = []
        tokens, version = update.tokens, update.version
        workers, holds, readings = self._run.worker_by_name, chunk.holds, self.dialogue.readings
        order = [(workers[name].rank, number) for name, number in tokens]
        if [rank for rank, _ in order] != update.ranks:
            found.append(f"version {version} holds {tokens}, but names the ranks {update.ranks}")
        if len(order) > 1 and sorted(order) != order:
            found.append(f"version {version} was summed in the order {update.ranks}")
        for token in tokens:
            if token in holds:
                found.append(f"push {token[1]} of {token[0]} was applied twice")
            holds[token] = version
        place = (update.key, update.start)
        # That they are as many is looked at elsewhere.
        for token, staleness in zip(tokens, update.staleness, strict=False):
            name, number = token
            if readings.late and (place, token) in readings.late:
                found.append(f"push {number} of {name} was applied, although the worker was known to be lost")
            read = readings.computed_at(name, place, number)
            if read is not None and staleness != version - 1 - read:
                text = f"push {number} of {name} was computed at {read}, but has staleness {staleness}"
                found.append(f"version {version}: {text}")
        return found

    def on_step(self, worker: WorkerRecord, number: int, step: Step) -> None:
        """A worker has made its push number `number`, from 1, and has the answer."""
        if not step.answered:
            return
        if found := self._promises.on_step(worker, number):
            self.report(found)
        token = (worker.name, number)
        if token in self._run.dropped or not self._waits:
            return
        if not self._chunks:
            self.report(["pushes were answered, but no update was made"])
        self._check_counted(worker, number, ())

    def on_members(self, asker: WorkerRecord, step: int, ranks: list[Rank], now: float) -> None:
        """A worker was told who makes a step."""
        is_gone = has_failed(self._run, asker, now) or self.dialogue.is_given_up(asker.name)
        if asker.rank not in ranks or is_gone:
            # It makes no step any more, or has not heard that the others go on without it: nobody relies on that.
            return
        answers = self._told.setdefault(step, {})
        for told, others in answers.items():
            if all(other is asker or self._is_void(other, step) for other in others):
                continue
            differ = set(told).symmetric_difference(ranks) - {asker.rank}
            surprising = [one for one in self._run.workers if one.rank in differ and not self._may_go(one, now)]
            if self._run.scenario.cluster.min_workers > 1:
                # Where there were too few, one that has joined may count instead of one that is gone.
                gone = len(differ) - len(surprising)
                comers = [one for one in surprising if one.name in self._run.since][:gone]
                surprising = [one for one in surprising if one not in comers]
            for one in surprising:
                text = f"{asker.name} was told that ranks {ranks} make step {step}, others were told {list(told)}"
                self.report([f"{text}; {one.name} is not lost"])
        answers.setdefault(tuple(ranks), []).append(asker)

    def _may_go(self, worker: WorkerRecord, now: float) -> bool:
        gone = has_failed(self._run, worker, now) or bool(worker.outages) or worker.struck
        planned = worker.left and worker.name in self._run.until
        return gone or (self._run.is_through(worker) and not planned)

    def _is_void(self, worker: WorkerRecord, step: int) -> bool:
        """Say whether what a worker was told of a step binds nobody: it was lost before it had made that step."""
        is_made = any(each.answered for number, each in worker.numbered if number == step + 1)
        ended = worker.struck or bool(worker.outages) or worker.error is not None
        return not is_made and (ended or self.dialogue.is_given_up(worker.name))

    def on_drop(self, drop: DropRecord) -> None:
        """A server has answered that a push is in no update."""
        self.report(self._promises.on_drop(drop))

    def _check_counted(self, worker: WorkerRecord, number: int, held: Collection[Token]) -> None:
        if self._groups and worker.name in self._run.since:
            # It goes on from what each key has: for those of a group that may be fewer pushes than for others.
            return
        token = (worker.name, number)
        for chunk in self._chunks.values():
            if token not in chunk.holds and token not in held and worker.rank in chunk.ranks:
                text = f"push {number} of {worker.name} was answered, but is in no update"
                self.report([f"{chunk.label}: {text}"])

    def _check_early_answers(self) -> None:
        """Look for what was answered before it was in an update, and is lost."""
        held = frozenset(self._run.in_flight)
        for worker in self._run.workers:
            for number, step in worker.numbered:
                if step.answered and (worker.name, number) not in self._run.dropped:
                    self._check_counted(worker, number, held)

    def _check_whole(self) -> None:
        """Look for gradients that are in some chunks, and will never be in others."""
        run = self._run
        held = frozenset(run.in_flight) | run.dropped.keys()
        for chunk in self._chunks.values():
            # A gradient may be too late for the rounds of one group, and nobody is told so whose worker is gone.
            others = [other for other in self._chunks.values() if self._keeps_all or other.ranks == chunk.ranks]
            tokens = dict.fromkeys(token for other in others for token in other.holds)
            torn = [token for token in tokens if token not in chunk.holds and token not in held]
            torn = [token for token in torn if run.worker_by_name[token[0]].rank in chunk.ranks]
            self.report([f"{chunk.label}: push {n} of {name} is missing, but is in other chunks" for name, n in torn])

    def finish(self, network: Network | None = None) -> None:
        """Look at the whole run, which is over."""
        self.report(self._promises.finish())
        if not self._waits and not self._run.scenario.fault and not self._run.scenario.job.overlap:
            self._check_early_answers()
        if counts_together(self._run):
            self._check_whole()
        made = {worker.name: worker.last_push for worker in self._run.workers}
        never = sorted(token for chunk in self.chunks for token in chunk.holds if token[1] > made[token[0]])
        self.report([f"push {n} of {name} was applied, but never made" for name, n in never])
        for worker in self._run.workers:
            self.report([f"{worker.name}: {text}" for text in _check_time(self._run, worker)])
        if network is not None:
            self.report(_check_network(network))
            self.dialogue.finish(network.env.now)


def find_violations(run: Run) -> list[str]:
    """Return what does not hold in a run that is over, in sentences; nothing when all is well."""
    checks = Checks(run, strict=False)
    divisions = deque(run.divisions)
    for number, update in enumerate(run.updates):
        while divisions and divisions[0].updates <= number:
            checks.on_divide(divisions.popleft())
        checks.on_update(update)
    for drop in run.drops:
        checks.on_drop(drop)
    for worker in run.workers:
        for number, step in worker.numbered:
            checks.on_step(worker, number, step)
    checks.finish()
    return list(dict.fromkeys(checks.found))


def _check_version(chunk: _Chunk, update: UpdateRecord) -> list[str]:
    found = []
    number = chunk.version + 1
    if update.version != number:
        found.append(f"update {number} made version {update.version}")
    if update.time < chunk.time:
        found.append(f"version {update.version} was made before version {chunk.version}")
    chunk.version, chunk.time = number, update.time
    return found


def _check_bsp(run: Run, chunk: _Chunk, update: UpdateRecord) -> list[str]:
    found = []
    early = [name for name, number in update.tokens if number != update.version]
    if early:
        found.append(f"version {update.version} holds pushes of other rounds, by {early}")
    if any(update.staleness):
        found.append(f"version {update.version} has gradients of staleness {update.staleness}")
    comers = [name for name, _ in update.tokens if name in run.since and name in run.scenario.comers]
    found += [
        f"version {update.version} has a push of {name}, which joined after {run.since[name][0]}"
        for name in comers
        if update.version <= run.since[name][0] and any(other not in run.since for other, _ in update.tokens)
    ]
    if len(update.ranks) < len(chunk.ranks):
        absent = set(chunk.ranks).difference(update.ranks)
        for worker in run.workers:
            is_done = _is_done(run, worker) and worker.ended <= update.time
            gone = is_done or has_failed(run, worker, update.time) or not _counts(run, worker, update.version)
            if worker.rank in absent and not gone:
                found.append(f"version {update.version} was made without {worker.name}")
    return found


def _is_done(run: Run, worker: WorkerRecord) -> bool:
    return run.is_through(worker)


def _counts(run: Run, worker: WorkerRecord, version: Version) -> bool:
    """Say whether a worker is in the round that makes a version."""
    if version > run.until.get(worker.name, version):
        return False
    if worker.name in run.since:
        return version > run.since[worker.name][-1]
    return worker.name not in run.scenario.comers


def _asp_rule(run: Run) -> Callable[[_Chunk, UpdateRecord], list[str]]:
    """Return what looks at an update of asp, in this run."""
    scenario = run.scenario
    cluster = scenario.cluster
    again = cluster.on_worker_loss == "respawn" or cluster.min_workers > 1 or cluster.moves
    again = again or any(isinstance(fault, Reset) for fault in scenario.fault)

    def check(chunk: _Chunk, update: UpdateRecord) -> list[str]:
        if len(update.ranks) != 1:
            return [f"version {update.version} holds {len(update.ranks)} gradients"]
        if not scenario.job.is_one_call:
            # What it has read may be newer than the version of its last push.
            return []
        [rank], [staleness] = update.ranks, update.staleness
        expected = update.version - 1 - chunk.last.get(rank, 0)
        if staleness == expected:
            return []
        if staleness < expected and (again or any(name in run.since for name, _ in update.tokens)):
            # The answer to a push that comes again has what was made meanwhile; so has a step that is made again, and
            # what a worker reads first that joins.
            return []
        return [f"version {update.version} says staleness {staleness}, but {expected} versions were made between"]

    return check


def _bsp_rule(run: Run) -> Callable[[_Chunk, UpdateRecord], list[str]]:
    """Return what looks at an update of bsp, in this run."""
    return functools.partial(_check_bsp, run)


def _check_time(run: Run, worker: WorkerRecord) -> list[str]:
    found = []
    parts = split(run, worker)
    elapsed = end_of(run, worker) - worker.begun
    if not math.isclose(parts.total, elapsed, rel_tol=ROUNDING, abs_tol=ROUNDING):
        found.append(f"{parts} are not {elapsed:g} s elapsed")
    ends_early = takes_less = False
    for step in worker.steps:
        ends_early |= not step.start <= step.computed <= step.end
        takes_less |= min(step.work, step.waiting, step.communicated) < -ROUNDING * max(1.0, step.end)
    if ends_early:
        found.append("a step ends before it begins")
    if takes_less:
        found.append("a part of a step takes less than no time")
    return found


def _check_network(network: Network) -> list[str]:
    """Look at what the network's meters say: bytes, Little's law, and what cards can carry."""
    found = []
    meter, now = network.meter, network.env.now
    waited = 0.0
    for pipe in network.pipes:
        left = 0
        for packet in pipe.under_way:
            left += HEAD_BYTES + packet.nbytes
            waited += now - packet.sent
        if pipe.sent != pipe.delivered + left:
            text = f"{pipe.sent} bytes sent are not {pipe.delivered} delivered and {left} under way"
            found.append(f"{(pipe.way.source, pipe.way.target)}: {text}")
    if meter is not None:
        area, spent = meter.area_until(now), meter.spent + waited
        if not math.isclose(area, spent, rel_tol=1e-6, abs_tol=1e-6):
            text = f"Little's law: {area:g} message seconds in the network, but messages took {spent:g} s"
            found.append(text)
    if network.fabric is not None:
        for port, carried in network.fabric.carried.items():
            if carried > network.capacity(port) * now * (1.0 + ROUNDING):
                found.append(f"{port} carried {carried:g} bytes in {now:g} s")
    return found


_RULES: Final = {"bsp": _bsp_rule, "asp": _asp_rule}
"""Return what looks at the updates of a run with one policy, by its name."""
