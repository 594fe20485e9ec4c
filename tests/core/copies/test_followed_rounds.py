"""Rounds that one server decides for all keys: what its standby knows of them when it takes its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.core import stimuli as st
from aiokv.core.server.copies import followed_rounds
from aiokv.core.server.copies.copying import Copying
from aiokv.core.server.copies.followed_rounds import FollowedRounds
from aiokv.core.server.copies.subjects import DECISIONS
from aiokv.core.server.rounds.chunk import Chunk
from aiokv.core.server.rounds.decisions import Decisions
from aiokv.core.server.rounds.open_rounds import Dropped, OpenRounds
from aiokv.core.server.rounds.updates import Contribution, Waiter
from aiokv.policy import Token, get_policy
from aiokv.types import STANDBY, TensorSpec
from aiokv.wire import messages as m
from tests.core.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.core.copies.conftest import Asked, Script, Worker, World

ONES = np.ones(3, np.float32)


def steps(*asks: Callable[[Worker], list[Asked]]) -> Callable[[Worker], Script]:
    """Return a script that asks for one thing after the other."""

    def script(worker: Worker) -> Script:
        for ask in asks:
            yield ask(worker)

    return script


def init(policy: str) -> Callable[[Worker], list[Asked]]:
    """Return what makes a key of zeros, whose value is the sum of what is pushed in a round."""
    return lambda worker: [worker.init("w", np.zeros(3, np.float32), policy)]


def push(read: int, value: float = 1.0, **changes: Any) -> Callable[[Worker], list[Asked]]:
    """Return what pushes a number, computed from a version."""
    return lambda worker: [worker.push("w", ONES * np.float32(value), read, **changes)]


def nothing(_: Worker) -> list[Asked]:
    """Ask for nothing."""
    return []


def fail_over(world: World) -> None:
    """Let the standby take the primary's place, after all that is under way."""
    world.settle()
    assert world.state == "ready"
    world.crash(world.primary)
    world.settle()


def answers(world: World, rank: int) -> m.Message | None:
    """Return what a worker was answered last."""
    return world.workers[rank].waiting[-1].answer


def test_push_that_was_dropped_counts_as_one_that_has_come(make_world: Callable[..., World]) -> None:
    world = make_world(0)
    world.run(steps(init("ringmaster:1")))
    world.run(steps(push(0)), steps(nothing))
    world.run(steps(nothing), steps(push(0)))
    assert answers(world, 1) == m.Value(1, dropped="stale", round=1)
    fail_over(world)
    world.run(steps(nothing), steps(push(1, 5.0)))
    assert answers(world, 1) == m.Value(2, round=2)
    assert world.value("w").tolist() == [5, 5, 5]


def test_push_that_comes_again_is_told_that_it_was_dropped(make_world: Callable[..., World]) -> None:
    world = make_world(0)
    world.run(steps(init("ringmaster:1")))
    world.run(steps(push(0)), steps(nothing))
    world.run(steps(nothing), steps(push(0)))
    fail_over(world)
    worker = world.workers[1]
    worker.sequences["w"] = worker.clock = 0
    world.run(steps(nothing), steps(push(0)))
    assert answers(world, 1) == m.Value(1, dropped="stale", round=1)


def test_who_wants_no_value_hears_of_a_drop_when_the_rounds_before_are_made(make_world: Callable[..., World]) -> None:
    """Only then all pushes before it are made or dropped, and a count of them says all."""
    world = make_world(0)
    world.run(steps(init("k_sync:1")))
    world.run(steps(push(0)), steps(nothing))
    world.run(steps(nothing), steps(push(0, want_value=False)))
    assert answers(world, 1) == m.Done(1, "late")


def test_rounds_that_were_announced_are_not_decided_again(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=3)
    world.run(steps(init("k_sync:2")))
    world.run(steps(push(0, 1.0)), steps(push(0, 2.0)), steps(nothing))
    fail_over(world)
    assert world.value("w").tolist() == [3, 3, 3]
    world.run(steps(nothing), steps(nothing), steps(push(0, 9.0)))
    assert answers(world, 2) == m.Value(1, dropped="late", round=1)


def test_all_steps_are_told_in_as_many_messages_as_it_takes(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_rounds, "STEPS", 2)
    world = make_world(0, workers=1)
    world.run(steps(init("k_async:1")))
    world.settle()
    world.run(steps(*[push(read) for read in range(5)]))
    world.crash(world.standby)  # type: ignore[arg-type]
    fail_over(world)
    (decisions,) = world.primary.machine._deciding.groups
    assert list(decisions.rounds) == [1, 2, 3, 4, 5]
    assert decisions.resumed == 5


def test_news_that_were_handed_on_first_stay_the_newest() -> None:
    steps = [(0, 1, 1, ""), (1, 1, 1, ""), (1, 2, 2, ""), (0, 2, 2, ""), (0, 3, 0, "late"), (1, 3, 3, "")]
    followed = FollowedRounds()
    for some in (steps[-1:], steps):
        followed.decided(m.CopyDecisions(1, "k_sync:1", (), tuple(some), (), ()))
    decisions = followed._of(("k_sync:1", ()))
    assert decisions.newest == 3
    assert decisions.rounds == {1: [Token(0, 1), Token(1, 1)], 2: [Token(1, 2), Token(0, 2)], 3: [Token(1, 3)]}
    assert list(decisions.rounds) == [1, 2, 3]
    assert decisions.highs == {1: 1, 2: 2, 3: 3}
    assert decisions.settled == {0: 2, 1: 3}


def test_key_that_has_left_a_policy_of_decided_rounds(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    world.run(steps(init("ringmaster:1"), push(0), push(0)))

    def change(worker: Worker) -> list[Asked]:
        return [worker.ask(m.SetPolicy("asp", ("w",), "ringmaster:1", (), 60.0, 0))]

    def switched(worker: Worker) -> list[Asked]:
        return [worker.ask(m.Switched(("w",), "ringmaster:1", (), 60.0))]

    world.run(steps(change))
    fail_over(world)
    world.run(steps(switched))
    world.workers[0].sequences["w"] = world.workers[0].clock = 1
    world.run(steps(push(0)))
    assert answers(world, 0) == m.Value(1, dropped="stale")
    world.run(steps(push(1, 4.0)))
    assert answers(world, 0) == m.Value(2)


def test_key_that_is_deleted_and_made_again(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    world.run(steps(init("k_async:1"), push(0)))
    world.run(steps(lambda worker: [worker.ask(m.Delete(("w",), 60.0))]))
    world.workers[0].sequences.clear()
    world.run(steps(init("k_async:1"), push(0, 7.0)))
    fail_over(world)
    assert world.value("w").tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (m.CopyDropped(99, "w", 0, 0, 5, 5, "late"), "push 5 of rank 0 is made or dropped after 0"),
        (m.CopyDropped(99, "other", 0, 0, 1, 1, "late"), "a push of rank 0 is dropped, but it is not here"),
        (m.Replicate(99, "w", 0, 1, ((0, 2, 0, 2),), 2, 1, round=1), "push 2 of rank 0 is made or dropped after 0"),
    ],
)
def test_standby_that_misses_a_push_ends(make_world: Callable[..., World], wrong: m.Message, reason: str) -> None:
    world = make_world(0, workers=1)
    world.run(steps(init("k_async:1")))
    world.settle()
    node = world.standby
    assert node is not None
    (peer,) = [peer for peer, (other, _) in node.links.items() if other is world.primary and peer > STANDBY]
    world.feed(node, st.Received(peer, 99, wrong), b"")
    (stop,) = node.stops
    assert stop.failed
    assert reason in stop.reason


# --- the parts, alone ---


def test_decision_that_comes_twice_is_one() -> None:
    rounds = FollowedRounds()
    message = m.CopyDecisions(1, "k_async:1", (), ((0, 1, 1, ""), (1, 1, 0, "late")), (), ())
    rounds.decided(message)
    rounds.decided(message)
    decisions = rounds._of(("k_async:1", ()))
    assert decisions.rounds == {1: [Token(0, 1)]}
    assert decisions.counts == {0: 1, 1: 1}


def late(rounds: OpenRounds, chunk: Chunk, sequence: int) -> Dropped:
    """Let a push of rank 0 come and be dropped."""
    rounds.enter(0, sequence, sequence)
    chunk.pushed[0] = sequence
    waiter = Waiter(9, sequence, 0, 1.0, [chunk], 1)
    dropped = Dropped(0, Contribution(0, sequence, 0, sequence, None, 0), waiter)
    rounds.dropped.append(dropped)
    return dropped


@pytest.mark.parametrize(("in_order", "first"), [(True, []), (False, [2])])
def test_worker_hears_of_its_pushes_in_their_order_where_there_is_a_standby(in_order: bool, first: list[int]) -> None:
    chunk = Chunk("w", 0, 3, TensorSpec((3,), "float32"), get_policy("k_sync:2"), "key 'w'")
    rounds = OpenRounds(Decisions(("k_sync:2", ()), None), 1)
    rounds.enter(0, 1, 1)
    late(rounds, chunk, 2)
    taken = rounds.take_dropped(chunk, in_order=in_order)
    assert [one.contribution.sequence for one in taken] == first
    assert rounds.is_in_order(chunk) == in_order
    rounds.settle(chunk, Contribution(0, 1, 0, 1, None, 0))
    taken += rounds.take_dropped(chunk, in_order=in_order)
    assert [one.contribution.sequence for one in taken] == [2]
    assert chunk.reflected[0] == 2


def test_chunk_is_copied_when_all_who_were_told_of_a_drop_count() -> None:
    chunk = Chunk("w", 0, 3, TensorSpec((3,), "float32"), get_policy("k_sync:2"), "key 'w'")
    rounds = OpenRounds(Decisions(("k_sync:2", ()), None), 1)
    late(rounds, chunk, 1).told = True
    assert not rounds.is_in_order(chunk)
    rounds.take_dropped(chunk, in_order=False)
    assert rounds.is_in_order(chunk)


def test_what_is_decided_while_the_link_is_down_is_copied_as_a_whole(make_world: Callable[..., World]) -> None:
    world = make_world(0)
    world.run(steps(init("ringmaster:1")))
    world.run(steps(push(0)), steps(nothing))
    world.settle()
    twin = world.primary.machine._replication.twin
    assert isinstance(twin, Copying)
    twin.link.is_up = False
    chunk = world.primary.machine._catalog.chunks["w", 0]
    assert chunk.rounds is not None
    twin.dropped(chunk, Dropped(1, Contribution(1, 1, 0, 1, None, 1), Waiter(9, 1, 1, 1.0, [chunk], 1)))
    assert ("w", 0) in twin._dirty
    twin.decided(chunk.rounds.decisions, [Token(1, 1)])
    assert DECISIONS in twin._dirty


def test_reader_waits_for_what_may_have_come_to_the_server_before(make_world: Callable[..., World]) -> None:
    world = make_world(0)
    world.settle()
    roster = world.primary.machine._answers.roster
    decisions = Decisions(("k_async:1", ()), None, 2, {1: [Token(1, 1)], 2: [Token(1, 2)]})
    decisions.resumed, decisions.counts[1] = 2, 2
    rounds = OpenRounds(decisions, 2)
    assert rounds.stage(0, roster, applying=False) == 2, "the other worker has never pushed this key"
    rounds.clocks[1] = 1
    assert rounds.stage(0, roster, applying=False) == 1


def test_reader_waits_for_first_steps_of_which_the_server_before_may_have_had_all(
    make_world: Callable[..., World],
) -> None:
    """Nothing is known yet of the keys that their workers push, as before any server was lost."""
    world = make_world(0)
    world.settle()
    roster = world.primary.machine._answers.roster
    decisions = Decisions(("ringmaster:3", ()), None)
    decisions.close(1, [Token(1, 1)])
    decisions.resumed = 1
    rounds = OpenRounds(decisions, 1)
    assert rounds.stage(0, roster, applying=False) == 0
    rounds.clocks[1] = 1
    assert rounds.stage(0, roster, applying=False) == 1, "it has come"


@pytest.mark.parametrize("index", [0, 1])
def test_only_the_first_server_decides_on(index: int) -> None:
    server = Server(2, "k_sync:2", index=index, servers=2)
    decisions = Decisions(("k_sync:2", ()), None, 4)
    server.machine._deciding.resume(decisions, {})
    assert decisions.resumed == 4
    assert (decisions.decider is None) == (index == 1)
    assert server.machine._deciding.of(("k_sync:2", ())) is decisions
