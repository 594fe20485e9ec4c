"""What runs on the nodes: the loop of a worker, and a server that serves until the job is over."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import simpy

from aiokv.core.stimuli import Depart, Join, Operation, Transfer
from aiokv.errors import AiokvError
from sim.record import LogRecord, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiokv.core.session import Session
    from sim.node import Node
    from sim.record import Run, WorkerRecord
    from sim.scenario import Scenario

Waiting = Generator[simpy.Event, Any, None]
"""Part of a SimPy process."""


def finish(call: simpy.Event) -> Waiting:
    """Wait for the end of a node's call.

    Raises:
        AiokvError: the call failed.
    """
    error = yield call
    if error is not None:
        raise error


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """A worker that joins, initialises all tensors and trains for a number of steps."""

    node: Node
    """The node it runs on."""
    session: Session
    """That node's state machine."""
    scenario: Scenario
    """How many steps, which tensors and time-outs."""
    record: WorkerRecord
    """Is filled in."""
    times: Iterator[float]
    """Seconds of each step."""
    on_step: Callable[[], None]
    """Is called after every step."""

    def run(self, env: simpy.Environment) -> Waiting:
        """Live the worker's life, as a SimPy process."""
        record, node = self.record, self.node
        record.begun = record.ended = env.now
        try:
            yield from finish(node.call(Join(node.new_call(), self.scenario.cluster.join_timeout)))
            record.rank = self.session.rank
            yield from self._transfer(Operation.INIT)
            yield from self._train(env)
        except AiokvError as error:
            record.error = error
        except simpy.Interrupt:
            # A fault has hit the node: there is nobody to say goodbye to.
            record.struck = True
            return
        try:
            yield from finish(node.call(Depart(node.new_call(), self.scenario.cluster.call_timeout)))
        except AiokvError as error:
            record.error = record.error or error
        except simpy.Interrupt:
            record.struck = True
            return
        node.stop(f"{node.name} is done")

    def _train(self, env: simpy.Environment) -> Waiting:
        record = self.record
        record.begun = record.ended = env.now
        for _ in range(self.scenario.steps):
            start = env.now
            computed: float | None = None
            answered = False
            try:
                yield env.timeout(next(self.times))
                computed = env.now
                yield from self._transfer(Operation.PUSHPULL)
                answered = True
            finally:
                record.ended = env.now
                record.steps.append(Step(start, env.now if computed is None else computed, env.now, answered))
            self.on_step()

    def _transfer(self, operation: Operation) -> Waiting:
        tensors = [(tensor.key, tensor.spec) for tensor in self.scenario.tensor]
        stimulus = Transfer(self.node.new_call(), operation, tensors, self.scenario.cluster.call_timeout)
        return finish(self.node.call(stimulus))


def serve(node: Node, run: Run, env: simpy.Environment, timeout: float) -> Waiting:
    """Let a server join, as a SimPy process; its state machine says itself when it is over."""
    try:
        yield from finish(node.call(Join(node.new_call(), timeout)))
    except AiokvError as error:
        run.logs.append(LogRecord(env.now, node.name, "error", str(error)))
        node.stop(str(error))
    except simpy.Interrupt:
        # A fault has hit the node, and has ended it already.
        pass
