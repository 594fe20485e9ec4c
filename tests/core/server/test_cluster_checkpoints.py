"""A server's part of the cluster's checkpoints: which version of each chunk is in one, and when it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.joiner import Joiner
from aiokv.core.rules import Rules
from aiokv.core.saved_state import ChunkState
from aiokv.core.server.catalog import Catalog
from aiokv.core.server.cluster_checkpoints import Checkpoints
from aiokv.core.server.neighbours import Neighbours
from aiokv.core.server.rounds.deciding import Deciding
from aiokv.errors import DataError
from aiokv.types import SCHEDULER, Role
from aiokv.wire import messages as m
from tests.core.conftest import ADDRESS

AT_2 = {"checkpoint_at": 2, "checkpoints": "/ck", "run": 3}
PLACE = "/ck/run-000003-clock-0000000002"
FILE = m.CheckpointFile("part-0.safetensors", 100, "ab", 10, "cd")

Make = Callable[..., Any]


@pytest.fixture
def server(make_server: Make) -> Any:
    """A server of two workers with the keys "v" and "w", and a checkpoint after the second round."""
    return keyed(make_server(2, settings=AT_2))


def keyed(rig: Any) -> Any:
    """Let the keys be initialised."""
    for key in ("v", "w"):
        rig.init(key, 1.0)
    return rig


def say(rig: Any, message: m.Message) -> list[ef.Effect]:
    """Let the scheduler say something."""
    return list(rig.handle(st.Received(SCHEDULER, 0, message)))


def both_push(rig: Any, key: str, clock: int) -> None:
    """Let both workers push a key."""
    for rank in range(2):
        rig.push(rank, key=key, clock=clock)


def told(rig: Any) -> list[m.Message]:
    """Return what the scheduler was told of checkpoints."""
    kinds = (m.CheckpointPart, m.CheckpointClock)
    return [send.message for send in rig.seen(ef.Send) if isinstance(send.message, kinds)]


def held(rig: Any) -> list[tuple[int, Any, int, dict[int, int]]]:
    """Return what was held on to: clock, key, version, and the pushes of each rank."""
    return [(each.clock, each.key, each.version, dict(each.states[0].counts)) for each in rig.seen(ef.Snapshot)]


# --- which version it is ---


def test_value_is_held_before_the_first_update_of_a_later_round(server: Any) -> None:
    for clock in (1, 2):
        both_push(server, "w", clock)
    assert not held(server)
    server.push(0, key="w", clock=3)
    assert not held(server), "the round may still wait for long"
    server.push(1, key="w", clock=3)
    assert held(server) == [(2, "w", 2, {0: 2, 1: 2})]
    kinds = [type(effect) for effect in server.effects if isinstance(effect, (ef.Snapshot, ef.Apply))]
    assert kinds == [ef.Apply, ef.Apply, ef.Snapshot, ef.Apply]


def test_each_chunk_is_held_once(server: Any) -> None:
    for clock in (1, 2, 3, 4):
        both_push(server, "w", clock)
    assert held(server) == [(2, "w", 2, {0: 2, 1: 2})]


def test_nothing_is_held_without_checkpoints(make_server: Make) -> None:
    rig = keyed(make_server(2))
    for clock in (1, 2, 3):
        both_push(rig, "w", clock)
    assert not held(rig)


def test_what_has_not_changed_is_held_when_all_workers_are_past_the_round_and_all_is_written(server: Any) -> None:
    for clock in (1, 2, 3):
        both_push(server, "w", clock)
    both_push(server, "v", 1)
    effects = say(server, m.CheckpointRest(2))
    assert held(server) == [(2, "w", 2, {0: 2, 1: 2}), (2, "v", 1, {0: 1, 1: 1})]
    (write,) = [effect for effect in effects if isinstance(effect, ef.WriteSnapshots)]
    assert (write.clock, write.place, write.index, write.rules.clock) == (2, PLACE, 0, 2)
    server.handle(st.PartWritten(2, FILE))
    assert told(server) == [m.CheckpointPart(2, FILE)]


def test_checkpoint_begins_at_the_latest_when_all_workers_are_past_its_round(server: Any) -> None:
    for clock in (1, 2):
        both_push(server, "w", clock)
    say(server, m.CheckpointRest(2))
    assert held(server) == [(2, "v", 0, {}), (2, "w", 2, {0: 2, 1: 2})]


def test_writing_that_fails_is_told_with_the_reason(server: Any) -> None:
    say(server, m.CheckpointRest(2))
    server.handle(st.PartWritten(2, None, "the disk is full"))
    assert told(server) == [m.CheckpointPart(2, None, "the disk is full")]


def test_pushes_are_answered_while_a_checkpoint_is_written(server: Any) -> None:
    for clock in (1, 2, 3):
        both_push(server, "w", clock)
    say(server, m.CheckpointRest(2))
    pushes = [server.push(rank, key="w", clock=4) for rank in range(2)]
    assert [push.answer for push in pushes] == [m.Done(4), m.Done(4)]


def test_what_has_come_and_is_not_made_yet_is_waited_for(make_server: Make) -> None:
    rig = keyed(make_server(2, "asp", settings=AT_2))
    rig.hold = True
    for clock in (1, 2):
        rig.push(0, key="w", clock=clock)
    say(rig, m.CheckpointRest(2))
    assert held(rig) == [(2, "v", 0, {})]
    rig.finish()
    assert not rig.seen(ef.WriteSnapshots)
    rig.finish()
    assert held(rig) == [(2, "v", 0, {}), (2, "w", 2, {0: 2})]
    assert len(rig.seen(ef.WriteSnapshots)) == 1


def test_rounds_that_were_decided_are_waited_for_too(make_server: Make) -> None:
    rig = make_server(3, "k_sync:2", settings=AT_2)
    rig.init("w", 1.0)
    rig.push(2, key="w", clock=1)
    say(rig, m.CheckpointRest(2))
    assert not rig.seen(ef.WriteSnapshots), "the step of rank 2 may be in the next round"
    rig.push(0, key="w", clock=1)
    assert held(rig) == [(2, "w", 1, {0: 1, 2: 1})]
    assert len(rig.seen(ef.WriteSnapshots)) == 1


def test_what_is_never_made_is_not_waited_for_for_ever(make_server: Make) -> None:
    """Otherwise there would be no other one any more."""
    rig = make_server(3, "k_sync:2", settings=AT_2)
    rig.init("w", 1.0)
    rig.push(2, key="w", clock=1)
    say(rig, m.CheckpointRest(2))
    assert told(rig) == []
    say(rig, m.CheckpointRest(2))
    reason = "something of key 'w' was not made for long"
    assert [log.text for log in rig.seen(ef.Log)] == [f"there is no checkpoint of round 2: {reason}"]
    assert told(rig) == [m.CheckpointPart(2, None, reason)]


def test_who_is_still_writing_is_in_no_hurry_when_the_others_are_waited_for(server: Any) -> None:
    say(server, m.CheckpointRest(2))
    assert say(server, m.CheckpointRest(2)) == []
    server.handle(st.PartWritten(2, FILE))
    assert say(server, m.CheckpointRest(2)) == []
    assert told(server) == [m.CheckpointPart(2, FILE)]


def test_late_steps_are_not_counted_so_that_they_may_come_again(make_server: Make) -> None:
    rig = make_server(3, "k_sync:2", settings=AT_2)
    rig.init("w", 1.0)
    for rank in (0, 1, 2):
        rig.push(rank, key="w", clock=1)
    say(rig, m.CheckpointRest(2))
    assert held(rig) == [(2, "w", 1, {0: 1, 1: 1})]


def test_keys_of_a_bundle_that_is_divided_meanwhile_are_held_one_by_one(make_server: Make) -> None:
    rig = make_server(2, settings=AT_2)
    rig.bundle_size = 2
    rig.ask(0, m.InitBundle(("a", "b"), ((1,), (1,)), "float32", "bsp", 5.0, (), (b"a", b"b")), 1.0)
    rig.ask(0, m.PushBundle(0, 1, 0, False, 5.0, 0, 1), 1.0)
    say(rig, m.CheckpointRest(2))
    assert not held(rig)
    rig.ask(0, m.Pull("a", (1,), "float32", 0, 1, 0, 5.0))
    rig.ask(1, m.PushBundle(0, 1, 0, False, 5.0, 0, 1), 1.0)
    assert held(rig) == [(2, "a", 1, {0: 1, 1: 1}), (2, "b", 1, {0: 1, 1: 1})]
    assert len(rig.seen(ef.WriteSnapshots)) == 1


def test_one_that_is_dropped_waits_for_nothing(make_server: Make) -> None:
    rig = keyed(make_server(2, settings=AT_2))
    rig.push(0, key="w", clock=1)
    say(rig, m.CheckpointRest(2))
    say(rig, m.CheckpointDropped(2))
    rig.push(1, key="w", clock=1)
    assert held(rig) == [(2, "v", 0, {})]
    assert not rig.seen(ef.WriteSnapshots)


# --- what is said of each key ---


def test_keys_are_described_as_they_were_initialised(make_server: Make) -> None:
    rig = make_server(2, settings=AT_2)
    rig.init("w", 1.0, group=(0,), policy="asp")
    rig.init_rows({1: 2.0}, initializer={"name": "normal", "scale": 0.5, "seed": 1}, lazy=False)
    say(rig, m.CheckpointRest(2))
    dense, table = (each.states[0] for each in rig.seen(ef.Snapshot))
    assert (dense.key, dense.shape, dense.start, dense.stop, dense.policy, dense.group) == (
        "w",
        (1,),
        0,
        1,
        "asp",
        (0,),
    )
    assert (dense.digest, dense.sparse) == (b"1.0", False)
    assert (table.key, table.stop, table.sparse, table.lazy) == ("t", 10, True, False)
    assert table.initializer == {"name": "normal", "scale": 0.5, "seed": 1}


def test_keys_of_a_bundle_are_described_one_by_one(make_server: Make) -> None:
    rig = make_server(2, settings=AT_2)
    rig.bundle_size = 3
    rig.ask(0, m.InitBundle(("a", "b"), ((1,), (2,)), "float32", "bsp", 5.0, (), (b"a", b"b")), 1.0)
    for clock in (1, 2, 3):
        for rank in range(2):
            rig.ask(rank, m.PushBundle(0, clock, 0, False, 5.0, 0, clock), 1.0)
    (snapshot,) = rig.seen(ef.Snapshot)
    assert [(state.key, state.shape, state.start, state.stop, state.digest) for state in snapshot.states] == [
        ("a", (1,), 0, 1, b"a"),
        ("b", (2,), 0, 2, b"b"),
    ]
    assert all(dict(state.counts) == {0: 2, 1: 2} for state in snapshot.states)
    # When it is divided its keys are not held again.
    rig.ask(0, m.Pull("a", (1,), "float32", 0, 1, 0, 5.0))
    say(rig, m.CheckpointRest(2))
    assert len(rig.seen(ef.Snapshot)) == 1


def test_changes_of_the_rule_for_later_rounds_are_not_in_it(server: Any) -> None:
    server.ask(0, m.SetOptimizer("sgd", {"learning_rate": 0.5}, "sum", 5.0))
    for since, rate in ((3, 0.25), (4, 0.125)):
        server.ask(0, m.ChangeOptimizer(since, {"learning_rate": rate}, 5.0))
    for clock in (1, 2, 3):
        both_push(server, "w", clock)
    say(server, m.CheckpointRest(2))
    (write,) = server.seen(ef.WriteSnapshots)
    # One for the next round may have been made before the last push of this one.
    assert write.rules.changes == ((3, {"learning_rate": 0.25}),)
    assert write.rules.clock == 2


# --- keys that come and go ---


def test_key_that_is_made_meanwhile_is_in_it(server: Any) -> None:
    for clock in (1, 2, 3):
        both_push(server, "w", clock)
    server.init("late", 5.0)
    say(server, m.CheckpointRest(2))
    assert (2, "late", 0, {}) in held(server)


@pytest.mark.parametrize("clock", [2, 3])
@pytest.mark.parametrize("kind", ["one", "bundle", "table"])
def test_key_that_is_made_behind_the_round_is_not_in_it(make_server: Make, kind: str, clock: int) -> None:
    """Wherever others are by then: it is in none of the parts, or in all of them."""
    rig = make_server(2, settings=AT_2)
    if kind == "one":
        rig.ask(0, m.Init("late", (1,), "float32", 0, 1, "bsp", 5.0, (), b"d", clock), 1.0)
    elif kind == "table":
        rig.init_rows({}, clock=clock)
    else:
        rig.bundle_size = 2
        rig.ask(0, m.InitBundle(("late", "l"), ((1,), (1,)), "float32", "bsp", 5.0, (), (b"a", b"b"), clock), 1.0)
        rig.ask(0, m.Pull("late", (1,), "float32", 0, 1, 0, 5.0))
    say(rig, m.CheckpointRest(2))
    assert bool(held(rig)) == (clock == 2)


def test_what_is_pushed_to_a_key_that_is_made_behind_the_round_changes_nothing(server: Any) -> None:
    server.ask(0, m.Init("late", (1,), "float32", 0, 1, "bsp", 5.0, (), b"d", 3), 1.0)
    both_push(server, "late", 4)
    assert not held(server)


def test_key_that_is_deleted_behind_the_round_is_held_on_to_before(server: Any) -> None:
    both_push(server, "v", 1)
    effects = server.ask(0, m.Delete(("v",), 5.0, 3)) and server.effects
    kinds = [type(effect) for effect in effects if isinstance(effect, (ef.Snapshot, ef.Forget))]
    assert kinds == [ef.Snapshot, ef.Forget]
    say(server, m.CheckpointRest(2))
    assert held(server) == [(2, "v", 1, {0: 1, 1: 1}), (2, "w", 0, {})]


def test_key_that_is_deleted_before_the_first_push_behind_the_round_is_not_in_it(server: Any) -> None:
    server.ask(0, m.Delete(("v",), 5.0, 2))
    say(server, m.CheckpointRest(2))
    assert [key for _, key, _, _ in held(server)] == ["w"]


def test_key_that_is_deleted_while_none_is_asked_for_is_gone(make_server: Make) -> None:
    rig = keyed(make_server(2))
    rig.ask(0, m.Delete(("v",), 5.0, 3))
    assert not held(rig)


# --- async ---


def test_each_chunk_of_async_keys_has_a_cut_of_its_own(make_server: Make) -> None:
    rig = keyed(make_server(2, "asp", settings=AT_2))
    for clock in (1, 2, 3):
        rig.push(0, key="w", clock=clock)
    # What the other worker had pushed before that round comes after the cut.
    rig.push(1, key="w", clock=1)
    rig.push(1, key="v", clock=1)
    rig.push(0, key="v", clock=4)
    assert held(rig) == [(2, "w", 2, {0: 2}), (2, "v", 1, {1: 1})]
    assert not told(rig)


# --- what makes one impossible ---


def test_update_of_an_earlier_round_after_the_cut_drops_it(make_server: Make) -> None:
    rig = make_server(2, settings=AT_2)
    rig.init("w", 1.0)
    both_push(rig, "w", 3)
    both_push(rig, "w", 2)
    reason = "key 'w' has got an update of round 2 after others had gone on"
    assert told(rig) == [m.CheckpointPart(2, None, reason)]
    assert rig.seen(ef.DropSnapshots) == [ef.DropSnapshots(2)]
    say(rig, m.CheckpointRest(2))
    assert not rig.seen(ef.WriteSnapshots)


def test_only_one_at_a_time(server: Any) -> None:
    for clock in (1, 2, 3):
        both_push(server, "w", clock)
    say(server, m.CheckpointRest(2))
    for clock in (4, 5):
        both_push(server, "w", clock)
    server.handle(st.PartWritten(2, FILE))
    say(server, m.CheckpointAt(6))
    for clock in (6, 7):
        both_push(server, "w", clock)
    say(server, m.CheckpointRest(6))
    assert [clock for clock, _, _, _ in held(server)] == [2, 2, 6, 6]
    assert [write.clock for write in server.seen(ef.WriteSnapshots)] == [2, 6]


def test_who_still_writes_a_dropped_one_answers_when_it_has_done_so(server: Any) -> None:
    """It could not make the next one before, and the others would make theirs in vain."""
    for clock in (1, 2, 3):
        both_push(server, "w", clock)
    say(server, m.CheckpointRest(2))
    say(server, m.CheckpointDropped(2))
    say(server, m.CheckpointAt(4))
    both_push(server, "w", 4)
    assert told(server) == []
    server.handle(st.PartWritten(2, FILE))
    assert told(server) == [m.CheckpointClock(4, 4)]
    both_push(server, "w", 5)
    assert held(server)[-1] == (4, "w", 4, {0: 4, 1: 4})


def test_who_still_writes_one_is_not_asked_any_longer_for_what_is_dropped_meanwhile(server: Any) -> None:
    say(server, m.CheckpointRest(2))
    say(server, m.CheckpointDropped(2))
    say(server, m.CheckpointAt(4))
    say(server, m.CheckpointDropped(4))
    server.handle(st.PartWritten(2, FILE))
    assert told(server) == []


def test_what_is_held_for_another_scheduler_is_let_go(server: Any) -> None:
    for clock in (1, 2, 3):
        both_push(server, "w", clock)
    assert ef.DropSnapshots(2) in say(server, m.CheckpointAt(4))


def test_one_that_is_asked_for_again_has_all_keys_again(server: Any) -> None:
    both_push(server, "w", 1)
    say(server, m.CheckpointRest(2))
    server.handle(st.PartWritten(2, FILE))
    say(server, m.CheckpointAt(2))
    say(server, m.CheckpointRest(2))
    assert [key for _, key, _, _ in held(server)] == ["v", "w"] * 2


def test_dropped_one_is_let_go(server: Any) -> None:
    for clock in (1, 2, 3):
        both_push(server, "w", clock)
    assert say(server, m.CheckpointDropped(2)) == [ef.DropSnapshots(2)]
    assert say(server, m.CheckpointDropped(2)) == []


def test_open_one_is_dropped_when_the_scheduler_is_gone(server: Any) -> None:
    for clock in (1, 2, 3):
        both_push(server, "w", clock)
    assert ef.DropSnapshots(2) in server.handle(st.PeerLost(SCHEDULER, "reset"))


def test_load_in_the_middle_drops_it_and_the_next_one_goes_by_the_loaded_clock(server: Any) -> None:
    for clock in (1, 2, 3):
        both_push(server, "w", clock)
    server.ask(0, m.PutRules("", {}, "sum", (), 20, 5.0))
    assert told(server) == [m.CheckpointPart(2, None, "values were loaded meanwhile")]
    say(server, m.CheckpointAt(19))
    assert told(server)[1:] == [m.CheckpointClock(19, 20)]
    say(server, m.CheckpointAt(22))
    both_push(server, "w", 22)
    both_push(server, "w", 23)
    assert held(server)[-1] == (22, "w", 4, {0: 4, 1: 4})


def test_load_of_something_later_leaves_it_out(server: Any) -> None:
    server.ask(0, m.PutRules("", {}, "sum", (), 2, 5.0))
    assert told(server) == []
    server.ask(0, m.PutRules("", {}, "sum", (), 3, 5.0))
    assert told(server) == [m.CheckpointClock(2, 3)]


def test_load_while_something_is_unmade_drops_it(make_server: Make) -> None:
    rig = make_server(3, "k_sync:2", settings=AT_2)
    rig.init("w", 1.0)
    rig.push(2, key="w", clock=1)
    say(rig, m.CheckpointRest(2))
    rig.ask(0, m.PutRules("", {}, "sum", (), 1, 5.0))
    assert told(rig) == [m.CheckpointPart(2, None, "values were loaded meanwhile")]


# --- asked for ---


def test_scheduler_asks_for_a_round_that_is_not_over(make_server: Make) -> None:
    rig = keyed(make_server(2, settings={"checkpoints": "/ck", "run": 3}))
    both_push(rig, "w", 1)
    say(rig, m.CheckpointAt(2))
    both_push(rig, "w", 2)
    both_push(rig, "w", 3)
    assert told(rig) == [m.CheckpointClock(2, 1)]
    assert held(rig) == [(2, "w", 2, {0: 2, 1: 2})]


def test_round_that_is_over_is_answered_with_the_newest(make_server: Make) -> None:
    rig = keyed(make_server(2, settings={"checkpoints": "/ck", "run": 3}))
    for clock in (1, 2, 3):
        both_push(rig, "w", clock)
    say(rig, m.CheckpointAt(2))
    both_push(rig, "w", 4)
    assert told(rig) == [m.CheckpointClock(2, 3)]
    assert not held(rig)


# --- the beginning of a job from one ---


def state(key: str = "w", start: int = 0, stop: int = 4, **changes: Any) -> ChunkState:
    """Return what is saved of four elements that both workers have pushed twice."""
    fields: dict[str, Any] = {
        "shape": (4,),
        "dtype": "float32",
        "version": 2,
        "counts": ((0, 2), (1, 2)),
        "policy": "bsp",
    }
    return ChunkState(key=key, start=start, stop=stop, **(fields | {"digest": b"d"} | changes))


RULES = m.RulesState("sgd", {"learning_rate": 0.5}, "sum", ((2, {"learning_rate": 0.25}),), 2)


def resumed(make_server: Make, *states: ChunkState, load: bool = True, workers: int = 2, **options: Any) -> Any:
    """Return a server of two workers that has read these parts, and is filled from them unless told otherwise.

    They are those of a checkpoint of two workers.
    """
    settings = {"resume": "/ck/old", "checkpoint_at": 4, "checkpoints": "/ck", "run": 3}
    rig = make_server(workers, attach=False, settings=settings, **options)
    rig.handle(st.Join(0, 10.0))
    rig.handle(st.Connected(SCHEDULER))
    assert ef.ReadCheckpoint("/ck/old") in rig.publish()
    rig.waiting = [rig.attach(rank) for rank in range(workers)]
    rig.handle(st.CheckpointRead(2, RULES, list(states), 2))
    if load:
        rig.handle(st.SnapshotsLoaded())
    return rig


def test_workers_are_let_in_when_the_values_are_there(make_server: Make) -> None:
    rig = resumed(make_server, state(), load=False)
    assert [asked.answer for asked in rig.waiting] == [None, None]
    rig.handle(st.SnapshotsLoaded())
    assert [asked.answer for asked in rig.waiting] == [m.Done(), m.Done()]


def test_keys_go_on_where_they_were(make_server: Make) -> None:
    rig = resumed(make_server, state("w", 0, 1, shape=(1,), digest=b"1.0"))
    (loading,) = rig.seen(ef.LoadSnapshots)
    (wanted,) = loading.chunks
    assert (loading.place, wanted.key, wanted.start, wanted.stop, wanted.version) == ("/ck/old", "w", 0, 1, 2)
    assert wanted.rule.learning_rate == 0.25
    rig.values["w", 0][2] = rig.values["w", 0].pop(0)
    assert rig.init("w", 1.0).answer == m.Done(2), "the same initial value is no other one"
    rig.pushed = {(0, "w"): 2, (1, "w"): 2}
    pushes = [rig.push(rank, clock=3) for rank in range(2)]
    assert [push.answer for push in pushes] == [m.Done(3), m.Done(3)]


def test_another_initial_value_is_refused(make_server: Make) -> None:
    rig = resumed(make_server, state("w", 0, 1, shape=(1,), digest=b"1.0"))
    assert "key 'w'" in str(rig.init("w", 7.0).answer)


def test_rule_goes_on_too(make_server: Make) -> None:
    rig = resumed(make_server, state())
    assert [type(effect) for effect in rig.effects if isinstance(effect, (ef.Configure, ef.Install))] == [
        ef.Configure,
        ef.Install,
    ]
    rules = rig.ask(0, m.GetRules(5.0)).answer
    assert (rules.params["learning_rate"], rules.changes, rules.clock) == (0.5, RULES.changes, 2)


def test_checkpoint_without_a_rule_sets_none(make_server: Make) -> None:
    rig = make_server(2, attach=False, settings={"resume": "/ck/old"})
    rig.handle(st.Join(0, 10.0))
    rig.handle(st.Connected(SCHEDULER))
    rig.publish()
    rig.handle(st.CheckpointRead(2, m.RulesState("", {}, "sum", (), 2), [state(policy="sum")], 2))
    assert not rig.seen(ef.Configure)
    assert rig.seen(ef.LoadSnapshots)[0].chunks[0].rule.name == "assign"


@pytest.mark.parametrize("index", [0, 1])
def test_other_servers_take_other_parts_of_a_key(make_server: Make, index: int) -> None:
    # 16 bytes are cut over both; the checkpoint was written by three.
    parts = [state("w", 0, 1), state("w", 1, 3), state("w", 3, 4)]
    rig = resumed(make_server, *parts, index=index, servers=2, chunk_bytes=16)
    (wanted,) = rig.seen(ef.LoadSnapshots)[0].chunks
    sources = {0: [0, 1], 2: [1, 2]}
    assert wanted.sources == sources[wanted.start]
    assert wanted.stop == wanted.start + 2


def test_parts_with_different_async_cuts_count_nothing_twice(make_server: Make) -> None:
    parts = [
        state("w", 0, 2, policy="asp", version=5, counts=((0, 3), (1, 2))),
        state("w", 2, 4, policy="asp", version=4, counts=((0, 1), (1, 3))),
    ]
    rig = resumed(make_server, *parts)
    (wanted,) = rig.seen(ef.LoadSnapshots)[0].chunks
    assert (wanted.version, wanted.sources) == (5, [0, 1])
    push = {"shape": (4,), "stop": 4, "sequence": 3, "clock": 3}
    assert rig.push(0, key="w", **push).answer == m.Done(5), "it is there already"


def test_tables_and_keys_without_elements_go_on_too(make_server: Make) -> None:
    table = {"shape": (10,), "sparse": True, "initializer": {"name": "zeros"}, "lazy": False}
    rig = resumed(make_server, state("t", 0, 4, **table), state("t", 4, 10, **table), state("e", 0, 0, shape=(0,)))
    assert [(each.key, each.start, each.stop) for each in rig.seen(ef.InstallRows)] == [("t", 0, 10)]
    assert [(each.key, each.sources) for each in rig.seen(ef.LoadSnapshots)[0].chunks] == [("t", [0, 1]), ("e", [2])]
    assert rig.init_rows({}, rank=1, lazy=False, initializer={"name": "zeros"}).answer == m.Done(2)


def bundled(*keys: str) -> list[ChunkState]:
    """Return what is saved of keys of two elements that were one chunk, in another order."""
    whole = {"shape": (2,), "bundle": tuple(sorted(keys))}
    return [state(key, 0, 2, digest=key.encode(), **whole) for key in keys]


def test_keys_that_were_one_chunk_are_one_again(make_server: Make) -> None:
    rig = resumed(make_server, *bundled("b", "a"))
    (install,) = rig.seen(ef.Install)
    assert [(piece.key, piece.size) for piece in install.pieces] == [("a", 2), ("b", 2)]
    (wanted,) = rig.seen(ef.LoadSnapshots)[0].chunks
    assert (wanted.key, wanted.start, wanted.stop, wanted.sources) == ("a", -1, 3, [1, 0])
    rig.values["a", -1][2] = rig.values["a", -1].pop(0)
    rig.bundle_size = 4
    init = m.InitBundle(("a", "b"), ((2,), (2,)), "float32", "bsp", 5.0, (), (b"a", b"b"))
    number = rig.ask(0, init, 1.0).answer.bundle
    pushes = [rig.ask(rank, m.PushBundle(number, 3, 2, False, 5.0, 0, 3), 1.0) for rank in range(2)]
    assert [push.answer for push in pushes] == [m.Done(3), m.Done(3)]
    assert not rig.seen(ef.Divide)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(bundled("a", "b")[:1], id="one is not there"),
        pytest.param([*bundled("a", "b"), *bundled("b", "c")], id="one was made anew"),
    ],
)
def test_keys_of_which_not_all_are_there_go_on_alone(make_server: Make, parts: list[ChunkState]) -> None:
    rig = resumed(make_server, *parts)
    assert all(each.start == 0 for each in rig.seen(ef.LoadSnapshots)[0].chunks)


def test_keys_that_have_several_servers_now_go_on_alone(make_server: Make) -> None:
    rigs = [resumed(make_server, *bundled(*"abcdef"), index=index, servers=2) for index in range(2)]
    chunks = [chunk for rig in rigs for chunk in rig.seen(ef.LoadSnapshots)[0].chunks]
    assert sorted((chunk.key, chunk.start) for chunk in chunks) == [(key, 0) for key in "abcdef"]
    assert all(rig.seen(ef.Install) for rig in rigs)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([state("w", 0, 2)], id="its end is missing"),
        pytest.param([state("w", 2, 4)], id="its beginning is missing"),
        pytest.param([state("w", 0, 2), state("w", 2, 4, shape=(5,))], id="it was made anew"),
    ],
)
def test_key_that_is_not_all_there_is_left_out(make_server: Make, parts: list[ChunkState]) -> None:
    rig = resumed(make_server, *parts, state("v"))
    assert [each.key for each in rig.seen(ef.LoadSnapshots)[0].chunks] == ["v"]
    assert "key 'w' was made or deleted while the checkpoint was" in rig.seen(ef.Log)[0].text


def begins(rig: Any, rank: int, key: str = "w") -> Any:
    """Return what a worker is told of where it goes on."""
    return rig.ask(rank, m.GetPushes(key, (1,), "float32", 0, 1, 5.0)).answer


def test_more_workers_begin_where_the_others_go_on(make_server: Make) -> None:
    rig = resumed(make_server, state("w", 0, 1, shape=(1,)), workers=3)
    assert [begins(rig, rank) for rank in range(3)] == [m.Pushes(2, 2, "bsp")] * 3
    rig.values["w", 0][2] = rig.values["w", 0].pop(0)
    rig.pushed = {(rank, "w"): 2 for rank in range(3)}
    pushes = [rig.push(rank, 1.0, clock=3) for rank in range(3)]
    assert [push.answer for push in pushes] == [m.Done(3)] * 3
    assert rig.values["w", 0][3] == rig.values["w", 0][2] + 3.0


def test_more_workers_begin_beside_the_fastest_where_all_go_their_own_way(make_server: Make) -> None:
    counts = ((0, 2), (1, 1))
    rig = resumed(make_server, state("w", 0, 1, shape=(1,), policy="asp", counts=counts), workers=3)
    assert [begins(rig, rank).count for rank in range(3)] == [2, 1, 2]


def test_fewer_workers_go_on_without_the_others(make_server: Make) -> None:
    rig = resumed(make_server, state("w", 0, 1, shape=(1,)), workers=1)
    rig.values["w", 0][2] = rig.values["w", 0].pop(0)
    rig.pushed = {(0, "w"): 2}
    assert rig.push(0, clock=3).answer == m.Done(3)
    assert rig.machine._catalog.chunks["w", 0].counted == {0: 3}


def test_keys_of_a_group_have_no_more_workers_than_before(make_server: Make) -> None:
    part = state("w", 0, 1, shape=(1,), group=(0, 2), counts=((0, 2), (2, 2)))
    rig = resumed(make_server, part, workers=4)
    assert [begins(rig, rank).count for rank in range(4)] == [2, 0, 2, 0]


def test_key_of_a_group_of_which_a_rank_is_not_there_can_t_be_loaded(make_server: Make) -> None:
    rig = resumed(make_server, state("w", group=(0, 2)), load=False)
    text = "key 'w' is one of the group (0, 2), and this job has 2 workers"
    assert [text in str(asked.answer) for asked in rig.waiting] == [True, True]
    assert rig.seen(ef.Stop)[0].failed


@pytest.mark.parametrize(("made", "versions"), [(2, [3, 4]), (1, [3, 3])])
def test_what_a_policy_does_in_phases_goes_on_in_the_same_one(
    make_server: Make, made: int, versions: list[int]
) -> None:
    """Two rounds are in step; behind them each push is an update of its own."""
    rig = resumed(make_server, state("w", 0, 1, shape=(1,), policy="sync_switch:0.5:4", made=made))
    rig.values["w", 0][2] = rig.values["w", 0].pop(0)
    rig.pushed = {(0, "w"): 2, (1, "w"): 2}
    pushes = [rig.push(rank, clock=3) for rank in range(2)]
    assert [push.answer.version for push in pushes] == versions


def test_how_far_a_policy_has_come_is_saved(make_server: Make) -> None:
    rig = keyed(make_server(2, settings=AT_2))
    for clock in (1, 2):
        both_push(rig, "w", clock)
    say(rig, m.CheckpointRest(2))
    assert {each.key: each.states[0].made for each in rig.seen(ef.Snapshot)} == {"w": 2, "v": 0}


def test_decided_rounds_begin_anew_behind_the_pushes_that_are_there(make_server: Make) -> None:
    rig = resumed(make_server, state("w", 0, 1, shape=(1,), policy="k_sync:2"))
    rig.values["w", 0][2] = rig.values["w", 0].pop(0)
    rig.pushed = {(0, "w"): 2, (1, "w"): 2}
    pushes = [rig.push(rank, clock=3) for rank in range(2)]
    assert [push.answer.version for push in pushes] == [3, 3]


@pytest.mark.parametrize("when", ["read", "set", "loaded"])
def test_what_can_t_be_loaded_ends_the_server_and_is_told_to_the_workers(make_server: Make, when: str) -> None:
    error = DataError("part-0 is torn")
    rig = make_server(2, attach=False, settings={"resume": "/ck/old"})
    rig.handle(st.Join(0, 10.0))
    rig.handle(st.Connected(SCHEDULER))
    rig.publish()
    waiting = rig.attach(0)
    if when == "read":
        rig.handle(st.CheckpointRead(0, None, [], 0, error))
    elif when == "set":
        rig.handle(st.CheckpointRead(2, m.RulesState("no such rule", {}, "sum", (), 2), [], 2))
    else:
        rig.handle(st.CheckpointRead(2, RULES, [state()], 2))
        rig.handle(st.SnapshotsLoaded(error))
    assert ("no such rule" if when == "set" else "part-0 is torn") in str(waiting.answer)
    (stop,) = rig.seen(ef.Stop)
    assert stop.failed
    assert "the checkpoint can't be loaded" in stop.reason
    assert str(rig.attach(1).answer) == str(waiting.answer), "who comes later is told too"


def test_who_asks_what_it_waits_for_is_told(make_server: Make) -> None:
    rig = resumed(make_server, state(), load=False)
    waiting = rig.ask(0, m.GetWaiting(), peer=99).answer
    assert {call.reason for call in waiting.calls} == {"the checkpoint is not loaded yet"}


def test_who_waits_too_long_for_the_values_is_told_what_is_missing(make_server: Make) -> None:
    rig = resumed(make_server, state(), load=False)
    rig.tick(6.0)
    assert "server-0 has not loaded its part of the checkpoint" in str(rig.waiting[0].answer)


def test_next_checkpoint_is_the_one_after_the_loaded_one(make_server: Make) -> None:
    rig = resumed(make_server, state("w", 0, 1, shape=(1,)))
    rig.values["w", 0][2] = rig.values["w", 0].pop(0)
    rig.pushed = {(0, "w"): 2, (1, "w"): 2}
    for clock in (3, 4, 5):
        both_push(rig, "w", clock)
    assert held(rig) == [(4, "w", 4, {0: 4, 1: 4})]


@pytest.mark.parametrize(("asked", "told"), [(3, [m.CheckpointClock(3, 4)]), (4, [])])
def test_who_takes_the_place_of_another_server_may_be_past_what_it_was_asked_for_before(
    asked: int, told: list[m.Message]
) -> None:
    joiner = Joiner(role=Role.SERVER, name="server-1", incarnation=1, scheduler=ADDRESS, advertised=ADDRESS)
    checkpoints = Checkpoints(Catalog(), Rules(), Deciding(Neighbours(joiner)))
    assert checkpoints.asked(asked) == [ef.Send(SCHEDULER, 0, m.CheckpointClock(asked, 0))]
    view = m.View(9, (), (), 1.0, 64, 64, 10.0)
    assert checkpoints.taken_over(view, 1, 4) == [ef.Send(SCHEDULER, 0, message) for message in told]
