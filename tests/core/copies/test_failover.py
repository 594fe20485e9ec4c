"""A server that is lost at any moment: its standby goes on with the same bits, and every push counts once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.copies.conftest import Asked, Script, Worker, World


def train(worker: Worker) -> Script:
    """Push one key a few times, each time what follows from the value before."""
    value = np.arange(6, dtype=np.float32)
    yield [worker.init("w", value)]
    first = worker.pull("w", (6,))
    yield [first]
    value = np.frombuffer(first.value, np.float32)
    for step in range(4):
        pushed = worker.push("w", np.float32(0.3) * value + np.float32(step - worker.rank), step)
        yield [pushed]
        value = np.frombuffer(pushed.value, np.float32)


def undisturbed(make_world: type[World]) -> bytes:
    """Return the value that comes of it when nobody is lost."""
    world = make_world(0)
    world.run(train)
    return world.value("w").tobytes()


@pytest.mark.parametrize("seed", range(5))
def test_standby_has_the_same_bits(make_world: type[World], seed: int) -> None:
    world = make_world(seed)
    world.run(train)
    assert world.value("w").tobytes() == undisturbed(make_world)
    world.settle()
    assert world.state == "ready"
    assert world.value("w", node=world.standby).tobytes() == world.value("w").tobytes()


@pytest.mark.parametrize("seed", range(20))
def test_lost_server(make_world: type[World], seed: int) -> None:
    expected = undisturbed(make_world)
    world = make_world(seed)
    world.begin(train)
    world.go_on(world.random.randint(30, 150))
    while world.state != "ready":
        world.step()
    world.crash(world.primary)
    world.go_on()
    assert world.value("w").tobytes() == expected


@pytest.mark.parametrize("policy", ["asp", "ssp:9"])
def test_clock_of_a_worker_goes_on_behind_that_with_which_the_copy_was_made(
    make_world: type[World], policy: str
) -> None:
    """The copy of a copy is made when there are two pushes, and two more come before it serves."""
    world = make_world(0)

    def make(worker: Worker) -> Script:
        yield [worker.init("w", np.zeros(6, np.float32), policy)]

    def push(worker: Worker) -> Script:
        for _ in range(2):
            yield [worker.push("w", np.ones(6, np.float32))]

    world.run(make)
    for _ in range(2):
        world.run(push)
        world.settle()
        assert world.state == "ready"
        world.crash(world.primary)
        world.settle()
    asked: list[Asked] = []

    def ask(worker: Worker) -> Script:
        asked.append(worker.ask(m.GetPushes("w", (6,), "float32", 0, 6, 60.0)))
        yield asked[-1:]

    world.run(ask)
    assert [each.answer for each in asked] == [m.Pushes(4, 4, policy)] * len(asked)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("policy", ["asp", "bsp", "backup:0"])
def test_clock_of_the_newest_update_is_known(make_world: type[World], policy: str, dtype: str) -> None:
    """Of integers a standby gets the values, and not the updates. Nobody is let in at a clock that is over."""
    world = make_world(0)

    def work(worker: Worker) -> Script:
        yield [worker.init("w", np.zeros(6, dtype), policy)]
        for step in range(3):
            yield [worker.push("w", np.ones(6, dtype), step)]

    world.run(work)
    world.settle()
    assert world.state == "ready"
    world.crash(world.primary)
    world.settle()
    answer = m.BoundaryClock(1, 3, waits=policy == "bsp")
    effects = world.primary.machine.handle(st.Received(SCHEDULER, 0, m.Boundary(1, 2)), now=world.now)
    assert effects == [ef.Send(SCHEDULER, 0, answer)]


@pytest.mark.parametrize("policy", ["asp", "bsp", "backup:0"])
def test_who_has_joined_and_pushed_nothing_is_known_as_that(make_world: type[World], policy: str) -> None:
    """Nothing of it is in a checkpoint that is made under another policy."""
    world = make_world(0, workers=3)
    newcomer = world.workers[2]
    newcomer.state = "left"
    world.publish()

    def work(worker: Worker) -> Script:
        yield [worker.init("w", np.zeros(6, np.float32), policy)]
        for step in range(2):
            yield [worker.push("w", np.ones(6, np.float32), step)]

    def nothing(worker: Worker) -> Script:
        yield []

    def join(worker: Worker) -> Script:
        yield [worker.ask(m.GetPushes("w", (6,), "float32", 0, 6, 60.0))]

    world.run(work, work, nothing)
    newcomer.state, newcomer.since = "joining", 2
    world.publish()
    newcomer.connect(world.primary)
    world.run(nothing, nothing, join)
    world.settle()
    assert world.state == "ready"
    admitted = [node.machine._catalog.chunks["w", 0].admitted for node in (world.primary, world.standby) if node]
    assert admitted == [{2: (2, 0)}] * 2
