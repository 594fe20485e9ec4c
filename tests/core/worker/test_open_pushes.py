"""A worker that runs ahead: only so many pushes of a key are under way; the others wait for their turn, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import CallTimeoutError, ClosedError, RoundTimeoutError, ServerLostError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Call, Worker


@pytest.fixture
def ahead(make_worker: type[Worker]) -> Worker:
    """Return a worker of whose pushes of a key two may be under way."""
    return make_worker(max_open_pushes=2)


def sent(effects: list[ef.Effect]) -> list[m.Message]:
    return [effect.message for effect in effects if isinstance(effect, ef.Send)]


def push(worker: Worker, times: int, *keys: str) -> list[Call]:
    return [worker.transfer("push", *keys) for _ in range(times)]


def test_push_waits_until_an_earlier_one_is_answered(ahead: Worker) -> None:
    first, _, third = push(ahead, 3)
    assert not third.sends
    (message,) = sent(ahead.answer(first.sends[0]))
    assert isinstance(message, m.Push)
    assert message.sequence == 3


def test_pushpull_waits_too_and_other_keys_do_not(ahead: Worker) -> None:
    push(ahead, 2)
    assert not ahead.transfer("pushpull").sends
    assert ahead.transfer("push", "v").sends


def test_calls_of_a_key_keep_their_order(ahead: Worker) -> None:
    first, second, _ = push(ahead, 3)
    assert not ahead.transfer("pull").sends, "it must see the push before it"
    ahead.transfer("push")
    third, pull = sent(ahead.answer(first.sends[0]))
    assert isinstance(third, m.Push)
    assert isinstance(pull, m.Pull)
    assert pull.at_least == third.sequence == 3
    (fourth,) = sent(ahead.answer(second.sends[0]))
    assert isinstance(fourth, m.Push)
    assert fourth.sequence == 4


def test_call_with_several_keys_waits_for_all_of_them(ahead: Worker) -> None:
    of_a, of_b = push(ahead, 2, "a"), push(ahead, 2, "b")
    assert not ahead.transfer("push", "a", "b").sends
    assert not ahead.transfer("pull", "b").sends, "it stands behind the call with both keys"
    assert not sent(ahead.answer(of_a[0].sends[0]))
    assert [type(message) for message in sent(ahead.answer(of_b[0].sends[0]))] == [m.Push, m.Push, m.Pull]


def test_push_of_many_chunks_counts_until_the_last_one_is_answered(make_worker: type[Worker]) -> None:
    worker = make_worker(max_open_pushes=1, chunk_bytes=16, split_bytes=32)
    first = worker.transfer("push", shape=(16,))
    second = worker.transfer("push", shape=(16,))
    for send in first.sends[:-1]:
        assert not sent(worker.answer(send))
    assert len(sent(worker.answer(first.sends[-1]))) == 4
    assert not second.sends


def test_refused_push_makes_room(ahead: Worker) -> None:
    first, _, _ = push(ahead, 3)
    late = RoundTimeoutError("key 'w', round 1", ranks=[1], key="w", round=1)
    assert len(sent(ahead.refuse(first.sends[0], late))) == 1


def test_call_that_is_not_sent_in_time_says_what_it_waited_for(ahead: Worker) -> None:
    first, second, third = push(ahead, 3)
    pull = ahead.transfer("pull")
    ahead.tick(10.0)
    for call in (third, pull):
        assert isinstance(call.outcome, CallTimeoutError)
        assert "2 pushes of key 'w' are not answered yet" in str(call.outcome)
        assert not call.sends
    for call in (first, second):
        assert "no answer from server" in str(call.outcome)


def test_cancelled_call_is_not_sent(ahead: Worker) -> None:
    first, _, third = push(ahead, 3)
    fourth = ahead.transfer("push")
    ahead.handle(st.Cancel(third.number))
    assert third.released == ef.Release(third.number, [])
    (message,) = sent(ahead.answer(first.sends[0]))
    assert isinstance(message, m.Push)
    assert message.sequence == 3, "numbers are given when a push is sent"
    assert fourth.outcome is None


def test_call_behind_a_cancelled_one_is_sent_when_it_may(ahead: Worker) -> None:
    push(ahead, 2, "a")
    both = ahead.transfer("push", "a", "b")
    assert not ahead.transfer("push", "b").sends
    assert len(sent(ahead.handle(st.Cancel(both.number)))) == 1


@pytest.mark.parametrize("peer", [0, 1])
def test_lost_server_ends_what_was_not_sent(ahead: Worker, peer: int) -> None:
    calls = [*push(ahead, 3), ahead.transfer("pull")]
    assert not sent(ahead.lose_server(peer, "connection reset"))
    assert all(isinstance(call.outcome, ServerLostError) for call in calls[2:])


def test_leaving_ends_what_was_not_sent(ahead: Worker) -> None:
    calls = [*push(ahead, 3), ahead.transfer("pull")]
    (message,) = ahead.call(st.Depart, timeout=1.0).sends
    assert message.message == m.Leave()
    assert all(isinstance(call.outcome, ClosedError) for call in calls)


def test_keys_of_a_bundle_are_counted_together_and_then_alone(make_worker: type[Worker]) -> None:
    worker = make_worker(max_open_pushes=2)
    keys = ("a", "b", "c", "d", "e", "f")
    worker.finish(worker.transfer("init", *keys))
    calls = push(worker, 2, *keys)
    assert not worker.transfer("push", *keys).sends
    assert not worker.transfer("pull", "b").sends, "it stands behind the push of all"
    first = [sent(worker.answer(send)) for send in calls[0].sends]
    assert sum(map(len, first)) == len(calls[0].sends) + 1, "the push, and the pull behind it"


def test_key_of_a_bundle_that_is_used_alone_counts_what_is_under_way(make_worker: type[Worker]) -> None:
    worker = make_worker(max_open_pushes=1, servers=1)
    keys = ("a", "b", "c", "d", "e", "f")
    worker.finish(worker.transfer("init", *keys))
    (bundled,) = push(worker, 1, *keys)
    assert not worker.transfer("push", "b").sends
    assert len(sent(worker.answer(bundled.sends[0]))) == 1
    assert worker.transfer("push", "c").sends
