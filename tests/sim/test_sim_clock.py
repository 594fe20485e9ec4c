"""Simulated time: everything happens in the order in which it happens in SimPy's own environment."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as some

from sim.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

DELAYS = some.sampled_from([0.0, 0.0, 0.5, 1.0])
PLANS = some.lists(some.lists(DELAYS, max_size=4), min_size=1, max_size=6)


def _after(env: simpy.Environment, delay: float, action: Callable[[], None]) -> None:
    """Call something later; in SimPy's own environment, by a time-out."""
    if isinstance(env, Clock):
        env.after(delay, action)
        return
    callbacks = env.timeout(delay).callbacks
    assert callbacks is not None, "it has not happened yet"
    callbacks.append(lambda _: action())


def _pause(env: simpy.Environment, delay: float) -> simpy.Event | float:
    """Return what a process yields to wait for a time."""
    return delay if isinstance(env, Clock) else env.timeout(delay)


def _history(env: simpy.Environment, plans: list[list[float]]) -> list[tuple[Any, ...]]:
    """Return what happens when, in a program that waits, calls later, triggers, interrupts and stops in the middle."""
    seen: list[tuple[Any, ...]] = []

    def call(name: int, place: int) -> None:
        seen.append(("called", env.now, name, place))

    def trigger(event: simpy.Event, name: int) -> None:
        event.succeed(name)

    def interrupt() -> None:
        for each in processes:
            if each.is_alive:
                each.interrupt()

    def process(name: int, delays: list[float]) -> Generator[Any, Any, None]:
        for place, delay in enumerate(delays):
            _after(env, delay, partial(call, name, place))
            done = env.event()
            try:
                yield _pause(env, delay)
                _after(env, delay, partial(trigger, done, name))
                seen.append(("waited", env.now, name, (yield done), env.peek()))
            except simpy.Interrupt:
                seen.append(("interrupted", env.now, name, place))

    processes = [env.process(process(name, delays)) for name, delays in enumerate(plans)]
    _after(env, 0.5, interrupt)
    env.run(until=processes[0])
    seen.append(("stopped", env.now))
    env.run()
    return [*seen, ("over", env.now, env.peek())]


@given(PLANS)
def test_all_happens_in_the_order_of_simpy(plans: list[list[float]]) -> None:
    assert _history(Clock(), plans) == _history(simpy.Environment(), plans)


def test_who_waits_for_a_process_gets_its_result_or_its_error() -> None:
    clock = Clock()
    got: list[object] = []

    def adds(seconds: float) -> Generator[Any, Any, float]:
        yield seconds
        return clock.now + 1.0

    def fails() -> Generator[Any, Any, None]:
        yield 2.0
        raise ValueError("in vain")

    def waits() -> Generator[Any, Any, None]:
        early = clock.process(adds(1.0))
        try:
            yield clock.process(fails())
        except ValueError as error:
            got.append(str(error))
        # That has happened long ago.
        got.append((yield early))
        got.append((yield clock.process(adds(3.0))))

    clock.run(until=clock.process(waits()))
    assert got == ["in vain", 2.0, 6.0]


def test_an_error_that_nobody_handles_ends_the_run() -> None:
    clock = Clock()
    clock.event().fail(ValueError("nobody waits"))
    with pytest.raises(ValueError, match="nobody waits"):
        clock.run()
