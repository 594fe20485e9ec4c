"""What runs on the nodes: the loop of a worker, and a server that serves until the job is over."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import simpy

from aiokv.core.stimuli import (
    AskMembers,
    ChangePolicy,
    Depart,
    EnterBarrier,
    Finish,
    GoOn,
    Join,
    KeyOptions,
    Operation,
    PlanLeave,
    ReportLoss,
    Transfer,
)
from aiokv.errors import AiokvError, SchedulerLostError
from aiokv.policy import get_policy
from sim.faults import Leave
from sim.record import LogRecord
from sim.steps import Step
from sim.waiting import Awaited, Waiting, finish

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from aiokv.core.worker.session import Session
    from aiokv.types import Key, Rank, TensorSpec
    from sim.checks import Checks
    from sim.drops import Expiry
    from sim.learning import Losses
    from sim.network import Flights
    from sim.node import Node
    from sim.pace import Pace
    from sim.process import Activity
    from sim.record import Run, WorkerRecord
    from sim.saving import Saves
    from sim.scenario import Scenario
    from sim.sections import ChangeSection, TensorSection

_NO_OPTIONS: Final = KeyOptions()
"""Only those of an init count."""


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """A worker that joins, initialises all tensors and trains for a number of steps, in each of its lives."""

    scenario: Scenario
    """How many steps, which tensors and time-outs."""
    record: WorkerRecord
    """Is filled in."""
    times: Iterator[float]
    """Seconds of each step."""
    on_step: Callable[[], None]
    """Is called after every step."""
    on_failure: Callable[[], None] = lambda: None
    """Is called when it ends with an error."""
    pace: Pace | None = None
    """How fast it computes, if that changes."""
    checks: Checks | None = None
    """Are told of every step."""
    changes: list[ChangeSection] = field(default_factory=list)
    """Of the policy."""
    saves: Saves
    """How all workers save together."""
    expiry: Expiry | None = None
    """Tells when a computation is to be abandoned, if any is."""
    is_complete: Callable[[], bool] = lambda: True
    """Tells whether all are there who are to be there from the beginning."""
    leaves: Leave | None = None
    """It leaves before its work is done."""
    losses: Losses | None = None
    """Tells which loss it measures, if a policy goes by that."""
    flights: Flights | None = None
    """Knows when something from or to it is under way, if that takes any time."""
    _tensors: list[TensorSection] = field(init=False)
    _parts: list[tuple[Key, TensorSpec]] = field(init=False)
    _asks: bool = field(init=False)
    """Whether it asks before each step who makes it."""
    _separate: bool = field(init=False)
    _timeout: float = field(init=False)
    _saved_at: float = 0.0

    def __post_init__(self) -> None:
        self._tensors = self.scenario.tensors
        self._parts = _parts_of(tuple(self._tensors))
        plans = any(isinstance(fault, Leave) and fault.planned for fault in self.scenario.fault)
        self._asks = plans or self.scenario.cluster.max_workers > 0
        self._separate = self.scenario.job.separate
        self._timeout = self.scenario.cluster.call_timeout

    def run(self, env: simpy.Environment, node: Node, session: Session, start: float) -> Activity:
        """Live one life on a node, as a process that begins at a time."""
        record, cluster = self.record, self.scenario.cluster
        is_first = not record.steps and not record.outages and not record.struck
        try:
            if start > env.now:
                yield start - env.now
            until = env.now + cluster.join_timeout
            while record.name in self.scenario.comers and not self.is_complete() and env.now < until:
                # Before that it would take the place of one of them.
                yield cluster.heartbeat
            if is_first:
                record.begun = record.ended = env.now
            yield from finish(node.call(Join(node.new_call(), cluster.join_timeout)))
            record.rank = session.rank
            yield from self._initialise(node, record.rank)
            if cluster.on_worker_loss == "respawn" or cluster.max_workers or cluster.min_workers > 1:
                yield from self._go_on(node, session)
            self._begin(env.now, is_first)
            # Not `yield from`: this one is in no cache while the other is gone on with.
            yield self._overlapped(env, node) if self.scenario.job.overlap else self._train(env, node)
        except AiokvError as error:
            record.error = error
            self.on_failure()
        except simpy.Interrupt:
            # A fault has hit the node: there is nobody to say goodbye to.
            record.struck = True
            return
        finally:
            record.torn_reads += session.torn_reads
        if not self.scenario.stop.departures:
            node.freeze()
            return
        try:
            if record.left:
                yield from finish(node.call(Depart(node.new_call(), cluster.call_timeout, drains=True)))
                node.stop(f"{node.name} has left")
                return
            if self.scenario.steps_of(record.name) < self.scenario.steps and record.error is None:
                yield from finish(node.call(Finish(node.new_call(), cluster.call_timeout)))
                yield self.scenario.job.linger
            yield from self._leave(node)
        except AiokvError as error:
            record.error = record.error or error
        except simpy.Interrupt:
            record.struck = True
            return
        node.stop(f"{node.name} is done")

    def _leave(self, node: Node) -> Waiting:
        """Leave in good order. That nobody is there to be told is no error of a job that is done, as for a client."""
        with contextlib.suppress(SchedulerLostError):
            yield from finish(node.call(Depart(node.new_call(), self.scenario.cluster.call_timeout)))

    def _go_on(self, node: Node, session: Session) -> Waiting:
        """Find out whether the step counts in which the last life has ended, or is to be made again."""
        yield from finish(node.call(GoOn(node.new_call(), self.scenario.cluster.call_timeout)))
        if session.clock:
            yield from finish(self._exchange(node, Operation.PULL, self._tensors, 0))
        self.record.number = session.pushes
        if 0 < session.since == session.clock:
            # It joins, maybe again: the others have gone on without it, whatever became of its last push.
            yield from self._catch_up(node, session, node.env.now)
            return
        steps = self.record.steps
        done = steps.answered
        for index, step in enumerate(steps):
            if not step.answered and not step.cancelled:
                step.answered = done < session.clock
                step.cancelled = not step.answered
                steps[index] = step

    def _begin(self, now: float, is_first: bool) -> None:
        record = self.record
        if is_first:
            record.begun = record.ended = self._saved_at = now
        elif record.struck:
            record.outages.append((record.ended, now))
            record.struck = False
            record.ended = now

    @property
    def _steps_left(self) -> int:
        steps = self.scenario.steps_of(self.record.name)
        if self.scenario.cluster.max_workers:
            return steps - self.record.number
        return steps - self.record.steps.answered

    def _compute(self, env: simpy.Environment, seconds: float, step: Step) -> Waiting:
        if self.pace is None:
            yield seconds
            return
        end, paused = self.pace.finish(env.now, seconds)
        yield end - env.now
        step.paused += paused

    def _wait(self, env: simpy.Environment, waiting: Waiting, step: Step) -> Waiting:
        before = self._flown(env.now)
        try:
            yield from waiting
        finally:
            step.communicated += self._flown(env.now) - before

    def _flown(self, now: float) -> float:
        """Return for how long something from or to it has been under way, up to now."""
        return 0.0 if self.flights is None else self.flights.total(now)

    def _ended(self, env: simpy.Environment, step: Step) -> None:
        record = self.record
        step.end = record.ended = now = env.now
        if math.isnan(step.computed):
            # It was cut short while it computed.
            step.computed = now
        if self.pace is not None and self.pace.pauses:
            # What is under way meanwhile is counted already.
            stopped = self.pace.stopped(step.computed, now)
            step.halted += min(stopped, max(0.0, now - step.computed - step.communicated))
        record.steps.append(step)

    def _train(  # noqa: C901, PLR0912, PLR0915 - nearly all time of a run is spent here, so it calls little else
        self, env: simpy.Environment, node: Node
    ) -> Waiting:
        record, job, pace, flights = self.record, self.scenario.job, self.pace, self.flights
        # Who has joined goes on from the number of the others.
        joins = self.scenario.cluster.max_workers > 0
        pushes = record.number if joins else record.steps.pushed
        saves = job.checkpoint_interval > 0 or job.save_every > 0
        for _ in range(self._steps_left):
            if saves:
                yield from self._save(env)
                yield from self._save_together(env, node)
            step = Step(env.now, math.nan, math.nan, answered=False)
            if joins:
                step.number = pushes + 1
            if self._asks:
                yield from self._look_around(env, node, pushes)
                step.stalled = env.now - step.start
            if record.left:
                return
            try:
                pushing: Awaited | None = None
                if job.between:
                    pushing = yield from self._compute_and_push(env, node, next(self.times), step)
                elif self.expiry is not None:
                    yield from self._compute_or_cancel(env, node, self.expiry, next(self.times), step)
                elif pace is None:
                    yield next(self.times)
                else:
                    # As `_compute`.
                    end, paused = pace.finish(env.now, next(self.times))
                    yield end - env.now
                    step.paused += paused
                step.computed = now = env.now
                if self.losses is not None and pushing is None:
                    self._report(node, self.losses)
                before = 0.0 if flights is None else flights.total(now)
                try:
                    # Not through `_transfer`: this is where nearly all time of a run is spent.
                    operation = Operation.PULL if step.cancelled or pushing is not None else Operation.PUSHPULL
                    awaited = self._exchange(node, operation, self._tensors, 0)
                    error = yield awaited if pushing is None else node.env.process(_both(pushing, awaited))
                finally:
                    if flights is not None:
                        step.communicated += flights.total(env.now) - before
                if error is not None:
                    raise error
                step.answered = True
                if job.barrier_every or self.changes:
                    taken = step.number or len(record.steps) + 1
                    if job.barrier_every and taken % job.barrier_every == 0:
                        yield from self._meet(env, node, step)
                    yield from self._change(env, node, step, taken)
            finally:
                self._ended(env, step)
            if not step.cancelled:
                record.number = pushes = pushes + 1
            if self.checks is not None and not step.cancelled:
                self.checks.on_step(record, pushes, step)
            self.on_step()
            if self.leaves is not None and len(record.steps) == self.leaves.after:
                yield from self._go(node, self.leaves)

    def _report(self, node: Node, losses: Losses) -> None:
        """Say which loss belongs to the values that the gradient was computed from; nobody waits for the answer."""
        node.call(ReportLoss(node.new_call(), losses.at(node.read or 0), self.scenario.cluster.call_timeout))

    def _go(self, node: Node, leaves: Leave) -> Waiting:
        """Leave, or say that this worker is about to."""
        self.record.left = not leaves.planned
        if leaves.planned:
            yield from finish(node.call(PlanLeave(node.new_call())))

    def _look_around(self, env: simpy.Environment, node: Node, step: int) -> Waiting:
        """Ask who makes a step, where workers come and go. One that does not make it leaves."""
        if self.record.left:
            return
        yield from finish(node.call(AskMembers(node.new_call(), step, self.scenario.cluster.call_timeout)))
        members: list[Rank] = node.result
        if self.checks is not None:
            self.checks.on_members(self.record, step, members, env.now)
        self.record.left = self.record.rank not in members

    def _compute_or_cancel(
        self, env: simpy.Environment, node: Node, expiry: Expiry, seconds: float, step: Step
    ) -> Waiting:
        """Compute, unless the values that it is computed from become too old before it is done."""
        pace = self.pace
        done = env.timeout(seconds if pace is None else pace.finish(env.now, seconds)[0] - env.now)
        yield done | expiry.of(node.read or 0)
        node.read = None
        step.cancelled = not done.processed
        if pace is not None:
            # One that is stopped hears of it when it goes on.
            yield pace.finish(env.now, 0.0)[0] - env.now
            step.paused += pace.stopped(step.start, env.now)

    def _compute_and_push(
        self, env: simpy.Environment, node: Node, seconds: float, step: Step
    ) -> Generator[Awaited | float, Any, Awaited]:
        """Compute a gradient, push it, and do other work; return the push, for which nobody has waited."""
        share = self.scenario.job.between
        yield from self._compute(env, seconds * (1.0 - share), step)
        if self.losses is not None:
            self._report(node, self.losses)
        pushing = self._exchange(node, Operation.PUSH, self._tensors, 0)
        yield from self._compute(env, seconds * share, step)
        return pushing

    def _meet(self, env: simpy.Environment, node: Node, step: Step) -> Waiting:
        barrier = EnterBarrier(node.new_call(), "step", self.scenario.cluster.call_timeout)
        yield from self._wait(env, finish(node.call(barrier)), step)

    def _change(self, env: simpy.Environment, node: Node, step: Step, taken: int) -> Waiting:
        """Ask for another policy, if there is to be one after this step."""
        for change in self.changes:
            if change.after == taken:
                yield from self._wait(env, self._ask_for(node, change, env.now, taken), step)

    def _ask_for(self, node: Node, change: ChangeSection, now: float, taken: int) -> Waiting:
        self.record.changes.append((now, taken))
        yield from finish(node.call(ChangePolicy(node.new_call(), change.policy, [], self._timeout)))

    def _catch_up(self, node: Node, session: Session, now: float) -> Waiting:
        """Ask for the policies up to that of the step with which this worker begins, behind those that are in force."""
        record = self.record
        missed = [change for change in self.changes if change.after <= record.number][len(record.changes) :]
        policies = [str(get_policy(change.policy)) for change in missed]
        known = {known.options.policy for known in session.records}
        over = min((policies.index(policy) + 1 if policy in policies else 0 for policy in known), default=0)
        record.changes += [(now, record.number)] * over
        for change in missed[over:]:
            yield from self._ask_for(node, change, now, record.number)

    def _overlapped(self, env: simpy.Environment, node: Node) -> Waiting:
        """Train so that layers are pushed while others are computed (Jayarajan and others 2019, "P3")."""
        job, layers = self.scenario.job, self._tensors
        pending: list[Awaited | None] = [None] * len(layers)
        steps = self._steps_left
        for index in range(steps):
            yield from self._save(env)
            step = Step(env.now, math.nan, math.nan, answered=False)
            share = next(self.times) / len(layers)
            try:
                for layer in range(len(layers)):
                    yield from self._need(env, pending[layer], step)
                    yield from self._compute(env, share * job.forward, step)
                if self.losses is not None:
                    self._report(node, self.losses)
                for layer in reversed(range(len(layers))):
                    yield from self._compute(env, share * (1.0 - job.forward), step)
                    priority = -layer if job.priorities else 0
                    pending[layer] = self._exchange(node, Operation.PUSHPULL, [layers[layer]], priority)
                step.computed = env.now
                if index == steps - 1:
                    for event in pending:
                        assert event is not None, "all layers were pushed"
                        yield from self._wait(env, finish(event), step)
                # Whether the servers took it is seen in the next step, where its parameters are needed.
                step.answered = True
                yield from self._change(env, node, step, len(self.record.steps) + 1)
            finally:
                self._ended(env, step)
            self.on_step()

    def _need(self, env: simpy.Environment, pending: Awaited | None, step: Step) -> Waiting:
        if pending is None:
            return
        start = env.now
        try:
            yield from self._wait(env, finish(pending), step)
        finally:
            step.stalled += env.now - start

    def _save(self, env: simpy.Environment) -> Waiting:
        job, record = self.scenario.job, self.record
        if job.checkpoint_interval and env.now - self._saved_at >= job.checkpoint_interval:
            start = env.now
            try:
                yield job.checkpoint_cost
            finally:
                record.saving += env.now - start
                record.ended = self._saved_at = env.now

    def _save_together(self, env: simpy.Environment, node: Node) -> Waiting:
        record, every = self.record, self.scenario.job.save_every
        if every and record.steps and len(record.steps) % every == 0:
            start = env.now
            try:
                yield from self.saves.save(node, record.rank, len(record.steps))
            finally:
                record.saving += env.now - start
                record.ended = env.now

    def _initialise(self, node: Node, rank: Rank) -> Waiting:
        """Initialise the tensors that this worker has to do with, those of each group with one call."""
        self._tensors = [tensor for tensor in self.scenario.tensors if not tensor.group or rank in tensor.group]
        self._parts = _parts_of(tuple(self._tensors))
        for group in dict.fromkeys(tensor.group for tensor in self._tensors):
            parts = [(tensor.key, tensor.spec) for tensor in self._tensors if tensor.group == group]
            timeout, options = (
                self.scenario.cluster.call_timeout,
                KeyOptions(group=group, digests=(b"zeros",) * len(parts)),
            )
            yield from finish(node.call(Transfer(node.new_call(), Operation.INIT, parts, timeout, options=options)))

    def _exchange(self, node: Node, operation: Operation, tensors: list[TensorSection], priority: int) -> Awaited:
        if self._separate and operation is Operation.PUSHPULL:
            calls = [self._exchange(node, each, tensors, priority) for each in (Operation.PUSH, Operation.PULL)]
            return node.env.process(_both(*calls))
        parts = self._parts if tensors is self._tensors else [(tensor.key, tensor.spec) for tensor in tensors]
        return node.call(Transfer(node.new_call(), operation, parts, self._timeout, priority, _NO_OPTIONS))


@functools.lru_cache(maxsize=64)
def _parts_of(tensors: tuple[TensorSection, ...]) -> list[tuple[Key, TensorSpec]]:
    """Return what a call names tensors by. Thousands of workers have the same, which is in the cache then."""
    return [(tensor.key, tensor.spec) for tensor in tensors]


def _both(first: Awaited, second: Awaited) -> Generator[Awaited, Any, AiokvError | None]:
    """Wait for two calls; the process's value is the error of the first one that fails, or None."""
    errors: list[AiokvError | None] = [(yield first), (yield second)]
    return errors[0] or errors[1]


def serve(node: Node, run: Run, env: simpy.Environment, timeout: float, start: float) -> Waiting:
    """Let a server join at a time, as a process; its state machine says itself when it is over."""
    try:
        if start > env.now:
            yield start - env.now
        yield from finish(node.call(Join(node.new_call(), timeout)))
    except AiokvError as error:
        run.logs.append(LogRecord(env.now, node.name, "error", str(error)))
        node.stop(str(error))
    except simpy.Interrupt:
        # A fault has hit the node, and has ended it already.
        pass
