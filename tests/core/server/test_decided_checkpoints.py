"""What a checkpoint says of rounds that one server decides, and how a server goes on from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.roster import Roster
from aiokv.core.saved_state import ChunkState, RoundsState
from aiokv.core.server.copies.followed_rounds import FollowedRounds, all_decided
from aiokv.core.server.neighbours import Neighbours
from aiokv.core.server.rounds.deciding import Deciding
from aiokv.errors import AiokvError
from aiokv.policy import Token
from aiokv.policy.adasync import SIZE
from aiokv.types import SCHEDULER, peer_of_server
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.core.conftest import Asked, Server

    Make = Callable[..., Server]

SETTINGS = {"checkpoint_at": 2, "checkpoints": "/ck", "run": 3}
RULES = m.RulesState("sgd", {"learning_rate": 0.5}, "sum", (), 2)


def server_of(make_server: Make, policy: str, workers: int = 3) -> Server:
    """Return a server with the key "w" and a checkpoint after clock 2."""
    rig = make_server(workers, policy, settings=SETTINGS)
    rig.init()
    return rig


def written(rig: Server, clock: int = 2) -> tuple[ChunkState, list[RoundsState]]:
    """Let all workers be past the clock; return what is written of the key, and of decided rounds."""
    rig.handle(st.Received(SCHEDULER, 0, m.CheckpointRest(clock)))
    (write,) = rig.seen(ef.WriteSnapshots)
    (snapshot,) = rig.seen(ef.Snapshot)
    return snapshot.states[0], write.rounds


def facts(state: RoundsState) -> tuple[Any, ...]:
    """Return what a group's state says."""
    return state.round, state.last, state.steps, state.known


def push(rig: Server, rank: int, clock: int, read: int, **changes: Any) -> Asked:
    """Push a number that is computed from a version."""
    return rig.push(rank, clock=clock, read_version=read, **changes)


# --- what is written ---


def test_decisions_are_those_before_the_first_round_behind_the_clock(make_server: Make) -> None:
    rig = server_of(make_server, "k_sync:2")
    for clock in (1, 2):
        for rank in (0, 1):
            push(rig, rank, clock, clock - 1)
        push(rig, 2, clock, clock - 1)
    for rank in (0, 1):
        push(rig, rank, 3, 2)
    push(rig, 2, 3, 2)
    state, (rounds,) = written(rig)
    assert facts(rounds) == (2, ((0, 2), (1, 2)), ((0, 2, 2, ""), (1, 2, 2, ""), (2, 2, 0, "late")), ())
    assert (state.version, state.round, dict(state.counts)) == (2, 2, {0: 2, 1: 2})


def test_decisions_are_all_where_no_round_is_behind_the_clock(make_server: Make) -> None:
    rig = server_of(make_server, "k_async:1")
    for clock in (1, 2):
        push(rig, 1, clock, clock - 1)
    state, (rounds,) = written(rig)
    assert facts(rounds) == (2, ((1, 2),), ((1, 2, 2, ""),), ())
    assert (state.round, state.pushes) == (2, ((1, 2, 2),))


def test_step_behind_the_clock_that_was_dropped_before_that_round_is_known(make_server: Make) -> None:
    rig = server_of(make_server, "ringmaster:1")
    for clock, read in ((1, 0), (2, 1)):
        push(rig, 0, clock, read)
    push(rig, 1, 3, 0)
    push(rig, 0, 3, 2)
    _, (rounds,) = written(rig)
    assert facts(rounds) == (2, ((0, 2),), ((0, 2, 2, ""), (1, 3, 0, "stale")), ())


def test_strikes_are_those_before_that_round(make_server: Make) -> None:
    rig = server_of(make_server, "quorum:2:0.0:5")
    for clock in (1, 2, 3):
        for rank in (0, 1):
            push(rig, rank, clock, clock - 1)
        rig.tick(float(clock))
    _, (rounds,) = written(rig)
    assert facts(rounds)[3] == ((0, 0), (1, 0), (2, 2))


def test_turn_is_that_before_that_round_although_both_are_decided_at_once(make_server: Make) -> None:
    rig = server_of(make_server, "round_robin", workers=2)
    push(rig, 1, 2, 0)
    push(rig, 0, 2, 0)
    push(rig, 1, 3, 0)
    push(rig, 0, 3, 0)
    _, (rounds,) = written(rig)
    assert facts(rounds)[:2] == (2, ((1, 2),))


def test_value_is_that_before_the_round_although_nothing_of_the_later_step_comes_to_the_key(make_server: Make) -> None:
    """Otherwise keys would not be of one round."""
    rig = server_of(make_server, "k_async:2")
    rig.init("v")
    for key in "vw":
        push(rig, 0, 2, 0, key=key)
        push(rig, 1, 1, 0, key=key)
    push(rig, 0, 3, 1, key="v")
    for key in "vw":
        push(rig, 1, 2, 1, key=key)
    push(rig, 0, 4, 2, key="v")
    assert {(each.key, each.version, each.states[0].round) for each in rig.seen(ef.Snapshot)} == {
        ("v", 1, 1),
        ("w", 1, 1),
    }


def test_checkpoint_is_not_of_a_clock_that_is_decided_already(make_server: Make) -> None:
    rig = make_server(2, "k_async:2", settings={})
    rig.init()
    rig.init("v")
    push(rig, 0, 1, 0)
    push(rig, 0, 2, 0, key="v")
    push(rig, 1, 1, 0, key="v")
    rig.handle(st.Received(SCHEDULER, 0, m.CheckpointAt(0)))
    answers = [one.message for one in rig.seen(ef.Send) if isinstance(one.message, m.CheckpointClock)]
    assert answers == [m.CheckpointClock(0, 1)]


def test_other_servers_write_no_decisions(make_server: Make) -> None:
    rig = make_server(1, "k_async:1", index=1, servers=2, settings=SETTINGS)
    rig.init()
    for clock, request in ((1, 1), (2, 2), (3, 3)):
        push(rig, 0, clock, clock - 1)
        if clock == 1:
            rig.handle(st.Connected(peer_of_server(0)))
            rig.handle(st.Received(peer_of_server(0), 1, m.Done()))
        rig.handle(st.Received(peer_of_server(0), request + 1, m.Verdict(clock, "", ((clock, ((0, clock),)),))))
    state, rounds = written(rig)
    assert (state.version, state.round) == (2, 2)
    assert rounds == []


# --- how a server goes on ---


def part(policy: str, **changes: Any) -> ChunkState:
    """Return what is saved of the key, of which ranks 0 and 1 have made two pushes, and rank 2 one that counts."""
    fields: dict[str, Any] = {"version": 4, "round": 4, "counts": ((0, 2), (1, 2), (2, 1))}
    fields["pushes"] = ((0, 3, 3), (1, 2, 2), (2, 2, 2))
    return ChunkState("w", (1,), "float32", 0, 1, policy=policy, **(fields | changes))


def decided(policy: str, **changes: Any) -> RoundsState:
    """Return what is saved of its rounds; the second step of rank 2 was late."""
    fields: dict[str, Any] = {"round": 4, "last": ((0, 2), (1, 2)), "known": ()}
    fields["steps"] = ((0, 2, 4, ""), (1, 2, 4, ""), (2, 2, 0, "late"))
    return RoundsState(policy, (), **(fields | changes))


def resumed(
    make_server: Make, policy: str, *, parts: list[ChunkState] | None = None, workers: int = 3, **changes: Any
) -> Server:
    """Return a server that has begun with a checkpoint."""
    rig = make_server(workers, policy, attach=False, settings={"resume": "/ck/old"})
    rig.handle(st.Join(0, 10.0))
    rig.handle(st.Connected(SCHEDULER))
    rig.publish()
    for rank in range(workers):
        rig.attach(rank)
    states = [part(policy)] if parts is None else parts
    rig.handle(st.CheckpointRead(2, RULES, states, 3, rounds=[decided(policy, **changes)]))
    rig.handle(st.SnapshotsLoaded())
    rig.values["w", 0] = {4: 0.0}
    rig.pushed = dict.fromkeys([(rank, "w") for rank in range(workers)], 2)
    return rig


def pushes(rig: Server, rank: int) -> m.Pushes:
    """Return how often the key was pushed by a rank, as it is told."""
    answer = rig.ask(rank, m.GetPushes("w", (1,), "float32", 0, 1, 5.0)).answer
    assert isinstance(answer, m.Pushes)
    return answer


def test_workers_go_on_behind_their_last_step_that_was_decided(make_server: Make) -> None:
    rig = resumed(make_server, "k_sync:2")
    assert [pushes(rig, rank) for rank in range(3)] == [m.Pushes(2, 2, "k_sync:2")] * 3


def test_rounds_are_counted_on(make_server: Make) -> None:
    rig = resumed(make_server, "k_sync:2")
    first, second, third = (push(rig, rank, 3, 4, want_value=True) for rank in (0, 2, 1))
    assert (first.answer, second.answer) == (m.Value(5, round=5), m.Value(5, round=5))
    assert third.answer == m.Value(5, dropped="late", round=5)


def test_what_was_read_is_not_old_while_a_round_is_open(make_server: Make) -> None:
    rig = resumed(make_server, "ringmaster:3")
    rig.init("v")
    push(rig, 0, 3, 0, key="v")
    second, third = push(rig, 1, 3, 4), push(rig, 2, 3, 4)
    push(rig, 0, 4, 0, key="v")
    assert (second.answer, third.answer) == (m.Done(5), m.Done(6))


def test_step_that_was_dropped_is_not_decided_again(make_server: Make) -> None:
    rig = resumed(make_server, "k_sync:2")
    rig.pushed[2, "w"] = 1
    assert push(rig, 2, 2, 4).answer == m.Done(4, "late")


def test_more_workers_make_a_round_as_they_did_before(make_server: Make) -> None:
    rig = resumed(make_server, "adasync:1", known=((SIZE, 3),))
    waiting = [push(rig, rank, 3, 4) for rank in (0, 1)]
    assert [one.pending for one in waiting] == [True, True]
    push(rig, 2, 3, 4)
    assert [one.answer for one in waiting] == [m.Done(5), m.Done(5)]


def test_who_was_evicted_is(make_server: Make) -> None:
    rig = resumed(make_server, "quorum:2:9.0:2", known=((0, 0), (1, 0), (2, 2)))
    first, second = push(rig, 0, 3, 4), push(rig, 1, 3, 4)
    assert (first.answer, second.answer) == (m.Done(5), m.Done(5)), "nobody waits for it"
    assert push(rig, 2, 3, 4).answer == m.Done(5, "evicted")


def test_it_is_the_turn_of_who_comes_next(make_server: Make) -> None:
    rig = resumed(make_server, "round_robin", last=((1, 2),))
    first = push(rig, 0, 3, 4)
    assert first.pending
    assert push(rig, 2, 3, 4).answer == m.Done(5)
    assert first.answer == m.Done(6)


def test_workers_that_are_no_more_are_not_waited_for(make_server: Make) -> None:
    rig = resumed(make_server, "k_sync:2", workers=2)
    assert [push(rig, rank, 3, 4).pending for rank in range(2)] == [True, False]


def test_worker_that_is_new_begins_with_the_others(make_server: Make) -> None:
    rig = resumed(make_server, "k_sync:2", workers=4)
    assert pushes(rig, 3) == m.Pushes(2, 2, "k_sync:2")


def test_key_to_which_nothing_of_a_rank_has_come_counts_as_the_others_do(make_server: Make) -> None:
    other = part("k_sync:2", pushes=((0, 3, 3), (1, 2, 2)))
    other.key = "v"
    rig = resumed(make_server, "k_sync:2", parts=[part("k_sync:2"), other])
    answer = rig.ask(2, m.GetPushes("v", (1,), "float32", 0, 1, 5.0)).answer
    assert answer == m.Pushes(2, 2, "k_sync:2")


def test_rank_of_which_nothing_is_known_begins_anew(make_server: Make) -> None:
    steps = ((0, 2, 4, ""), (1, 2, 4, ""))
    own = part("k_sync:2", counts=((0, 2), (1, 2)), pushes=((0, 2, 2), (1, 2, 2)))
    rig = resumed(make_server, "k_sync:2", parts=[own], steps=steps)
    assert pushes(rig, 2).count == 0


def test_chunk_that_had_one_round_more_says_which_is_the_last(make_server: Make) -> None:
    rig = resumed(make_server, "k_sync:2", parts=[part("k_sync:2", round=5)])
    asked = [push(rig, rank, 3, 4, want_value=True) for rank in (0, 1)]
    assert [one.answer for one in asked] == [m.Value(5, round=6)] * 2


def test_checkpoint_before_the_first_round_changes_nothing(make_server: Make) -> None:
    own = part("k_sync:2", version=0, round=0, counts=(), pushes=())
    rig = resumed(make_server, "k_sync:2", parts=[own], round=0, last=(), steps=())
    rig.values["w", 0] = {0: 0.0}
    rig.pushed = {}
    assert [push(rig, rank, 1, 0, want_value=True).pending for rank in (0, 1)] == [True, False]


def test_step_of_which_is_forgotten_what_became_of_it(make_server: Make) -> None:
    rig = resumed(make_server, "k_sync:2", steps=((0, 2, 0, ""), (1, 2, 4, ""), (2, 2, 0, "late")))
    rig.pushed[0, "w"] = 1
    answer = push(rig, 0, 2, 4).answer
    assert not isinstance(answer, AiokvError)
    assert answer == m.Done(4)


def test_standby_of_a_server_that_has_begun_so_counts_rounds_on_too(make_server: Make) -> None:
    rig = resumed(make_server, "k_sync:2", steps=((0, 2, 3, ""), (1, 2, 4, ""), (2, 2, 0, "late")), last=((1, 2),))
    followed, other = FollowedRounds(), Deciding(Neighbours(rig.machine._joiner))
    for message in all_decided(rig.machine._deciding):
        followed.decided(message)
    followed.take_over(other, [])
    (decisions,) = other.groups
    assert (decisions.newest, decisions.rounds[4]) == (4, [Token(1, 2)])
    decided = other.asked((5, 1), m.Arrived("k_sync:2", (), 0, 3, 4, 4), Roster(), 0.0)
    assert decided.effects == [ef.Send(5, 1, m.Verdict(5, "", ((5, ((0, 3),)),)))]
