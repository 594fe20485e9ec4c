"""A standby that has one of its own, while a place moves: two nodes always have all that anybody was told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.server.copies.copying import Copying
from aiokv.core.server.copies.standby import Standby
from aiokv.core.server.copies.subjects import CALLS, DECISIONS, GONE, SETTINGS, TOTALS, subject_of
from aiokv.types import STANDBY
from aiokv.wire import messages as m
from tests.core.copies.test_copying import ONES, fail_over, init, once, there

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.server.copies.subjects import Subject
    from tests.core.copies.conftest import Asked, Node, Worker, World


def push(worker: Worker) -> Asked:
    """Push the number of the push, which is the value then."""
    number = worker.sequences.get("w", 0)
    return worker.push("w", (number + 1) * ONES, number)


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """A server of one key, with a standby that has all of it; the place does not move by itself."""
    world = make_world(0, workers=1)
    world.run(once(init, push))
    world.settle()
    world.switches = False
    return world


def chain(world: World) -> None:
    """Let the standby get one of its own, which has all."""
    world.move()
    world.settle()
    assert world.tail_state == "ready"


def values(world: World) -> list[list[float]]:
    """Return what all three nodes have."""
    return [world.value("w", node=node).tolist() for node in (world.primary, there(world.standby), there(world.tail))]


def to_tail(world: World) -> int:
    """Return the number of the standby's link to its own one."""
    (peer,) = [peer for peer in there(world.standby).links if peer < STANDBY]
    return peer


def forwarding(node: Node) -> Standby:
    """Return the part of a standby that hands on what comes."""
    twin = node.machine._replication.twin
    assert isinstance(twin, Standby)
    return twin


def test_all_three_have_what_a_worker_was_told(world: World) -> None:
    chain(world)
    world.run(once(push))
    assert values(world) == [[2, 2, 2]] * 3


def test_nobody_is_answered_before_the_last_one_has_it(world: World) -> None:
    chain(world)
    tail = there(world.tail)
    tail.alive = False
    asked: list[Asked] = []

    def ask(worker: Worker) -> Asked:
        asked.append(push(worker))
        return asked[0]

    world.begin(once(ask))
    for _ in range(30):
        world.step()
        if not any(world.ready.values()):
            break
    assert there(world.standby).machine._catalog.chunks["w", 0].version == 2
    assert asked[0].answer is None


def test_the_place_goes_over_and_nothing_is_sent_anew(world: World) -> None:
    chain(world)
    third, link = there(world.tail), to_tail(world)
    second = there(world.standby)
    copies = third.machine._catalog.chunks["w", 0].version
    world.switch()
    world.settle()
    assert (world.primary, world.standby) == (second, third)
    assert link in second.links, "it is the link that there was"
    assert third.machine._catalog.chunks["w", 0].version == copies
    world.run(once(push))
    fail_over(world)
    assert world.value("w").tolist() == [2, 2, 2]


def test_the_server_is_lost_when_only_the_others_have_its_last_update(world: World) -> None:
    chain(world)
    world.begin(once(push))
    while there(world.standby).machine._catalog.chunks["w", 0].version < 2:
        world.step()
    world.crash(world.primary)
    world.go_on()
    world.settle()
    assert world.value("w").tolist() == [2, 2, 2]
    assert world.value("w", node=world.standby).tolist() == [2, 2, 2]


def test_keys_that_are_new_or_change_while_all_is_sent_again(make_world: Callable[..., World]) -> None:
    """More of them than are sent at a time."""
    world = make_world(0, workers=1)
    keys = [f"k{number}" for number in range(20)]
    world.run(once(*(lambda worker, key=key: worker.init(key, ONES) for key in keys)))
    world.settle()
    world.switches = False
    world.move()
    while not forwarding(there(world.standby)).forwarding.is_up:
        world.step()
    pushes = [lambda worker, key=key: worker.push(key, ONES, 0) for key in keys]
    world.run(once(*pushes, lambda worker: worker.init("n", ONES), lambda worker: worker.ask(m.Delete(("k3",), 60.0))))
    world.settle()
    assert world.tail_state == "ready"
    for node in (there(world.standby), there(world.tail)):
        assert ("k3", 0) not in node.machine._catalog.chunks
        assert world.value("n", node=node).tolist() == [1, 1, 1]
        assert world.value("k7", node=node).tolist() == world.value("k7").tolist()


def test_a_link_that_ends_while_all_is_sent_again(world: World) -> None:
    """It is the one between the first two."""
    world.move()
    copying = world.primary.machine._replication.twin
    assert isinstance(copying, Copying)
    while not copying._again.is_sent:
        world.step()
    for peer in [peer for peer in world.primary.links if peer < STANDBY]:
        world.cut(world.primary, peer)
    world.settle()
    assert world.tail_state == "ready"
    world.run(once(push))
    assert values(world) == [[2, 2, 2]] * 3


def test_a_standby_that_has_no_link_to_its_own_one_goes_on_without(world: World) -> None:
    chain(world)
    world.cut(there(world.standby), to_tail(world))
    world.settle()
    assert world.tail is None
    world.run(once(push))
    world.settle()
    assert world.value("w", node=world.standby).tolist() == [2, 2, 2]
    chain(world)


def test_it_is_dropped_again_until_a_view_says_so(world: World) -> None:
    chain(world)
    told = world.told
    world.told = lambda node, message: None  # type: ignore[method-assign]
    world.cut(there(world.standby), to_tail(world))
    world.settle()
    world.told = told  # type: ignore[method-assign]
    assert world.tail is not None
    world.publish()
    world.settle()
    assert world.tail is None


def test_one_that_can_not_be_reached_is_dropped(world: World) -> None:
    """The scheduler hears of it from the standby only: the process lives on behind a broken network."""
    world.move()
    world.lost = lambda node: None  # type: ignore[method-assign]
    while world.tail_state == "expected":
        world.step()
    world.crash(there(world.tail))
    begun = world.now
    while world.tail is not None:
        world.step()
    assert world.now - begun >= 5.0
    world.run(once(push))
    assert world.value("w").tolist() == [2, 2, 2]


def test_one_that_says_something_else_is_dropped(world: World) -> None:
    chain(world)
    node = there(world.standby)
    world.feed(node, st.Received(to_tail(world), 0, m.Heartbeat()), b"")
    world.settle()
    assert world.tail is None
    world.move()
    while not [peer for peer in node.links if peer < STANDBY]:
        world.step()
    world.feed(node, st.Received(to_tail(world), 1, m.Error(1, "not now", {})), b"")
    world.settle()
    assert world.tail_state == "ready", "it had nothing yet, so it is connected to again"


def test_links_of_before_do_not_count(world: World) -> None:
    chain(world)
    old, machine = STANDBY - 99, there(world.standby).machine
    for stimulus in (
        st.ConnectFailed(old, "refused"),
        st.Received(old, 0, m.Replicated(99)),
        st.PeerLost(old, "reset"),
    ):
        assert machine.handle(stimulus, now=world.now) == []
    closed = ef.Disconnect(old, "nobody waits for this connection any longer")
    assert machine.handle(st.Connected(old), now=world.now) == [closed]


def test_a_scheduler_that_does_not_know_hears_again_that_the_last_one_is_ready(world: World) -> None:
    chain(world)
    world.tail_state = "filling"
    world.publish()
    world.settle()
    assert world.tail_state == "ready"


def test_a_standby_that_takes_the_place_alone_needs_its_own_one_no_longer(world: World) -> None:
    chain(world)
    world.tail, world.replaces = None, False
    world.crash(world.primary)
    world.settle()
    world.run(once(push))
    assert world.value("w").tolist() == [2, 2, 2]
    assert world.standby is None


def test_a_standby_that_takes_the_place_too_early_sends_all_anew(world: World) -> None:
    """Its own one had not everything yet."""
    world.move()
    while not forwarding(there(world.standby)).forwarding.is_up:
        world.step()
    world.crash(world.primary)
    world.settle()
    world.run(once(push))
    fail_over(world)
    assert world.value("w").tolist() == [2, 2, 2]


def test_what_comes_of_a_key_before_all_of_it_does_is_left_out(world: World) -> None:
    world.move()
    world.settle()
    node = there(world.tail)
    twin = forwarding(node)
    twin._fills = True
    slot, _ = node.store.land(4)
    for message, kept in (
        (m.Replicate(99, "v", 0, 1, (), 1, 1), slot),
        (m.CopyDropped(100, "v", 0, 0, 1, 1, "late"), None),
    ):
        effects = node.machine.handle(st.Received(twin.peer or 0, message.number, message, kept, 4), now=world.now)
        assert [effect for effect in effects if isinstance(effect, ef.Stop)] == []
        assert (ef.Free(slot) in effects) == (kept is not None)


@pytest.mark.parametrize(
    ("message", "subject"),
    [
        (m.Replicate(1, "w", 4, 1, (), 1, 1), ("w", 4)),
        (m.CopyDropped(1, "w", 4, 0, 1, 1, "late"), ("w", 4)),
        (m.Copy(1, ("a", "b"), (), (), "float32", -1, 3, "bsp", (), 0, 0, ()), ("a", -1)),
        (m.ForgetKey(1, "w"), ("w", GONE)),
        (m.CopyTotals(1, "w", ()), ("w", TOTALS)),
        (m.CopySettings(1, m.RulesState("", {}, "sum", (), 0), (), (), 0), SETTINGS),
        (m.CopyDecisions(1, "a", (), (), (), ()), DECISIONS),
        (m.CopySettled(1, ()), CALLS),
        (m.CopyPush(1, 0, 1, 1, (), 0, b"", (), "float32", 0, None), CALLS),
    ],
)
def test_what_a_message_is_about(message: m.Message, subject: Subject) -> None:
    assert subject_of(message) == subject


def test_values_of_lower_precision_go_on_as_sums_in_higher_one(make_world: Callable[..., World]) -> None:
    world = make_world(0)
    world.run(once(lambda worker: worker.init("h", np.zeros(3, np.float16))))
    world.settle()
    world.switches = False
    chain(world)
    # In float16 the sum would be 2048 or 2050.
    world.run(once(lambda worker: worker.push("h", np.full(3, 1024 + worker.rank, np.float16), 0)))
    world.run(once(lambda worker: worker.push("h", np.full(3, 0.5, np.float16), 1)))
    world.settle()
    nodes = (world.primary, there(world.standby), there(world.tail))
    assert [world.value("h", dtype="float16", node=node).tobytes() for node in nodes] == [
        world.value("h", dtype="float16").tobytes()
    ] * 3
