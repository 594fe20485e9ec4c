"""Processes wait for times, events, futures and other generators, and errors come where they wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import simpy

from sim.clock import Clock
from sim.process import Future

if TYPE_CHECKING:
    from sim.process import Activity


@pytest.fixture
def clock() -> Clock:
    return Clock()


def inner(clock: Clock, seconds: float) -> Activity:
    yield seconds
    return clock.now


def test_a_generator_is_gone_on_with_until_it_is_over(clock: Clock) -> None:
    def outer() -> Activity:
        first = yield inner(clock, 1.0)
        future = Future(clock)
        future.finish("done")
        return first, (yield inner(clock, 2.0)), (yield future), clock.now

    assert clock.run(until=clock.process(outer())) == (1.0, 3.0, "done", 3.0)


def test_an_error_in_one_comes_where_the_other_waits_for_it(clock: Clock) -> None:
    def fails() -> Activity:
        yield 1.0
        raise ValueError("it failed")

    def outer() -> Activity:
        try:
            yield fails()
        except ValueError as error:
            yield 1.0
            return str(error), clock.now

    assert clock.run(until=clock.process(outer())) == ("it failed", 2.0)


def test_an_error_that_nobody_expects_ends_the_process(clock: Clock) -> None:
    def fails() -> Activity:
        yield 1.0
        raise ValueError("it failed")

    def outer() -> Activity:
        yield fails()

    with pytest.raises(ValueError, match="it failed"):
        clock.run(until=clock.process(outer()))


@pytest.mark.parametrize("waits_for", ["time", "event", "future"])
def test_who_is_interrupted_hears_of_it_where_it_waits_and_of_nothing_else(clock: Clock, waits_for: str) -> None:
    event, future = clock.event(), Future(clock)

    def waits() -> Activity:
        try:
            yield {"time": 5.0, "event": event, "future": future}[waits_for]
        except simpy.Interrupt as interrupt:
            return interrupt.cause, clock.now

    def outer() -> Activity:
        found = yield waits()
        yield 10.0
        return found, clock.now

    process = clock.process(outer())
    clock.after(1.0, process.interrupt, ("a fault",))
    clock.after(2.0, event.succeed)
    clock.after(2.0, future.finish, (None,))
    assert clock.run(until=process) == (("a fault", 1.0), 11.0)
    assert not process.is_alive
