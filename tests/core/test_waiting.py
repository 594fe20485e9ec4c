"""For what requests wait, asked before their time is over: `aiokv why`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.inquiry import Inquiry
from aiokv.errors import HandshakeError, OverloadedError, SchedulerLostError
from aiokv.types import SCHEDULER, Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Scheduler, Server

ONLOOKER = 99


def look(server: Server) -> dict[str, m.WaitingCall]:
    """Let somebody who is no member ask a server; return the requests by what they are about."""
    answer = server.ask(0, m.GetWaiting(), peer=ONLOOKER).answer
    assert isinstance(answer, m.Waiting)
    assert answer.epoch == server.epoch
    assert answer.members == ()
    return {call.what: call for call in answer.calls}


# --- a server ---


def test_push_waits_for_the_ranks_that_have_not_pushed_since_it_came(server: Server) -> None:
    server.init()
    server.now = 10.0
    server.push(1, timeout=30.0)
    server.now = 14.5
    assert look(server) == {
        "key 'w', round 1": m.WaitingCall(
            "rank 1 (worker-1)",
            "key 'w', round 1",
            "no contribution from rank 0 (worker-0), 2 (worker-2)",
            4.5,
            (0, 2),
            "w",
            1,
        )
    }


def test_nothing_waits_when_all_is_answered(server: Server) -> None:
    server.init()
    for rank in range(3):
        server.push(rank)
    assert look(server) == {}


def test_init_waits_for_the_rank_that_brings_the_value(server: Server) -> None:
    server.init(rank=2)
    call = look(server)["key 'w'"]
    assert (call.who, call.reason, call.ranks, call.key) == (
        "rank 2 (worker-2)",
        "not initialized by rank 0 (worker-0)",
        (0,),
        "w",
    )


def test_pull_waits_for_somebody_to_initialize_its_key(server: Server) -> None:
    server.pull(1, key="late")
    assert look(server)["pull of key 'late'"].reason == "nobody has initialized it"


def test_change_of_policy_waits_for_the_ranks_that_have_not_asked(server: Server) -> None:
    server.init()
    server.ask(0, m.SetPolicy("asp", ("w",), "bsp", (), 5.0, 0))
    call = look(server)["set_policy 'asp' of key 'w'"]
    assert call.reason == "rank 1 (worker-1), 2 (worker-2) did not call it"


def test_worker_that_knows_a_newer_view_waits_for_it_here(make_server: type[Server]) -> None:
    server = make_server()
    server.attach(0, peer=50, epoch=7)
    call = look(server)["worker-0 at server-0"]
    assert (call.who, call.reason) == ("", "the view of epoch 7 is not here yet")


# --- the scheduler ---


def test_scheduler_says_who_is_at_a_barrier_and_who_is_missing(scheduler: Scheduler) -> None:
    scheduler.now = 1.0
    scheduler.barrier("worker-1", "epoch", timeout=60.0)
    scheduler.now = 1.5
    answer = scheduler.ask("onlooker", m.GetWaiting()).answer
    assert isinstance(answer, m.Waiting)
    reason = "rank 0 (worker-0) did not arrive"
    assert answer.calls == (m.WaitingCall("rank 1 (worker-1)", "barrier 'epoch'", reason, 0.5, (0,)),)
    members = {member.name: member for member in answer.members}
    assert members["worker-1"] == m.MemberState(Role.WORKER, 1, "worker-1", "alive", "", "127.0.0.1", 9000, 0.5)
    assert set(members) == {"worker-0", "worker-1", "server-0"}


def test_scheduler_says_who_is_missing_before_the_cluster_is_complete(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=2, servers=1)
    scheduler.register("worker-5")
    scheduler.now = 3.0
    answer = scheduler.ask("onlooker", m.GetWaiting()).answer
    assert isinstance(answer, m.Waiting)
    assert answer.epoch == 0
    assert answer.calls == (m.WaitingCall("worker-5", "join", "missing 1 of 2 workers and 1 of 1 servers", 3.0),)


# --- who asks ---


def member(number: int, *, state: str = "alive") -> m.MemberState:
    """Return a server as the scheduler knows it."""
    return m.MemberState(Role.SERVER, number, f"server-{number}", state, "", "127.0.0.1", 9000 + number, 0.1)


@pytest.fixture
def inquiry() -> Inquiry:
    """One that has begun, with 2 s for all answers."""
    inquiry = Inquiry(("127.0.0.1", 9091))
    assert inquiry.deadline() is None
    assert inquiry.handle(st.Join(5, 2.0), now=0.0) == [ef.Connect(SCHEDULER, "127.0.0.1", 9091)]
    assert inquiry.deadline() == 2.0
    return inquiry


def said(inquiry: Inquiry, peer: int, answer: m.Message) -> list[ef.Effect]:
    """Let a peer answer."""
    assert inquiry.handle(st.Connected(peer), now=0.5) == [ef.Send(peer, 1, m.GetWaiting())]
    return inquiry.handle(st.Received(peer, 1, answer), now=0.6)


def test_scheduler_is_asked_first_and_then_every_server_that_is_alive(inquiry: Inquiry) -> None:
    worker = m.MemberState(Role.WORKER, 0, "worker-0", "alive", "", "", 0, 0.1)
    first = m.Waiting(3, (), (member(0), member(1), member(2, state="lost"), worker))
    assert said(inquiry, SCHEDULER, first) == [ef.Connect(0, "127.0.0.1", 9000), ef.Connect(1, "127.0.0.1", 9001)]
    assert said(inquiry, 1, m.Waiting(3, ())) == []
    done = said(inquiry, 0, m.Waiting(3, ()))
    assert done == [ef.Complete(5, {"scheduler": first, "server-1": m.Waiting(3, ()), "server-0": m.Waiting(3, ())})]
    assert inquiry.deadline() is None
    assert inquiry.handle(st.PeerLost(0, "closed"), now=0.7) == []


def test_cluster_without_servers_is_known_by_its_scheduler_alone(inquiry: Inquiry) -> None:
    answer = m.Waiting(0, ())
    assert said(inquiry, SCHEDULER, answer) == [ef.Complete(5, {"scheduler": answer})]


def test_server_that_can_not_be_asked_is_in_the_result_with_the_reason(inquiry: Inquiry) -> None:
    first = m.Waiting(3, (), (member(0), member(1), member(2), member(3)))
    said(inquiry, SCHEDULER, first)
    inquiry.handle(st.ConnectFailed(0, "connection refused"), now=1.0)
    said(inquiry, 1, m.Error(OverloadedError.code, "not yet", {}))
    (gone,) = said(inquiry, 2, m.Done())
    assert gone == ef.Disconnect(2, "unexpected Done")
    assert inquiry.handle(st.PeerLost(2, "closed"), now=1.2) == []
    assert inquiry.handle(st.Received(2, 1, m.Done()), now=1.2) == []
    assert inquiry.handle(st.Tick(), now=1.9) == []
    (done,) = inquiry.handle(st.Tick(), now=2.0)
    assert isinstance(done, ef.Complete)
    assert done.result == {
        "scheduler": first,
        "server-0": "connection refused",
        "server-1": "not yet",
        "server-2": "unexpected Done",
        "server-3": "no answer within 2 s",
    }


def test_scheduler_that_does_not_answer_is_tried_until_the_time_is_over(inquiry: Inquiry) -> None:
    (again,) = inquiry.handle(st.ConnectFailed(SCHEDULER, "connection refused"), now=0.1)
    assert again == ef.Connect(SCHEDULER, "127.0.0.1", 9091, 0.05)
    (again,) = inquiry.handle(st.PeerLost(SCHEDULER, "reset"), now=0.2)
    assert again == ef.Connect(SCHEDULER, "127.0.0.1", 9091, 0.1)
    (failed,) = inquiry.handle(st.Tick(), now=2.0)
    assert isinstance(failed, ef.Fail)
    assert isinstance(failed.error, SchedulerLostError)
    assert str(failed.error) == "no answer from the scheduler at 127.0.0.1:9091 within 2 s: reset"


def test_wrong_token_ends_it_at_once(inquiry: Inquiry) -> None:
    error = HandshakeError("wrong token")
    assert inquiry.handle(st.ConnectFailed(SCHEDULER, "wrong token", error), now=0.1) == [ef.Fail(5, error)]


def test_other_stimuli_are_a_mistake(inquiry: Inquiry) -> None:
    with pytest.raises(TypeError, match="not a stimulus"):
        inquiry.handle(st.Cancel(5), now=0.1)
