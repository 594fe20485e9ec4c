"""Pushes of a call that count together: what servers keep aside, ask each other, and do when a worker is gone."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.server.rounds import whole_calls
from aiokv.core.server.rounds.whole_call import Aside, CallName, WholeCall
from aiokv.core.server.rounds.whole_calls import identity
from aiokv.errors import (
    CallTimeoutError,
    ConfigError,
    KeyUseError,
    MembershipError,
    ProtocolError,
    RoundTimeoutError,
    ServerLostError,
    SpecMismatchError,
    StaleEpochError,
)
from aiokv.types import SCHEDULER, peer_of_server
from aiokv.wire import messages as m
from tests.core.conftest import Asked, Server

LEADER = peer_of_server(0)
"""The other server's own link to server 0."""

THERE = 50
"""The connection that server 1 has opened to server 0."""

CHUNKS = {"shape": (2,), "start": 1, "stop": 2}
"""The half of a key of two elements that is on server 1."""


def push(server: Server, rank: int, key: str, call: int, parts: int = 1, servers: int = 1, **changes: Any) -> Asked:
    """Let a worker push one number as a part of a call."""
    return server.push(rank, key=key, whole=m.Whole(call, parts, servers), **changes)


# --- one server: it decides by itself ---


@pytest.fixture
def server() -> Server:
    """The only server of two workers, with two keys."""
    rig = Server(2)
    for key in "ab":
        rig.init(key)
    return rig


def test_pushes_wait_for_the_rest_of_their_call(server: Server) -> None:
    for key in "ab":
        push(server, 1, key, 1, 2)
    first = push(server, 0, "a", 1, 2)
    assert (first.pending, server.value("a")) == (True, 0.0)
    second = push(server, 0, "b", 1, 2)
    assert (first.answer, second.answer) == (m.Done(1), m.Done(1))
    assert (server.value("a"), server.value("b")) == (2.0, 2.0)


def test_call_for_a_key_that_is_deleted_before_it_counts_is_told_so(server: Server) -> None:
    torn = push(server, 0, "a", 1, 2)
    server.ask(1, m.Delete(("a",), 5.0))
    whole = push(server, 0, "b", 1, 2)
    assert isinstance(torn.error, KeyUseError)
    assert whole.pending, "the other worker has not pushed"
    assert len(server.slots) == 1


def test_what_is_not_whole_does_not_count_when_its_worker_is_evicted(server: Server) -> None:
    for key in "ab":
        push(server, 0, key, 1, 2)
    torn = push(server, 1, "a", 1, 2)
    server.evict(1)
    assert isinstance(torn.error, StaleEpochError)
    assert torn.error.details == {"ranks": [1]}
    assert (server.value("a"), server.value("b")) == (1.0, 1.0)
    assert not server.slots


def test_what_is_whole_counts_although_its_worker_is_evicted(server: Server) -> None:
    for key in "ab":
        push(server, 1, key, 1, 2)
    server.evict(1)
    for key in "ab":
        push(server, 0, key, 1, 2)
    assert (server.value("a"), server.value("b")) == (2.0, 2.0)


def test_who_is_evicted_is_refused_whatever_it_sends(server: Server) -> None:
    server.evict(1, "no heartbeat for 10.0 s")
    for asked in (push(server, 1, "a", 2), server.push(1, key="b"), server.pull(1, key="a")):
        assert isinstance(asked.error, StaleEpochError)
        assert "1 (worker-1): no heartbeat for 10.0 s" in str(asked.error)


def test_a_push_that_comes_again_takes_the_place_of_the_first(server: Server) -> None:
    """As a worker sends it that has lost its connection."""
    push(server, 1, "a", 1)
    first = push(server, 0, "a", 1, 2, value=5.0)
    again = push(server, 0, "a", 1, 2, value=7.0, sequence=1)
    push(server, 0, "b", 1, 2)
    assert (first.pending, again.answer) == (True, m.Done(1))
    assert server.value("a") == 8.0


def test_the_rest_of_a_call_counts_without_anybody_to_be_told(server: Server) -> None:
    """A connection has ended; its worker may come back, and what it had brought is kept."""
    push(server, 1, "a", 1)
    first = push(server, 0, "a", 1, 2)
    server.lose_peer(0)
    assert server.attach(0, peer=20).answer == m.Done()
    message = m.Push("b", (1,), "float32", 0, 1, 1, 0, False, 5.0, 0, 1, 0, 0, m.Whole(1, 2, 1))
    server.ask(0, message, 1.0, peer=20)
    assert (first.pending, server.value("a")) == (True, 2.0)


def test_reads_and_settings_come_behind_the_pushes_before_them(server: Server) -> None:
    push(server, 1, "a", 1)
    push(server, 0, "a", 1, 2)
    asked = [server.pull(0, key="b", at_least=0), server.ask(0, m.GetRules(5.0))]
    # Another call that has come later is not waited for.
    push(server, 0, "b", 2, 2, sequence=2)
    assert all(each.pending for each in asked)
    push(server, 0, "b", 1, 2, sequence=1)
    assert isinstance(asked[0].answer, m.Value)
    assert isinstance(asked[1].answer, m.RulesState)


def test_it_is_shown_for_what_pushes_wait(server: Server) -> None:
    push(server, 0, "a", 1, 2)
    server.ask(0, m.GetRules(5.0))
    push(server, 1, "a", 7, 1, 2)
    shown = server.ask(0, m.GetWaiting(), peer=99).answer
    assert isinstance(shown, m.Waiting)
    assert [(call.what, call.reason) for call in shown.calls] == [
        ("call 1 of rank 0", "1 of its 2 pushes have not come"),
        ("GetRules of rank 0", "pushes before it have not come to all of their servers"),
        ("call 7 of rank 1", "it is not on all of its servers"),
    ]


def test_what_waits_behind_pushes_ends_in_its_time(server: Server) -> None:
    push(server, 0, "a", 1, 2, timeout=30.0)
    asked = server.ask(0, m.GetRules(5.0))
    gone = server.ask(0, m.GetRules(50.0))
    assert isinstance(server.ask(1, m.GetRules(5.0)).answer, m.RulesState), "of another worker"
    server.handle(st.Received(SCHEDULER, 0, m.Heartbeat()))
    server.tick(5.0)
    assert isinstance(asked.error, CallTimeoutError)
    assert "rank 0: pushes before this" in str(asked.error)
    server.lose_peer(0)
    assert gone.pending


def test_what_waited_behind_pushes_may_be_refused(server: Server) -> None:
    push(server, 0, "a", 1, 2)
    asked = server.pull(0, key="nosuchkey", shape=(2,), at_least=0)
    odd = server.pull(0, key="b", shape=(2,), at_least=0)
    push(server, 0, "b", 1, 2)
    assert asked.pending
    assert isinstance(odd.error, SpecMismatchError)


def test_bundles_and_rows_are_bound_together_too() -> None:
    server = Server(2)
    for rank in range(2):
        digests = (b"" if rank else b"zero",) * 2
        init = m.InitBundle(("x", "y"), ((1,), (1,)), "float32", "bsp", 5.0, (), digests)
        made = server.ask(rank, init, None if rank else 0.0, length=8)
        server.init_rows({1: 0.0}, rank=rank)
    assert isinstance(made.answer, m.Bundled)
    asked = []
    for rank in range(2):
        whole = m.Whole(1, 3, 1)
        bundle = m.PushBundle(made.answer.bundle, 1, 0, False, 5.0, 0, 1, 0, 0, whole)
        asked.append(server.ask(rank, bundle, 1.0, length=8))
        asked.append(server.push_rows(rank, {1: 2.0}, total=2, whole=whole))
        assert all(each.pending for each in asked[-2:])
        asked.append(server.push_rows(rank, {3: 4.0}, total=2, first=1, sequence=1, whole=whole))
    # Only the last message about some rows waits for their update.
    assert [each.answer for each in asked] == [m.Done(1), m.Done(0), m.Done(1)] * 2


@pytest.mark.parametrize("message", [m.GetRules(float("inf")), m.SetPolicy("asp", ("a",), "bsp", (), float("nan"), 0)])
def test_a_time_out_that_never_comes_is_refused(server: Server, message: m.Message) -> None:
    assert isinstance(server.ask(0, message).error, ConfigError)


def test_calls_of_one_key_count_in_their_order(server: Server) -> None:
    for number in (1, 2):
        push(server, 1, "a", number)
    push(server, 0, "a", 1, 2)
    second = push(server, 0, "a", 2)
    assert second.pending
    push(server, 0, "b", 1, 2)
    assert second.answer == m.Done(2)
    assert server.value("a") == 4.0


def test_calls_of_other_keys_do_not_wait(server: Server) -> None:
    push(server, 1, "b", 1)
    push(server, 0, "a", 1, 2)
    assert push(server, 0, "b", 2).answer == m.Done(1)


def test_a_call_after_one_that_does_not_count_does_not_either(server: Server) -> None:
    first = push(server, 0, "a", 1, 2, timeout=2.0)
    second = push(server, 0, "a", 2, timeout=30.0)
    server.tick(2.0)
    assert isinstance(first.error, CallTimeoutError)
    assert "call 1 of rank 0 has not come to all of its servers in time" in str(first.error)
    assert isinstance(second.error, CallTimeoutError)
    assert not server.slots


def test_a_call_that_is_not_whole_in_time_is_given_up_once(server: Server) -> None:
    asked = [push(server, 0, key, 1, 3, timeout=2.0) for key in "ab"]
    server.tick(2.0)
    assert all(isinstance(each.error, CallTimeoutError) for each in asked)
    late = push(server, 0, "c", 1, 3)
    assert isinstance(late.error, CallTimeoutError)
    assert not server.slots


@pytest.mark.parametrize("whole", [m.Whole(1, 3, 1), m.Whole(1, 2, 2), m.Whole(2, 1, 0)])
def test_pushes_of_a_call_say_the_same(server: Server, whole: m.Whole) -> None:
    push(server, 0, "a", 1, 2)
    odd = server.push(0, key="b", whole=whole)
    assert isinstance(odd.error, ProtocolError)


def test_a_push_that_can_not_be_is_refused_when_it_counts(server: Server) -> None:
    push(server, 0, "a", 1, 2)
    odd = push(server, 0, "b", 1, 2, sequence=7)
    assert isinstance(odd.error, ProtocolError)
    assert "expected push 1" in str(odd.error)


def test_what_was_decided_long_ago_is_forgotten(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_calls, "REMEMBERED", 2)
    for number in (1, 2, 3):
        push(server, 0, "a", number)
    assert list(server.machine._whole.known) == [(0, 1, 2), (0, 1, 3)]


def test_a_push_of_a_call_that_counts_is_not_kept_aside_again(server: Server) -> None:
    push(server, 0, "a", 1)
    again = push(server, 0, "a", 1, sequence=1)
    assert not server.machine._whole
    assert not isinstance(again.answer, StaleEpochError)


# --- server 1, and server 0 played by hand ---


def other(policy: str = "bsp") -> Server:
    """Return server 1 of two, with two keys and two workers."""
    server = Server(2, policy, index=1, servers=2)
    for key in "ab":
        server.init(key)
    return server


def link(server: Server) -> None:
    """Let server 1 reach server 0."""
    server.handle(st.Connected(LEADER))
    server.handle(st.Received(LEADER, 1, m.Done()))


def questions(server: Server) -> list[ef.Send]:
    """Return what server 1 has asked server 0."""
    return [one for one in server.seen(ef.Send) if one.peer == LEADER and isinstance(one.message, m.Gathered)]


def answer(server: Server, message: m.Message, number: int = -1) -> None:
    """Let server 0 answer a question, the last one unless told otherwise."""
    server.handle(st.Received(LEADER, questions(server)[number].request, message))


def test_a_server_asks_when_all_of_a_call_is_here() -> None:
    server = other()
    push(server, 1, "a", 1)
    first = push(server, 0, "a", 4, 2, 2)
    assert not server.seen(ef.Connect)[1:]
    push(server, 0, "b", 4, 2, 2)
    link(server)
    assert [send.message for send in questions(server)] == [m.Gathered(0, 1, 4, 2)]
    assert first.pending
    answer(server, m.Settled(""))
    assert first.answer == m.Done(1)


def test_a_server_names_the_calls_that_push_a_key_before() -> None:
    server = other()
    push(server, 0, "a", 4, 1, 2)
    push(server, 0, "a", 5, 1, 2)
    link(server)
    assert [send.message for send in questions(server)] == [m.Gathered(0, 1, 4, 2), m.Gathered(0, 1, 5, 2, (4,))]


def test_keys_whose_rounds_are_decided_at_once_stay_in_their_order() -> None:
    server = other("k_sync:2")
    push(server, 0, "a", 4, 1, 2)
    push(server, 0, "b", 5, 1, 2)
    link(server)
    assert questions(server)[-1].message == m.Gathered(0, 1, 5, 2, (4,))


def test_calls_stay_in_the_order_of_their_worker_where_a_later_one_has_overtaken() -> None:
    """An urgent one comes to some servers first, to others last; each would wait for the other."""
    server = other("k_sync:2")
    push(server, 0, "b", 5, 1, 2)
    push(server, 0, "a", 4, 1, 2)
    link(server)
    assert [send.message for send in questions(server)] == [m.Gathered(0, 1, 5, 2), m.Gathered(0, 1, 4, 2)]
    answer(server, m.Settled(""), 0)
    assert server.machine._whole, "what is decided waits for what comes before it"
    answer(server, m.Settled(""), 1)
    assert not server.machine._whole


def test_a_call_to_one_server_between_others_is_decided_with_them() -> None:
    """Or the server that decides would wait for it without end, with the calls after it."""
    server = other("k_sync:2")
    push(server, 0, "a", 4, 1, 2)
    push(server, 0, "b", 5, 1, 1)
    push(server, 0, "a", 6, 1, 2)
    link(server)
    assert [send.message for send in questions(server)] == [
        m.Gathered(0, 1, 4, 2),
        m.Gathered(0, 1, 5, 1, (4,)),
        m.Gathered(0, 1, 6, 2, (4, 5)),
    ]


def test_a_call_to_one_server_is_decided_with_a_later_one_that_was_whole_before() -> None:
    server = other("k_sync:2")
    push(server, 0, "a", 4, 2, 1)
    push(server, 0, "a", 5, 1, 2, sequence=2)
    push(server, 0, "b", 4, 2, 1)
    link(server)
    assert [send.message for send in questions(server)] == [m.Gathered(0, 1, 5, 2, (4,)), m.Gathered(0, 1, 4, 1)]


def test_a_round_waits_until_it_is_known_what_counts_of_who_is_evicted() -> None:
    server = other()
    push(server, 1, "a", 1, 1, 2)
    link(server)
    mine = push(server, 0, "a", 1, 1, 1)
    server.evict(1)
    assert mine.pending
    answer(server, m.Settled(""))
    assert mine.answer == m.Done(1)
    assert server.value("a") == 2.0


def test_a_round_is_made_without_what_does_not_count() -> None:
    server = other()
    torn = push(server, 1, "a", 1, 1, 2)
    link(server)
    server.evict(1)
    mine = push(server, 0, "a", 1, 1, 1)
    answer(server, m.Settled("gone"))
    assert isinstance(torn.error, StaleEpochError)
    assert mine.answer == m.Done(1)
    assert server.value("a") == 1.0


def test_what_has_not_come_whole_is_dropped_without_asking() -> None:
    server = other()
    torn = push(server, 1, "a", 1, 2, 2)
    server.evict(1)
    assert isinstance(torn.error, StaleEpochError)
    assert not questions(server)


def test_a_later_life_of_a_worker_is_another_one() -> None:
    """Its calls count from 1 again."""
    server = other()
    torn = push(server, 1, "a", 1, 2, 2)
    workers = (m.WorkerEntry(0, "worker-0", 1), m.WorkerEntry(1, "worker-1", 2))
    view = server.machine._joiner.view
    assert view is not None
    server.handle(st.Received(SCHEDULER, 0, m.View(5, workers, view.servers, 2.0, 2**19, 2**19, 10.0, "shrink")))
    assert isinstance(torn.error, StaleEpochError)


def test_a_call_that_takes_too_long_is_given_up_everywhere() -> None:
    server = other()
    torn = push(server, 1, "a", 1, 2, 2, timeout=2.0)
    server.tick(2.0)
    assert torn.pending
    link(server)
    assert questions(server)[-1].message == m.Gathered(1, 1, 1, 0)
    answer(server, m.Settled("late"))
    assert isinstance(torn.error, CallTimeoutError)


def test_who_waits_for_a_server_that_does_not_decide_is_told_so() -> None:
    """After its own time-out, and the death time-out in which it could be noticed that the other server is gone."""
    server = other()
    late = push(server, 1, "a", 1, 1, 2, timeout=2.0)
    link(server)
    server.tick(2.0)
    assert late.pending
    server.tick(8.0)
    server.handle(st.Received(SCHEDULER, 0, m.Heartbeat()))
    server.tick(12.0)
    assert isinstance(late.error, CallTimeoutError)
    assert "server 0 does not say whether call 1 of rank 1 counts" in str(late.error)
    answer(server, m.Settled("late"))
    assert not server.slots


def test_a_call_is_given_up_once() -> None:
    server = other()
    mine = push(server, 0, "a", 1, 2, 2, timeout=2.0)
    torn = [push(server, 1, "a", 1, 3, 2, timeout=4.0), push(server, 1, "b", 1, 3, 2, timeout=4.0)]
    late = push(server, 1, "a", 2, 2, 2, timeout=4.0)
    server.tick(2.0)
    link(server)
    answer(server, m.Settled("late"))
    assert isinstance(mine.error, CallTimeoutError)
    server.handle(st.Received(SCHEDULER, 0, m.Heartbeat()))
    server.tick(4.0)
    assert [send.message for send in questions(server)][1:] == [m.Gathered(1, 1, 1, 0), m.Gathered(1, 1, 2, 0, (1,))]
    server.lose_peer(1)
    answer(server, m.Settled("late"), 1)
    answer(server, m.Error(20, "no", {}), 2)
    assert all(asked.pending for asked in (*torn, late)), "nobody is there to be told"


def test_a_connection_that_ends_leaves_the_pushes_of_others() -> None:
    server = other()
    mine = push(server, 0, "a", 1, 1, 2)
    push(server, 1, "a", 1, 1, 1)
    link(server)
    server.lose_peer(1)
    answer(server, m.Settled(""))
    assert mine.answer == m.Done(1)


def test_a_call_that_counts_after_all_is_answered_at_once() -> None:
    server = other()
    late = push(server, 1, "a", 1, 1, 2, timeout=2.0)
    link(server)
    server.tick(2.0)
    answer(server, m.Settled(""), 0)
    server.tick(2.0)
    assert isinstance(late.error, RoundTimeoutError)
    assert "what was pushed stays counted" in str(late.error)


def test_a_question_is_asked_again_over_another_connection() -> None:
    server = other()
    push(server, 1, "a", 1)
    first = push(server, 0, "a", 1, 1, 2)
    link(server)
    server.handle(st.PeerLost(LEADER, "connection reset"))
    assert first.pending
    link(server)
    answer(server, m.Settled(""))
    assert first.answer == m.Done(1)


def test_an_answer_that_was_settled_with_another_is_not_asked_for_again() -> None:
    server = other()
    push(server, 0, "a", 1, 2, 2)
    push(server, 0, "a", 2, 1, 2)
    link(server)
    answer(server, m.Settled("late"))
    server.handle(st.PeerLost(LEADER, "connection reset"))
    assert len(questions(server)) == 1


def test_without_the_deciding_server_nothing_counts() -> None:
    server = other()
    first = push(server, 0, "a", 1, 1, 2)
    torn = push(server, 1, "a", 1, 1, 2)
    link(server)
    server.servers[0] = ("lost", "killed")
    server.publish()
    for asked in (first, torn):
        assert isinstance(asked.error, ServerLostError)
        assert "killed" in str(asked.error)
    server.evict(1)
    assert server.machine._answers.roster.entry(1) == m.WorkerEntry(1, "worker-1", 1, "evicted", "connection closed")


def test_an_answer_that_is_none_is_told_to_who_waits() -> None:
    for message in (m.Totals((1.0,)), m.Error(20, "no", {"ranks": [0]})):
        server = other()
        asked = push(server, 0, "a", 1, 1, 2)
        link(server)
        answer(server, message)
        assert isinstance(asked.error, ProtocolError | MembershipError)


def test_what_nobody_can_decide_is_dropped_when_its_worker_is_evicted() -> None:
    server = other()
    push(server, 1, "a", 1, 1, 2)
    link(server)
    answer(server, m.Error(20, "no", {}))
    server.evict(1)
    assert not server.slots


def test_what_nobody_can_decide_of_who_is_evicted_is_dropped() -> None:
    server = other()
    push(server, 1, "a", 1, 1, 2)
    link(server)
    server.evict(1)
    answer(server, m.Error(20, "no", {}))
    assert not server.slots
    assert not server.machine._whole


def test_server_1_decides_nothing() -> None:
    server = other()
    server.ask(0, m.AttachServer(0, "server-0", 1, server.epoch, 5.0), peer=THERE)
    asked = server.ask(0, m.Gathered(0, 1, 1, 2), peer=THERE)
    assert isinstance(asked.error, ProtocolError)
    assert "server 0 does" in str(asked.error)


# --- server 0, and server 1 played by hand ---


def leader() -> Server:
    """Return server 0 of two, with two keys and two workers; server 1 is connected."""
    server = Server(2, servers=2)
    for key in "ab":
        server.init(key)
    assert server.ask(0, m.AttachServer(1, "server-1", 1, server.epoch, 5.0), peer=THERE).answer == m.Done()
    return server


def ask(server: Server, rank: int, call: int, *, servers: int = 2, after: tuple[int, ...] = (), life: int = 1) -> Asked:
    """Let server 1 ask about a call."""
    return server.ask(rank, m.Gathered(rank, life, call, servers, after), peer=THERE)


def test_a_call_counts_when_it_is_on_all_of_its_servers() -> None:
    server = leader()
    push(server, 1, "a", 1)
    asked = ask(server, 0, 3)
    assert asked.pending
    mine = push(server, 0, "a", 3, 1, 2)
    assert (asked.answer, mine.answer) == (m.Settled(""), m.Done(1))
    assert ask(server, 0, 3).answer == m.Settled("")


def test_server_0_need_not_be_one_of_them() -> None:
    server = leader()
    assert ask(server, 0, 3, servers=1).answer == m.Settled("")


def test_a_call_waits_for_the_one_before_of_the_same_keys() -> None:
    server = leader()
    second = ask(server, 0, 4, servers=1, after=(3,))
    other = ask(server, 0, 5, servers=2)
    assert second.pending
    first = ask(server, 0, 3, servers=1)
    assert (first.answer, second.answer, other.answer) == (m.Settled(""), m.Settled(""), None)


def test_nothing_counts_of_who_is_evicted_that_is_not_on_all_servers() -> None:
    server = leader()
    asked, mine = ask(server, 1, 3), push(server, 1, "a", 4, 1, 2)
    server.evict(1)
    assert asked.answer == m.Settled("gone")
    assert isinstance(mine.error, StaleEpochError)
    assert ask(server, 1, 4).answer == m.Settled("gone")
    assert ask(server, 1, 5, servers=1).answer == m.Settled("gone")


def test_a_worker_of_a_later_view_is_not_gone() -> None:
    """Server 1 may have the view in which a worker is another process, or is there at all, before server 0."""
    server = leader()
    assert ask(server, 1, 1, servers=1, life=2).answer == m.Settled("")
    assert ask(server, 7, 1, servers=1).answer == m.Settled("")


def test_what_one_server_gives_up_counts_nowhere() -> None:
    server = leader()
    mine = push(server, 0, "a", 3, 1, 2)
    assert ask(server, 0, 3, servers=0).answer == m.Settled("late")
    assert isinstance(mine.error, CallTimeoutError)


def test_a_server_that_is_gone_is_not_answered() -> None:
    server = leader()
    asked = ask(server, 0, 3)
    server.handle(st.PeerLost(THERE, "connection reset"))
    push(server, 0, "a", 3, 1, 2)
    assert asked.pending


def test_a_worker_can_not_ask() -> None:
    server = leader()
    server.ask(0, m.Gathered(0, 1, 1, 2))
    assert ef.Disconnect(10, "unexpected Gathered from a worker") in server.effects


# --- the worker ---


@pytest.mark.parametrize(("policy", "mode"), [("bsp", "shrink"), ("ringmaster:1", "fail"), ("ringmaster:1", "respawn")])
def test_a_worker_binds_the_pushes_of_a_call_together(make_worker: Any, policy: str, mode: str) -> None:
    """Where others go on without it when it is lost."""
    worker = make_worker(join=False, policy=policy)
    worker.call(st.Join, timeout=10.0)
    worker.handle(st.Connected(SCHEDULER))
    view = worker.view()
    view.on_worker_loss = mode
    worker.handle(st.Received(SCHEDULER, 0, view))
    for index in range(2):
        (attach,) = [one for one in worker.handle(st.Connected(index)) if isinstance(one, ef.Send)]
        worker.answer(attach)
    worker.finish(worker.transfer("init", "a", "b", "c", shape=(20_000,)))
    sends = [worker.transfer("push", "a", "b", "c", shape=(20_000,)).sends for _ in range(2)]
    wholes = [{send.peer: send.message.whole for send in call} for call in sends]
    counts = [sum(send.peer == server for send in sends[0]) for server in (0, 1)]
    assert counts == [3, 3]
    assert wholes[1] == {server: m.Whole(2, counts[server], 2) for server in (0, 1)}
    assert [whole.call for whole in wholes[0].values()] == [1, 1]
    reads = worker.transfer("pull", "a", shape=(20_000,)).sends
    assert not any(hasattr(send.message, "whole") for send in reads)


# --- a server that goes on where another one was ---


def kept(server: Server, rank: int, key: str, verdict: str | None = None, number: int = 1) -> WholeCall:
    """Return what a standby had of a call of a worker, which was for two servers."""
    head = (key, (2,), "float32", 1, 2, number, 0, True, 5.0, 0, number)
    message = m.Push(*head, whole=m.Whole(number, 1, 2))
    call = WholeCall((rank, 1, number), 1, 2, verdict=verdict, asked=verdict is not None)
    call.keys[key] = None
    slot = 900 + rank + 10 * number
    server.slots[slot] = np.float32(rank + 1)
    received = st.Received(99, rank + 10 * number, message, slot, 4)
    call.pushes[identity(message)] = Aside(received, message, None, (key,))
    return call


def successor() -> Server:
    """Return server 1 in the place of another one, with a key of two elements, of two workers of which one is gone."""
    server = Server(2, index=1, servers=2)
    server.init("c", shape=(2,), start=1, stop=2)
    server.evict(1)
    return server


def resume(server: Server, known: dict[CallName, str], *calls: WholeCall) -> None:
    """Let a server go on from what a standby had."""
    effects = server.machine._whole.resume(OrderedDict(known), calls, server.now)
    server.effects += effects
    for effect in effects:
        server._perform(effect)


@pytest.mark.parametrize(("verdict", "total"), [("", 3.0), ("gone", 1.0)])
def test_first_it_is_decided_what_counts_of_those_who_are_gone(verdict: str, total: float) -> None:
    """The others have brought all that the round waits for."""
    server = successor()
    resume(server, {(0, 1, 1): ""}, kept(server, 0, "c", ""), kept(server, 1, "c"))
    assert server.machine._whole.is_resuming
    early = server.attach(0)
    link(server)
    assert [send.message for send in questions(server)] == [m.Gathered(1, 1, 1, 2)]
    assert server.value("c", 1) == 0.0
    answer(server, m.Settled(verdict))
    assert server.value("c", 1) == total
    assert early.answer == m.Done()


def test_call_that_is_known_to_count_is_not_asked_about_with_the_next_one() -> None:
    """The server before may have decided it alone, so the deciding one would wait for it for ever."""
    server = successor()
    resume(server, {(1, 1, 1): ""}, kept(server, 1, "c", ""), kept(server, 1, "c", number=2))
    link(server)
    assert [send.message for send in questions(server)] == [m.Gathered(1, 1, 2, 2)]


def test_nothing_waits_where_nobody_is_gone() -> None:
    server = Server(2, index=1, servers=2)
    server.init("c", shape=(2,), start=1, stop=2)
    resume(server, {}, kept(server, 0, "c"))
    assert not questions(server)
    server.handle(st.Tick())
    assert server.machine._whole.resumed(server.now) != []
    assert server.machine._whole.resumed(server.now) == []


@pytest.mark.parametrize("copies", [False, True], ids=["before it goes on", "while a standby gets it"])
def test_what_the_server_before_may_have_told_is_asked_about_when_its_worker_is_lost_later(copies: bool) -> None:
    """The deciding server has let it count, though this one does not know that yet."""
    server = Server(2, index=1, servers=2)
    server.init("c", shape=(2,), start=1, stop=2)
    server.push(0, key="c", shape=(2,), start=1, stop=2)
    call = kept(server, 1, "c")
    resume(server, {}, call)
    if copies:
        server.machine._whole.copy = lambda call: True
        assert server.machine._whole.resumed(server.now) == []
        assert call.copying
    server.evict(1)
    assert call.verdict is None
    if copies:
        [connect] = server.machine._whole.copied(call, server.now)
        assert isinstance(connect, ef.Connect)
    link(server)
    assert [send.message for send in questions(server)] == [m.Gathered(1, 1, 1, 2)]
    answer(server, m.Settled(""))
    assert server.value("c", 1) == 3.0


def test_call_that_is_over_when_a_standby_has_it_is_not_asked_about(server: Server) -> None:
    copied: list[WholeCall] = []

    def copy(call: WholeCall) -> bool:
        copied.append(call)
        return True

    server.machine._whole.copy = copy
    push(server, 1, "a", 1)
    assert len(copied) == 1
    server.evict(1)
    assert server.machine._whole.copied(copied[0], server.now) == []
    assert server.value("a") == 0.0
