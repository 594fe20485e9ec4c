"""Norms of whole tensors: gathered at the server of a key's first element, before anybody makes the update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.placement import home_of
from aiokv.errors import (
    AiokvError,
    CallTimeoutError,
    KeyDeletedError,
    MembershipError,
    ProtocolError,
    RoundTimeoutError,
    ServerLostError,
    UnknownKeyError,
    UpdateRefusedError,
)
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Asked, Like, Server

OURS = next(key for key in "abcdefgh" if home_of(key, 2) == 0)
"""A key of six elements whose first half is here, on server 0, and whose second half is on server 1."""

THEIRS = next(key for key in "abcdefgh" if home_of(key, 2) == 1)
"""The same the other way round."""

LINK = -3
"""This server's own link to server 1."""

THERE = 50
"""The connection that server 1 has opened."""


@pytest.fixture
def pair(make_server: type[Server]) -> Server:
    """Server 0 of two, with one worker, chunks of three elements, and the rule lamb."""
    server = make_server(workers=1, servers=2, chunk_bytes=12)
    assert server.ask(0, m.SetOptimizer("lamb", {}, "sum", 5.0)).answer == m.Done()
    for key, start in ((OURS, 0), (THEIRS, 3)):
        assert server.init(key, shape=(6,), start=start, stop=start + 3).answer == m.Done()
    return server


def push(server: Server, key: str, timeout: float = 5.0) -> Asked:
    start = 0 if key == OURS else 3
    return server.push(0, key=key, shape=(6,), start=start, stop=start + 3, timeout=timeout)


def beat(server: Server, now: float) -> None:
    """Let time pass, with a scheduler that is there."""
    server.now = now
    server.handle(st.Received(SCHEDULER, 0, m.Heartbeat()))
    server.tick(now)


def norm(server: Server, *sums: float, error: AiokvError | None = None) -> list[ef.Effect]:
    """Let the store answer the newest wish for norms."""
    wish = server.seen(ef.Norms)[-1]
    return server.handle(st.Normed(wish.key, wish.start, wish.version, wish.phase, [sums] if sums else [], error))


def link(server: Server) -> None:
    """Let server 1 answer the connection that this server opens."""
    server.handle(st.Connected(LINK))
    server.handle(st.Received(LINK, 1, m.Done()))


def asked(server: Server) -> list[ef.Send]:
    """Return what was sent over the own link to server 1."""
    return [send for send in server.seen(ef.Send) if send.peer == LINK]


def attach(server: Server, peer: int = THERE, **changes: Any) -> Asked:
    """Let server 1 say who it is."""
    fields: dict[str, Any] = {"index": 1, "name": "server-1", "incarnation": 1, "epoch": server.epoch, "timeout": 5.0}
    return server.ask(0, m.AttachServer(**(fields | changes)), peer=peer)


def sums(server: Server, *own: float, key: str = OURS, start: int = 3, version: int = 1, peer: int = THERE) -> Asked:
    """Let server 1 send the sums of its chunk."""
    return server.ask(0, m.Sums(key, start, version, 0, own), peer=peer)


def waiting(server: Server, key: str) -> Asked:
    """Push to a chunk whose own norms are there, so that it waits for the other half's."""
    pushed = push(server, key)
    norm(server, 1.0, 2.0)
    if key == THEIRS and LINK not in [send.peer for send in server.seen(ef.Send)]:
        link(server)
    assert pushed.pending
    return pushed


# --- a key that is whole ---


def test_norms_come_before_the_update_once_for_each_phase(make_server: type[Server], like: type[Like]) -> None:
    server = make_server(workers=1)
    server.ask(0, m.SetOptimizer("lans", {}, "mean", 5.0))
    server.init()
    pushed = server.push(0)
    assert server.seen(ef.Norms) == [like(ef.Norms, key="w", version=1, phase=0, gathered=[], divisor=1)]
    norm(server, 4.0)
    assert server.seen(ef.Norms)[1:] == [like(ef.Norms, phase=1, gathered=[[(4.0,)]])]
    assert not server.seen(ef.Apply)
    norm(server, 1.0, 2.0, 3.0)
    assert server.seen(ef.Apply) == [like(ef.Apply, norms=[[(4.0,)], [(1.0, 2.0, 3.0)]])]
    assert pushed.answer == m.Done(1)
    assert not [connect for connect in server.seen(ef.Connect) if connect.peer < SCHEDULER]


def test_norms_that_could_not_be_computed_are_told_to_who_has_pushed(make_server: type[Server]) -> None:
    server = make_server(workers=1)
    server.ask(0, m.SetOptimizer("lamb", {}, "sum", 5.0))
    server.init(value=5.0)
    pushed = server.push(0)
    error = UpdateRefusedError("broken", key="w", round=1)
    norm(server, error=error)
    assert pushed.answer is error
    assert server.value() == 5.0
    server.push(0)
    norm(server, 1.0, 1.0)
    assert server.pull(0).answer == m.Value(2), "the round is over, and the next one is made"


# --- a key whose home is another server ---


def test_other_server_is_connected_to_when_it_is_first_needed(pair: Server, like: type[Like]) -> None:
    pushed = push(pair, THEIRS)
    assert norm(pair, 1.0, 2.0) == [ef.Connect(LINK, "127.0.0.1", 9001)]
    assert pair.handle(st.Connected(LINK)) == [ef.Send(LINK, 1, m.AttachServer(0, "server-0", 1, 1, 10.0))]
    (question,) = pair.handle(st.Received(LINK, 1, m.Done()))
    assert question == like(ef.Send, peer=LINK, message=m.Sums(THEIRS, 3, 1, 0, (1.0, 2.0)))
    assert pushed.pending
    pair.handle(st.Received(LINK, asked(pair)[-1].request, m.Totals((11.0, 12.0))))
    assert pair.seen(ef.Apply) == [like(ef.Apply, norms=[[(11.0, 12.0)]])]
    assert pushed.answer == m.Done(1)
    push(pair, THEIRS)
    assert norm(pair, 3.0, 4.0) == [like(ef.Send, peer=LINK, message=m.Sums(THEIRS, 3, 2, 0, (3.0, 4.0)))]


def test_connection_is_tried_again_later_and_later_and_then_given_up(pair: Server, like: type[Like]) -> None:
    pushed = push(pair, THEIRS)
    norm(pair, 1.0, 2.0)
    delays = []
    for _ in range(3):
        (connect,) = pair.handle(st.ConnectFailed(LINK, "connection refused"))
        assert isinstance(connect, ef.Connect)
        delays.append(connect.delay)
    assert delays == [0.05, 0.1, 0.2]
    pair.push(0, key=OURS, shape=(6,), stop=3, timeout=100.0)
    pair.handle(st.Received(SCHEDULER, 0, m.Heartbeat()))
    assert pair.machine.deadline() == 2.0
    pair.tick(4.9)
    assert pushed.pending
    pushed = pair.pull(0, key=THEIRS, shape=(6,), start=3, stop=6, timeout=100.0)
    effects = pair.tick(10.0)
    assert like(ef.Disconnect, peer=LINK) in effects
    assert pushed.answer == m.Value(1), "the round is over; its value is the one before"
    assert pair.handle(st.ConnectFailed(LINK, "too late")) == []
    assert pair.handle(st.Connected(LINK)) == [like(ef.Disconnect, peer=LINK)]


@pytest.mark.parametrize("linked", [False, True])
def test_link_that_ends_is_made_again_and_the_same_is_asked_again(pair: Server, like: type[Like], linked: bool) -> None:
    pushed = push(pair, THEIRS)
    norm(pair, 1.0, 2.0)
    if linked:
        link(pair)
    connect, *logs = pair.handle(st.PeerLost(LINK, "connection reset"))
    assert connect == ef.Connect(LINK, "127.0.0.1", 9001, 0.05)
    text = "server-0: the link to server 1 (server-1 at 127.0.0.1:9001) has ended: connection reset; it is made again"
    facts = {"server": 1, "reason": "connection reset"}
    assert logs == [ef.Log("warning", text, "link_ended", facts)] * linked
    assert pair.handle(st.Received(LINK, 2, m.Totals((9.0, 9.0)))) == [], "of the link before"
    link(pair)
    assert asked(pair)[-1] == like(ef.Send, request=2, message=m.Sums(THEIRS, 3, 1, 0, (1.0, 2.0)))
    assert pushed.pending
    pair.handle(st.Received(LINK, 2, m.Totals((1.0, 1.0))))
    assert pushed.answer == m.Done(1)


def test_link_over_which_nothing_is_to_be_answered_is_made_again_when_it_is_needed(pair: Server) -> None:
    waiting(pair, THEIRS)
    pair.handle(st.Received(LINK, asked(pair)[-1].request, m.Totals((1.0, 1.0))))
    assert pair.handle(st.PeerLost(LINK, "connection reset")) == []
    push(pair, THEIRS)
    assert norm(pair, 1.0, 2.0) == [ef.Connect(LINK, "127.0.0.1", 9001)]


def test_links_that_end_soon_after_they_were_made_are_made_again_later_and_later(pair: Server) -> None:
    waiting(pair, THEIRS)
    delays = []
    for now in (0.0, 0.5, 1.0, 10.0):
        pair.now = now
        connect = pair.handle(st.PeerLost(LINK, "connection reset"))[0]
        assert isinstance(connect, ef.Connect)
        delays.append(connect.delay)
        link(pair)
    assert delays == [0.05, 0.1, 0.2, 0.05]


def test_question_waits_for_the_death_time_out_since_the_link_has_ended(pair: Server) -> None:
    """Or since it was asked, if that was later; 10 s here."""
    first = push(pair, THEIRS, timeout=100.0)
    norm(pair, 1.0, 2.0)
    link(pair)
    # The other one is about another key.
    other = next(key for key in "abcdefgh" if home_of(key, 2) == 1 and key != THEIRS)
    pair.init(other, shape=(6,), start=3, stop=6)
    beat(pair, 7.0)
    pair.handle(st.PeerLost(LINK, "connection reset"))
    beat(pair, 12.0)
    second = push(pair, other, timeout=100.0)
    norm(pair, 1.0, 2.0)
    beat(pair, 16.9)
    assert first.pending
    assert pair.machine.deadline() == 17.0
    beat(pair, 17.0)
    assert isinstance(first.error, ServerLostError)
    assert "no link to it: connection reset" in str(first.error)
    assert first.error.details == {"server": 1, "address": "127.0.0.1:9001"}
    beat(pair, 21.9)
    assert second.pending
    beat(pair, 22.0)
    assert isinstance(second.error, ServerLostError)
    assert pair.handle(st.PeerLost(LINK, "again")) == []


def test_server_that_does_not_know_this_one_is_asked_again_later(pair: Server, like: type[Like]) -> None:
    pushed = push(pair, THEIRS)
    norm(pair, 1.0, 2.0)
    pair.handle(st.Connected(LINK))
    for answer in (m.Error(20, "who are you?", {}), m.Totals((1.0,))):
        effects = pair.handle(st.Received(LINK, 1, answer))
        assert effects == [like(ef.Disconnect, peer=LINK), like(ef.Connect, peer=LINK)]
        assert pair.handle(st.Received(LINK, 1, m.Done())) == [], "of the connection before"
        pair.handle(st.Connected(LINK))
    assert len([one for one in asked(pair) if isinstance(one.message, m.Sums)]) == 0
    link(pair)
    assert isinstance(asked(pair)[-1].message, m.Sums)
    assert pushed.pending


def test_question_about_a_key_that_is_deleted_is_not_asked_again(pair: Server) -> None:
    """The key may be made again, and its versions begin anew."""
    waiting(pair, THEIRS)
    assert pair.ask(0, m.Delete((THEIRS,), 5.0)).answer == m.Done()
    pair.pushed.clear()
    del pair.values[THEIRS, 3]
    pair.init(THEIRS, shape=(6,), start=3, stop=6)
    pushed = waiting(pair, THEIRS)
    pair.handle(st.PeerLost(LINK, "connection reset"))
    before = len(asked(pair))
    link(pair)
    assert [one.message for one in asked(pair)[before + 1 :]] == [m.Sums(THEIRS, 3, 1, 0, (1.0, 2.0))]
    pair.handle(st.Received(LINK, asked(pair)[-1].request, m.Totals((1.0, 1.0))))
    assert pushed.answer == m.Done(1)


@pytest.mark.parametrize("linked", [False, True])
def test_another_node_that_serves_the_index_is_asked_again(pair: Server, like: type[Like], linked: bool) -> None:
    pushed = push(pair, THEIRS)
    norm(pair, 1.0, 2.0)
    if linked:
        link(pair)
    pair.nodes[1] = ("standby", 7, "10.0.0.5", 9101)
    assert pair.publish() == [
        like(ef.Disconnect, peer=LINK, reason="standby is server 1 now"),
        ef.Connect(LINK, "10.0.0.5", 9101),
    ]
    pair.publish()
    link(pair)
    assert asked(pair)[-1] == like(ef.Send, request=2, message=m.Sums(THEIRS, 3, 1, 0, (1.0, 2.0)))
    pair.handle(st.Received(LINK, 2, m.Totals((1.0, 1.0))))
    assert pushed.answer == m.Done(1)


def test_server_that_the_view_calls_lost_is_not_waited_for(pair: Server, like: type[Like]) -> None:
    pushed = waiting(pair, THEIRS)
    pair.servers[1] = ("lost", "no heartbeat for 10 s")
    effects = pair.publish()
    assert like(ef.Disconnect, peer=LINK) in effects
    assert "is lost: no heartbeat for 10 s" in str(pushed.error)
    pushed = push(pair, THEIRS)
    norm(pair, 1.0, 2.0)
    assert isinstance(pushed.error, ServerLostError)
    assert isinstance(attach(pair).answer, MembershipError)


@pytest.mark.parametrize(
    ("answer", "expected", "text"),
    [
        (m.Error(24 - 1, "server 2 is lost", {"server": 2}), ServerLostError, "server 2 is lost"),
        (m.Error(41, "no such key", {}), UpdateRefusedError, "round 1: the update could not be made: no such key"),
        (m.Value(1), UpdateRefusedError, "unexpected Value"),
    ],
)
def test_home_that_refuses_refuses_the_update(
    pair: Server, answer: m.Message, expected: type[AiokvError], text: str
) -> None:
    pushed = waiting(pair, THEIRS)
    pair.handle(st.Received(LINK, asked(pair)[-1].request, answer))
    assert type(pushed.error) is expected
    assert text in str(pushed.error)
    assert push(pair, THEIRS).pending


@pytest.mark.parametrize("answer", [m.Totals((1.0,)), m.Error(20, "who are you?", {})])
def test_answer_that_nobody_asked_for_closes_the_link(pair: Server, like: type[Like], answer: m.Message) -> None:
    pushed = waiting(pair, THEIRS)
    effects = pair.handle(st.Received(LINK, 99, answer))
    assert effects == [like(ef.Disconnect, peer=LINK), like(ef.Connect, peer=LINK), like(ef.Log)]
    assert pushed.pending


def test_home_hears_that_norms_could_not_be_computed(pair: Server) -> None:
    pushed = push(pair, THEIRS)
    norm(pair, error=UpdateRefusedError("broken"))
    link(pair)
    assert asked(pair)[-1].message == m.Sums(THEIRS, 3, 1, 0, ())
    assert pushed.pending, "the home answers with the reason for all"


# --- a key whose home is here ---


@pytest.mark.parametrize("first", ["here", "there"])
def test_home_adds_the_sums_in_the_order_of_the_chunks(pair: Server, like: type[Like], first: str) -> None:
    """In float64, 2^53 + 1 = 2^53, and that plus 2 is 2^53 + 2."""
    assert attach(pair).answer == m.Done()
    pushed = push(pair, OURS)
    if first == "here":
        norm(pair, 2.0**53, 1.0)
    question = sums(pair, 1.0, 5.0)
    if first == "there":
        assert question.pending
        norm(pair, 2.0**53, 1.0)
    assert question.answer == m.Totals((2.0**53, 6.0))
    assert pair.seen(ef.Apply) == [like(ef.Apply, norms=[[(2.0**53, 6.0)]])]
    assert pushed.answer == m.Done(1)


def test_server_of_a_newer_view_waits_for_it(pair: Server) -> None:
    early = attach(pair, epoch=2)
    assert early.pending
    pair.publish()
    assert early.answer == m.Done()
    late = attach(pair, epoch=9)
    pair.handle(st.Received(SCHEDULER, 0, m.Heartbeat()))
    pair.tick(5.0)
    assert isinstance(late.answer, CallTimeoutError)


@pytest.mark.parametrize("changes", [{"index": 2}, {"name": "other"}, {"incarnation": 2}])
def test_stranger_is_no_server(pair: Server, changes: dict[str, Any]) -> None:
    assert isinstance(attach(pair, **changes).answer, MembershipError)
    assert isinstance(sums(pair, 1.0, 1.0).answer, ProtocolError)


@pytest.mark.parametrize(("key", "start"), [(OURS, 0), (OURS, 1), (THEIRS, 3)])
def test_sums_of_a_chunk_that_is_not_the_servers_own_are_refused(pair: Server, key: str, start: int) -> None:
    attach(pair)
    assert isinstance(sums(pair, 1.0, 1.0, key=key, start=start).answer, ProtocolError)
    assert isinstance(sums(pair, 1.0, 1.0, key="unknown").answer, UnknownKeyError)


@pytest.mark.parametrize("how", ["view", "view before"])
def test_lost_server_fails_the_round_at_home(pair: Server, how: str) -> None:
    attach(pair)
    pushed = push(pair, OURS)
    if how != "view before":
        norm(pair, 1.0, 2.0)
        assert pushed.pending
    pair.servers[1] = ("lost", "no heartbeat")
    pair.publish()
    if how == "view before":
        norm(pair, 1.0, 2.0)
    assert isinstance(pushed.error, ServerLostError)
    assert pushed.error.details["server"] == 1


@pytest.mark.parametrize("ends", ["before the totals", "after the totals"])
def test_sums_that_come_again_over_another_connection_are_answered_as_the_first(pair: Server, ends: str) -> None:
    """The answer may have got lost with the connection."""
    attach(pair)
    pushed = push(pair, OURS)
    question = sums(pair, 1.0, 2.0)
    assert question.pending
    if ends == "before the totals":
        pair.handle(st.PeerLost(THERE, "connection reset"))
    norm(pair, 1.0, 2.0)
    assert question.answer == (m.Totals((2.0, 4.0)) if ends == "after the totals" else None)
    assert pushed.answer == m.Done(1)
    attach(pair, peer=THERE + 1)
    assert sums(pair, 1.0, 2.0, peer=THERE + 1).answer == m.Totals((2.0, 4.0))
    pushed = push(pair, OURS)
    assert sums(pair, 3.0, 3.0, version=2, peer=THERE + 1).pending
    attach(pair, peer=THERE + 2)
    assert sums(pair, 3.0, 3.0, version=2, peer=THERE + 2).pending
    norm(pair, 1.0, 1.0)
    assert pushed.answer == m.Done(2)
    assert pair.seen(ef.Apply)[-1].norms == [[(4.0, 4.0)]]


def test_sums_of_rounds_that_are_long_over_are_refused_alone(pair: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a standby that is too far behind."""
    monkeypatch.setattr("aiokv.core.server.rounds.norms.REMEMBERED", 2)
    attach(pair)
    for version in (1, 2, 3):
        push(pair, OURS)
        norm(pair, 1.0, 2.0)
        assert sums(pair, 1.0, 2.0, version=version).answer == m.Totals((2.0, 4.0))
    waits = waiting(pair, OURS)
    assert sums(pair, 1.0, 2.0, version=2).answer == m.Totals((2.0, 4.0))
    late = sums(pair, 1.0, 2.0, version=1)
    assert isinstance(late.answer, UpdateRefusedError)
    assert "round 1: its norms are remembered no longer" in str(late.answer)
    assert waits.pending


def test_connection_of_a_server_that_has_made_another_one_is_closed(pair: Server, like: type[Like]) -> None:
    attach(pair)
    question = sums(pair, 1.0, 2.0)
    assert attach(pair, peer=THERE + 1).answer == m.Done()
    assert pair.effects[-1] == like(ef.Disconnect, peer=THERE)
    push(pair, OURS)
    norm(pair, 1.0, 2.0)
    assert question.pending, "nobody is there"


def test_connection_of_a_server_in_whose_place_there_is_another_is_closed(pair: Server, like: type[Like]) -> None:
    attach(pair)
    pair.nodes[1] = ("standby", 7, "10.0.0.5", 9101)
    assert like(ef.Disconnect, peer=THERE) in pair.publish()
    assert isinstance(sums(pair, 1.0, 2.0).answer, ProtocolError)
    assert attach(pair, name="standby", incarnation=7, peer=THERE + 1).answer == m.Done()
    assert sums(pair, 1.0, 2.0, peer=THERE + 1).pending


def test_chunk_that_is_late_hears_why_the_round_has_failed(pair: Server) -> None:
    attach(pair)
    assert isinstance(sums(pair).error, UpdateRefusedError)
    pushed = push(pair, OURS)
    norm(pair, 1.0, 2.0)
    assert isinstance(pushed.error, UpdateRefusedError)
    pair.handle(st.PeerLost(THERE, "connection reset"))
    attach(pair)
    assert isinstance(sums(pair).answer, UpdateRefusedError), "also when it asks again"
    pushed = push(pair, OURS)
    norm(pair, 1.0, 2.0)
    assert sums(pair, 1.0, 2.0, version=2).answer == m.Totals((2.0, 4.0))
    assert pushed.answer == m.Done(2)


def test_server_that_has_gone_on_without_the_round_ends_it_here(pair: Server) -> None:
    attach(pair)
    pushed = waiting(pair, OURS)
    assert sums(pair, 1.0, 2.0, version=2).pending
    assert isinstance(pushed.error, UpdateRefusedError)
    pushed = push(pair, OURS)
    norm(pair, 1.0, 2.0)
    assert pushed.answer == m.Done(2)


@pytest.mark.parametrize("own", [(), (1.0,)])
def test_sums_that_are_not_there_fail_the_round_for_all(pair: Server, own: tuple[float, ...]) -> None:
    attach(pair)
    pushed = waiting(pair, OURS)
    question = sums(pair, *own)
    assert isinstance(question.answer, UpdateRefusedError)
    assert pushed.answer is question.answer
    assert "elements from 3 on" in str(pushed.error)


def test_deadline_of_a_push_names_the_server_whose_norms_are_missing(pair: Server) -> None:
    pushes = [waiting(pair, key) for key in (OURS, THEIRS)]
    pair.tick(5.0)
    for pushed in pushes:
        assert isinstance(pushed.error, RoundTimeoutError)
        assert "no norms from server 1 (server-1 at 127.0.0.1:9001) within 5 s" in str(pushed.error)


def test_deadline_before_the_own_norms_are_there(pair: Server) -> None:
    pushed = push(pair, OURS)
    pair.tick(5.0)
    assert "its update is not applied yet" in str(pushed.error)


def test_key_is_deleted_although_it_waits_for_norms(pair: Server) -> None:
    attach(pair)
    pushes = [waiting(pair, key) for key in (OURS, THEIRS)]
    request = asked(pair)[-1].request
    pushes[0].answer = None
    assert pair.ask(0, m.Delete((OURS, THEIRS), 5.0)).answer == m.Done()
    assert [type(pushed.answer) for pushed in pushes] == [KeyDeletedError] * 2
    assert pair.handle(st.Received(LINK, request, m.Totals((1.0, 2.0)))) == []
    assert not pair.slots


def test_delete_at_home_is_told_to_the_servers_that_wait(pair: Server) -> None:
    attach(pair)
    question = sums(pair, 1.0, 2.0)
    assert pair.ask(0, m.Delete((OURS,), 5.0)).answer == m.Done()
    assert isinstance(question.answer, KeyDeletedError)


def test_delete_waits_while_the_store_computes_norms(pair: Server) -> None:
    push(pair, OURS)
    deleted = pair.ask(0, m.Delete((OURS,), 5.0))
    assert deleted.pending
    pair.servers[1] = ("lost", "gone")
    pair.publish()
    norm(pair, 1.0, 2.0)
    assert deleted.answer == m.Done()


def test_chunk_that_placement_does_not_know_is_not_updated(pair: Server) -> None:
    pair.init("odd", shape=(6,), start=1, stop=4)
    pushed = pair.push(0, key="odd", shape=(6,), start=1, stop=4)
    norm(pair, 1.0, 2.0)
    assert isinstance(pushed.answer, UpdateRefusedError)
    assert "elements 1 to 4 are no chunk of server 0" in str(pushed.error)


def test_two_chunks_of_a_key_here_need_no_message(make_server: type[Server], like: type[Like]) -> None:
    server = make_server(workers=1, chunk_bytes=12)
    server.ask(0, m.SetOptimizer("lars", {}, "sum", 5.0))
    for start in (0, 3):
        server.init(shape=(6,), start=start, stop=start + 3)
        server.ask(0, m.Push("w", (6,), "float32", start, start + 3, 1, 0, False, 5.0), 1.0)
        norm(server, 1.0 + start, 2.0)
    totals = like(ef.Apply, norms=[[(5.0, 4.0)]])
    assert server.seen(ef.Apply) == [totals, totals]


def test_key_that_is_deleted_while_one_of_its_chunks_gives_up(make_server: type[Server]) -> None:
    server = make_server(workers=1, servers=2, chunk_bytes=8)
    server.ask(0, m.SetOptimizer("lars", {}, "sum", 5.0))
    # Elements 0 to 4 are here, in two chunks, 4 to 8 on server 1.
    pushes = []
    for start in (0, 2):
        server.init(OURS, shape=(8,), start=start, stop=start + 2)
        message = m.Push(OURS, (8,), "float32", start, start + 2, 1, 0, False, 5.0)
        pushes.append(server.ask(0, message, 1.0))
    deleted = server.ask(0, m.Delete((OURS,), 5.0))
    wishes = server.seen(ef.Norms)
    for wish in wishes:
        server.handle(st.Normed(wish.key, wish.start, 1, 0, [(1.0, 1.0)]))
    assert deleted.pending
    server.servers[1] = ("lost", "gone")
    server.publish()
    assert deleted.answer == m.Done()
    assert [type(pushed.answer) for pushed in pushes] == [ServerLostError, KeyDeletedError]


def test_server_that_has_no_part_of_the_key_may_be_lost(make_server: type[Server]) -> None:
    """Two elements lie on two of three servers."""
    server = make_server(workers=1, servers=3, chunk_bytes=4)
    server.ask(0, m.SetOptimizer("lars", {}, "sum", 5.0))
    key = next(key for key in "abcdefgh" if home_of(key, 3) == 0)
    server.init(key, shape=(2,))
    pushed = server.push(0, key=key, shape=(2,))
    norm(server, 1.0, 1.0)
    server.servers[2] = ("lost", "gone")
    server.publish()
    attach(server)
    assert sums(server, 2.0, 2.0, key=key, start=1).answer == m.Totals((3.0, 3.0))
    assert pushed.answer == m.Done(1)
