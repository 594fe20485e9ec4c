"""A server lets a rank count behind a boundary: in all of its keys from the same round on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.types import SCHEDULER, peer_of_server
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Asked, Server

NEW = 2
"""The rank that joins."""


def view(server: Server, *, state: str = "joining", since: int = 0, rank: int = NEW, **changes: object) -> None:
    """Let the scheduler say what has become of a rank."""
    last = server.machine._joiner.view
    assert last is not None
    server.epoch += 1
    others = [entry for entry in last.workers if entry.rank != rank]
    entries = sorted([*others, m.WorkerEntry(rank, f"worker-{rank}", 7, state, "", since)], key=lambda each: each.rank)
    changed = structs.replace(last, epoch=server.epoch, workers=tuple(entries), declared=2, **changes)
    server.handle(st.Received(SCHEDULER, 0, changed))


def announce(server: Server, clock: int, rank: int = NEW) -> m.Message | None:
    """Let the scheduler ask for a boundary; return the answer."""
    effects = server.handle(st.Received(SCHEDULER, 0, m.Boundary(clock, rank)))
    answers = [effect.message for effect in effects if isinstance(effect, ef.Send) and effect.peer == SCHEDULER]
    return answers[0] if answers else None


def step(server: Server, *ranks: int, number: float = 1.0) -> list[Asked]:
    """Let ranks push a number once more."""
    return [server.push(rank, number, clock=1 + server.pushed.get((rank, "w"), 0)) for rank in ranks]


def begin(server: Server, rank: int = NEW) -> object:
    """Let the new rank attach and ask where it begins; return its number of pushes and its clock."""
    assert server.attach(rank, incarnation=7).answer == m.Done()
    answer = server.ask(rank, m.GetPushes("w", (1,), "float32", 0, 1, 5.0)).answer
    if not isinstance(answer, m.Pushes):
        return answer
    server.pushed[rank, "w"] = answer.count
    return answer.count, answer.clock


@pytest.fixture
def two(make_server: type[Server]) -> Server:
    """A server of two workers that have made three rounds of one key; a third one has come."""
    server = make_server(2)
    server.init()
    for _ in range(3):
        step(server, 0, 1)
    view(server)
    return server


def value(server: Server) -> float:
    """Return the value of the key."""
    return float(server.values["w", 0][max(server.values["w", 0])])


def test_a_round_behind_the_boundary_is_not_made_before_it_is_known_whether_the_rank_counts(two: Server) -> None:
    assert announce(two, 4) == m.BoundaryClock(4, 3, waits=True)
    before = step(two, 0, 1)
    assert not any(each.pending for each in before)
    behind = step(two, 0, 1)
    assert all(each.pending for each in behind)
    assert value(two) == 8.0
    view(two, since=4)
    assert all(each.pending for each in behind)
    assert begin(two) == (4, 4)
    chunk = two.machine._catalog.chunks["w", 0]
    assert chunk.counted == {0: 4, 1: 4}, "a checkpoint of the boundary is the same with it as without it"
    pulled = two.pull(NEW)
    assert pulled.payload == 8.0
    (mine,) = step(two, NEW, number=100.0)
    assert not any(each.pending for each in (*behind, mine))
    assert value(two) == 110.0
    assert chunk.counted == {0: 5, 1: 5, NEW: 5}


def test_a_boundary_before_what_is_made_is_too_early(two: Server) -> None:
    assert announce(two, 2) == m.BoundaryClock(2, 3, waits=True)
    assert not any(each.pending for each in step(two, 0, 1))


def test_rounds_go_on_when_nobody_joins_after_all(two: Server) -> None:
    announce(two, 3)
    behind = step(two, 0, 1)
    assert all(each.pending for each in behind)
    assert announce(two, 0) is None
    assert not any(each.pending for each in behind)
    assert value(two) == 8.0


def test_rounds_go_on_when_a_view_does_not_have_the_rank(two: Server) -> None:
    announce(two, 3)
    behind = step(two, 0, 1)
    view(two, state="evicted")
    assert not any(each.pending for each in behind)


def test_rounds_go_on_when_the_scheduler_is_there_again_and_knows_nothing_new(two: Server) -> None:
    announce(two, 3)
    behind = step(two, 0, 1)
    last = two.machine._joiner.view
    assert last is not None
    two.handle(st.Received(SCHEDULER, 0, last))
    assert not any(each.pending for each in behind)


def test_a_later_boundary_takes_the_place_of_an_earlier_one(two: Server) -> None:
    announce(two, 3)
    waiting = step(two, 0, 1)
    announce(two, 4)
    assert not any(each.pending for each in waiting)
    assert all(each.pending for each in step(two, 0, 1))


def test_a_sum_that_has_gone_past_the_place_of_the_rank_is_too_late_for_it(make_server: type[Server]) -> None:
    server = make_server(3)
    server.init()
    server.states[0] = ("left", "")
    server.publish()
    for _ in range(2):
        step(server, 1, 2)
    step(server, 1)
    view(server, rank=0)
    # Sums are made in the order of the ranks, and that of round 3 has begun with rank 1.
    assert announce(server, 2, rank=0) == m.BoundaryClock(2, 3, waits=True)
    assert announce(server, 3, rank=0) == m.BoundaryClock(3, 3, waits=True)


def test_a_rank_that_comes_again_begins_behind_the_boundary_and_not_where_it_was(make_server: type[Server]) -> None:
    server = make_server(2)
    server.init()
    step(server, 0, 1)
    server.states[1] = ("left", "")
    server.publish()
    for _ in range(3):
        step(server, 0)
    view(server, rank=1)
    announce(server, 4, rank=1)
    view(server, rank=1, since=4)
    assert begin(server, 1) == (4, 4)
    step(server, 0)
    step(server, 1, number=100.0)
    assert value(server) == 2.0 + 3.0 + 101.0


def test_where_each_push_counts_at_once_it_begins_beside_the_slowest(make_server: type[Server]) -> None:
    server = make_server(2, policy="ssp:1")
    server.init()
    for rank in (0, 0, 0, 1, 1):
        step(server, rank)
    view(server)
    assert announce(server, 3) == m.BoundaryClock(3, 3, waits=True)
    view(server, state="alive", since=3)
    assert begin(server) == (3, 3)
    # Rank 0 leads the two others by one.
    assert not server.pull(0).pending
    step(server, 0)
    held = server.pull(0)
    assert held.pending
    step(server, 1)
    assert held.pending
    step(server, NEW)
    assert not held.pending


@pytest.mark.parametrize("policy", ["asp", "ringmaster:9"])
def test_who_takes_its_place_goes_on_where_it_was_and_not_where_it_began(
    make_server: type[Server], policy: str
) -> None:
    server = make_server(2, policy)
    server.init()
    step(server, 0, 1)
    view(server)
    announce(server, 2)
    view(server, state="alive", since=2)
    assert begin(server) == (2, 2)
    step(server, NEW, NEW)
    assert begin(server) == (4, 4)
    step(server, NEW)
    assert begin(server) == (5, 5)


def test_a_rule_that_looks_at_what_was_read_knows_what_the_rank_begins_with(make_server: type[Server]) -> None:
    server = make_server(1, policy="asp")
    server.init()
    server.ask(0, m.SetOptimizer("dcasgd", {"learning_rate": 1.0}, "sum", 5.0))
    for _ in range(3):
        step(server, 0)
        server.pull(0)
    view(server, rank=1)
    assert announce(server, 3, rank=1) == m.BoundaryClock(3, 3)
    view(server, rank=1, state="alive", since=3)
    begin(server, 1)
    step(server, 1)
    assert only_apply(server).read == 3


def only_apply(server: Server) -> ef.Apply:
    """Return the last update."""
    return [effect for effect in server.effects if isinstance(effect, ef.Apply)][-1]


def test_keys_of_other_groups_are_not_concerned(make_server: type[Server]) -> None:
    server = make_server(3)
    server.init()
    server.init("pair", group=(0, 1))
    step(server, 0, 1, 2)
    for rank in range(2):
        server.push(rank, 1.0, key="pair", clock=2)
    view(server, rank=3)
    announce(server, 2, rank=3)
    view(server, rank=3, since=2)
    begin(server, 3)
    pushes = [server.push(rank, 1.0, key="pair", clock=3) for rank in range(2)]
    assert not any(each.pending for each in pushes)


def test_who_joins_beside_another_one_that_has_not_begun_does_not_begin_before_all_steps(
    make_server: type[Server],
) -> None:
    """What the first newcomer asks this server may come later than the second one."""
    server = make_server(2, policy="ssp:1")
    server.init()
    step(server, 0, 1, 0, 1)
    for rank in (2, 3):
        view(server, rank=rank)
        announce(server, rank)
        view(server, state="alive", rank=rank, since=rank)
    assert begin(server, 3) == (3, 3)
    assert begin(server, 2) == (2, 2)
    step(server, 0, 1)
    # They lead both by one.
    assert not server.pull(0).pending


# --- in step at first, each push by itself later ---


@pytest.fixture
def switching(make_server: type[Server]) -> Server:
    """A server of two workers that have made two of three rounds that are in step; a third one has come."""
    server = make_server(2, policy="sync_switch:0.5:6")
    server.init()
    step(server, 0, 1, 0, 1)
    view(server)
    return server


def test_before_the_switch_rounds_behind_the_boundary_wait_for_who_joins(switching: Server) -> None:
    assert announce(switching, 2) == m.BoundaryClock(2, 2, waits=True)
    last = step(switching, 0, 1)
    view(switching, since=2)
    assert all(each.pending for each in last)
    assert begin(switching) == (2, 2)
    step(switching, NEW, number=100.0)
    assert not any(each.pending for each in last)
    # From now on nobody waits.
    for rank in (0, NEW, NEW):
        assert not any(each.pending for each in step(switching, rank))
    assert value(switching) == 109.0


def test_a_boundary_behind_the_switch_holds_no_round_up(switching: Server) -> None:
    assert announce(switching, 5) == m.BoundaryClock(5, 2, waits=True)
    view(switching, since=5)
    for rank in (0, 1, 1):
        step(switching, rank)
    assert value(switching) == 7.0
    # It joins those that wait for nobody, as one that has made all rounds.
    assert begin(switching) == (5, 5)
    assert not any(each.pending for each in step(switching, NEW, number=100.0))
    assert value(switching) == 107.0


def test_behind_the_switch_nobody_has_to_be_past_the_boundary(switching: Server) -> None:
    step(switching, 0, 1)
    assert announce(switching, 3) == m.BoundaryClock(3, 3)
    view(switching, since=3)
    assert not any(each.pending for each in step(switching, 0, 0))
    assert begin(switching) == (3, 3)
    assert not any(each.pending for each in step(switching, NEW))


def test_before_the_switch_rounds_do_not_wait_for_who_leaves_there(switching: Server) -> None:
    last = switching.machine._joiner.view
    assert last is not None
    leaving = structs.replace(last.workers[1], until=2)
    workers = (last.workers[0], leaving)
    switching.handle(st.Received(SCHEDULER, 0, structs.replace(last, epoch=9, workers=workers)))
    assert not any(each.pending for each in step(switching, 0))


# --- taking turns ---


@pytest.fixture
def turns(make_server: type[Server]) -> Server:
    """A server of two workers that take turns, and have made two steps; a third one has come."""
    server = make_server(2, policy="round_robin")
    server.init()
    for _ in range(2):
        step(server, 0, 1)
    view(server)
    return server


def test_it_is_the_turn_of_who_joins_when_the_others_are_at_its_first_step(turns: Server) -> None:
    assert announce(turns, 3) == m.BoundaryClock(3, 2, waits=True)
    view(turns, since=3)
    assert not any(each.pending for each in step(turns, 0, 1))
    fourth = step(turns, 0, 1)
    assert all(each.pending for each in fourth)
    assert begin(turns) == (3, 3)
    step(turns, NEW)
    assert not any(each.pending for each in fourth)


def test_a_turn_goes_on_when_nobody_joins_after_all(turns: Server) -> None:
    announce(turns, 2)
    third = step(turns, 0, 1)
    assert all(each.pending for each in third)
    announce(turns, 0)
    assert not any(each.pending for each in third)


def test_who_joins_behind_a_change_of_the_policy_has_its_turn_in_the_first_step(two: Server) -> None:
    announce(two, 3)
    view(two, since=3)
    change(two, "round_robin", 0, 1, clock=3)
    step(two, 0, 1)
    (fifth,) = step(two, 0)
    assert fifth.pending
    begin(two)
    step(two, NEW)
    assert not fifth.pending


# --- keys whose policy changes meanwhile ---


def change(server: Server, policy: str, *ranks: int, clock: int) -> list[Asked]:
    """Let ranks ask for another policy of the key, after so many steps."""
    old = str(server.machine._catalog.chunks["w", 0].policy)
    return [server.ask(rank, m.SetPolicy(policy, ("w",), old, (), 5.0, clock)) for rank in ranks]


def test_a_change_is_one_of_all_who_count_in_the_step_before_it(two: Server) -> None:
    announce(two, 4)
    step(two, 0, 1)
    view(two, since=4)
    last = step(two, 0, 1)
    begin(two)
    asked = change(two, "asp", 0, 1, clock=5)
    assert all(each.pending for each in (*last, *asked))
    step(two, NEW)
    assert not any(each.pending for each in last)
    assert all(each.pending for each in asked)
    change(two, "asp", NEW, clock=5)
    assert not any(each.pending for each in asked)


def test_who_begins_with_the_step_behind_a_change_is_told_of_it_and_not_waited_for(two: Server) -> None:
    announce(two, 3)
    view(two, since=3)
    assert [each.answer for each in change(two, "ssp:1", 0, 1, clock=3)] == [m.Done()] * 2
    assert two.attach(NEW, incarnation=7).answer == m.Done()
    # It can't know yet that the policy is another one.
    assert two.init(rank=NEW).answer == m.Done(3)
    answer = two.ask(NEW, m.GetPushes("w", (1,), "float32", 0, 1, 5.0)).answer
    assert answer == m.Pushes(3, 3, "ssp:1")


def test_a_change_goes_on_when_nobody_joins_before_it_after_all(two: Server) -> None:
    announce(two, 3)
    asked = change(two, "asp", 0, 1, clock=4)
    assert all(each.pending for each in asked)
    announce(two, 0)
    assert not any(each.pending for each in asked)


def test_who_has_joined_where_nobody_waits_goes_over_with_the_others_and_is_in_their_rounds(
    make_server: type[Server],
) -> None:
    """Its clocks are ahead of those of the others, for it began behind the fastest of them."""
    server = make_server(2, policy="asp")
    server.init()
    step(server, 0, 1, 0)
    view(server)
    announce(server, 4)
    view(server, state="alive", since=4)
    begin(server)
    step(server, NEW)
    asked = change(server, "bsp", 0, 1, clock=2)
    assert all(each.pending for each in asked)
    change(server, "bsp", NEW, clock=5)
    assert not any(each.pending for each in asked)
    first = step(server, 0, 1)
    assert all(each.pending for each in first)
    (mine,) = step(server, NEW)
    assert [each.answer for each in (*first, mine)] == [m.Done(5)] * 3


def test_what_was_made_under_another_policy_is_not_taken_for_steps(make_server: type[Server]) -> None:
    server = make_server(2, policy="asp")
    server.init()
    step(server, 0, 1, 0, 1)
    change(server, "bsp", 0, 1, clock=2)
    view(server)
    # There are four versions, of two steps.
    assert announce(server, 3) == m.BoundaryClock(3, 2, waits=True)
    step(server, 0, 1)
    view(server, since=3)
    assert begin(server) == (3, 3)
    last = step(server, 0, 1)
    assert all(each.pending for each in last)
    step(server, NEW)
    assert not any(each.pending for each in last)


def test_a_policy_with_which_nobody_can_join_is_named(make_server: type[Server], closed_policy: str) -> None:
    server = make_server(2, policy=closed_policy)
    server.init()
    view(server)
    text = f"key 'w' has policy {closed_policy}, with which nobody can join a running job"
    assert announce(server, 1) == m.BoundaryClock(1, 0, text)


def test_a_boundary_holds_although_an_earlier_view_is_taken_over_only_now(make_server: type[Server]) -> None:
    """Until server 0 has decided what counts of a worker that is gone, server 1 does not take over the view without it.

    So the view may come before the boundary, and its workers after it.
    """
    server = make_server(2, index=1, servers=2, settings={"on_worker_loss": "shrink"})
    server.init()
    leader = peer_of_server(0)

    def decide(verdict: str) -> None:
        """Let server 0 decide about the call that it was asked about last."""
        asked = [send for send in server.seen(ef.Send) if send.peer == leader and isinstance(send.message, m.Gathered)]
        server.handle(st.Received(leader, asked[-1].request, m.Settled(verdict)))

    lost = server.push(1, whole=m.Whole(1, 1, 2))
    server.handle(st.Connected(leader))
    server.handle(st.Received(leader, 1, m.Done()))
    server.evict(1)
    assert lost.pending
    assert announce(server, 1) == m.BoundaryClock(1, 0, waits=True)
    decide("gone")
    first = server.push(0, whole=m.Whole(1, 1, 2), clock=1)
    decide("")
    second = server.push(0, whole=m.Whole(2, 1, 2), clock=2)
    decide("")
    assert (first.pending, second.pending) == (False, True)


# --- rounds that one server decides ---


@pytest.fixture
def decided(make_server: type[Server]) -> Server:
    """A server of two workers that have made two rounds of all who are there; a third one has come."""
    server = make_server(2, policy="k_async:9")
    server.init()
    for _ in range(2):
        step(server, 0, 1)
    view(server)
    return server


def let_in(server: Server, clock: int) -> object:
    """Let the rank count behind a clock, and begin; return where."""
    assert announce(server, clock) == m.BoundaryClock(clock, 2)
    view(server, since=clock)
    view(server, state="alive", since=clock)
    return begin(server)


def leaves_behind(server: Server, clock: int) -> None:
    """Let the last of three ranks leave behind a clock."""
    last = server.machine._joiner.view
    assert last is not None
    leaving = structs.replace(last.workers[2], until=clock)
    server.handle(st.Received(SCHEDULER, 0, structs.replace(last, epoch=9, workers=(*last.workers[:2], leaving))))
    server.epoch = 9


def test_a_round_that_is_open_when_the_server_hears_of_it_waits_for_the_rank(decided: Server) -> None:
    assert let_in(decided, 3) == (3, 3)
    (first,) = step(decided, 0)
    (second,) = step(decided, 1)
    assert (first.pending, second.pending) == (True, True)
    assert decided.push(NEW, clock=4, read_version=2).answer == m.Done(3)
    assert (first.answer, second.answer) == (m.Done(3), m.Done(3))


def test_who_pushes_before_the_view_is_here_counts_already(decided: Server) -> None:
    announce(decided, 3)
    view(decided, since=3)
    begin(decided)
    asked = decided.push(NEW, clock=4, read_version=2)
    (first,) = step(decided, 0)
    assert (asked.pending, first.pending) == (True, True)
    (second,) = step(decided, 1)
    assert [each.answer for each in (asked, first, second)] == [m.Done(3)] * 3


def test_a_step_of_an_earlier_life_is_before_the_boundary(decided: Server) -> None:
    """It has been decided, and would be taken for the new one."""
    decided.push(1, clock=9, read_version=2)
    decided.leave(1)
    view(decided, rank=1)
    assert announce(decided, 5, rank=1) == m.BoundaryClock(5, 9)


def test_other_servers_wait_for_a_step_of_a_rank_that_joins(make_server: type[Server]) -> None:
    """Its view may come late; without the step the round would be another one than elsewhere."""
    server = make_server(2, policy="k_async:9", index=1, servers=2)
    server.init()
    leader = peer_of_server(0)
    view(server)
    announce(server, 3)
    begin(server)
    (first,) = step(server, 0)
    server.handle(st.Connected(leader))
    server.handle(st.Received(leader, 1, m.Done()))
    server.handle(st.Received(leader, 2, m.Verdict(1, "", ((1, ((0, 1), (NEW, 4))),))))
    assert first.pending
    assert server.push(NEW, clock=4).answer == m.Done(1)
    assert first.answer == m.Done(1)


def test_what_a_rank_had_made_in_an_earlier_life_is_not_forgotten(decided: Server) -> None:
    chunk = decided.machine._catalog.chunks["w", 0]
    decided.leave(1)
    view(decided, rank=1)
    announce(decided, 4, rank=1)
    view(decided, rank=1, state="alive", since=4)
    begin(decided, 1)
    assert chunk.counted == {0: 2, 1: 2}
    decided.push(1, clock=5, read_version=2)
    step(decided, 0)
    assert chunk.counted == {0: 3, 1: 5}


def test_rounds_wait_no_longer_for_who_leaves_when_its_last_step_is_decided(make_server: type[Server]) -> None:
    server = make_server(3, policy="k_async:9")
    server.init()
    leaves_behind(server, 2)
    step(server, 0, 1, 2)
    asked = step(server, 0, 1, 2)
    assert [each.pending for each in asked] == [False, False, False]
    assert [each.pending for each in step(server, 0, 1)] == [False, False]


def test_a_round_that_is_complete_without_who_leaves_is_closed_with_its_last_step(make_server: type[Server]) -> None:
    server = make_server(3, policy="k_async:9")
    server.init()
    leaves_behind(server, 1)
    asked = [*step(server, 0, 1), *step(server, 0, 1)]
    assert all(each.pending for each in asked)
    assert server.push(2, clock=1).answer == m.Done(1)
    assert [each.answer for each in asked] == [m.Done(1), m.Done(1), m.Done(2), m.Done(2)]
