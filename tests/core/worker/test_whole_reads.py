"""Values that are to be of one round: what a server lets wait for a round, and what a worker asks again."""

from __future__ import annotations

from typing import Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.worker.whole_reads import MOST_TRIES, PATIENCE
from aiokv.errors import (
    ClosedError,
    KeyDeletedError,
    ProtocolError,
    RoundTimeoutError,
    UnknownKeyError,
    WorkerLostError,
)
from aiokv.types import peer_of_server
from aiokv.wire import messages as m
from tests.core.conftest import Asked, Call, Server, Worker

LEADER = peer_of_server(0)
THERE = 50
"""The connection that server 1 has opened to server 0."""


def first(policy: str = "k_sync:2", keys: str = "w", workers: int = 3) -> Server:
    server = Server(workers, policy)
    for key in keys:
        server.init(key)
    return server


def second(policy: str = "k_sync:2", keys: str = "w") -> Server:
    """Return server 1, which has asked server 0 about step 1 of rank 0 of the first key."""
    server = Server(3, policy, index=1, servers=2)
    for key in keys:
        server.init(key)
    server.push(0, key=keys[0])
    server.handle(st.Connected(LEADER))
    server.handle(st.Received(LEADER, 1, m.Done()))
    return server


def asked(server: Server, kind: type[m.Message]) -> list[ef.Send]:
    return [send for send in server.seen(ef.Send) if send.peer == LEADER and isinstance(send.message, kind)]


def await_round(server: Server, rank: int, newer_than: int = 0, key: str = "w") -> Asked:
    return server.ask(rank, m.AwaitRound(key, newer_than, 5.0))


# --- a server ---


def test_pull_waits_for_its_round() -> None:
    server = first()
    pull = server.pull(2, at_least_round=1)
    server.push(0)
    assert pull.pending
    server.hold = True
    server.push(1)
    assert server.pull(2).answer == m.Value(0), "the round is closed, and not made"
    assert pull.pending
    server.finish()
    assert (pull.answer, pull.payload) == (m.Value(1, round=1), 2.0)


def test_pull_of_a_round_that_does_not_come_gets_what_is_there_at_its_time() -> None:
    server = first()
    pull = server.pull(2, at_least_round=3)
    server.tick(5.0)
    assert (pull.answer, pull.payload) == (m.Value(0), 0.0)


def test_pull_waits_for_the_own_push_before_it_waits_for_a_round() -> None:
    server = first()
    server.push(2)
    pull = server.pull(2, at_least_round=2)
    server.push(0)
    assert pull.pending, "it has its push by now"
    server.push(0, read_version=1)
    server.push(1, read_version=1)
    assert pull.answer == m.Value(2, round=2)


def test_rounds_of_a_policy_that_has_none_are_not_waited_for() -> None:
    server = first("asp")
    assert server.pull(0, at_least_round=3).answer == m.Value(0)


def test_key_that_is_left_out_of_steps_is_read_without_waiting() -> None:
    server = first(keys="ab")
    for clock in (1, 2):
        for rank in (0, 1):
            server.push(rank, key="a", clock=clock, read_version=clock - 1)
    assert server.pull(2, key="b", at_least_round=2).answer == m.Value(0, round=2)
    server.push(0, key="b", clock=3)
    server.push(1, key="b", clock=3)
    server.push(0, key="a", clock=4, read_version=2)
    server.push(1, key="a", clock=4, read_version=2)
    late = server.pull(2, key="b", at_least_round=4)
    assert late.pending, "who has pushed it in the step before is thought to do so again"
    server.push(0, key="b", clock=4, read_version=1)
    server.push(1, key="b", clock=4, read_version=1)
    assert late.answer == m.Value(2, round=4)


def test_who_has_not_pushed_a_key_before_it_asks_does_not_wait_for_itself() -> None:
    server = first(keys="ab", workers=2)
    server.push(0, key="a")
    server.push(1, key="a")
    server.push(1, key="b")
    assert server.pull(0, key="b", at_least_round=1).pending, "of the other there is something in it"
    server = first("k_batch_async:1", keys="ab")
    server.push(0, key="a")
    assert server.pull(0, key="b", at_least_round=1).answer == m.Value(0, round=1)
    assert server.pull(1, key="b", at_least_round=1).pending, "it is the first step of that rank"


def test_second_server_asks_the_first_which_rounds_are_closed() -> None:
    server = second(keys="ab")
    pull = server.pull(1, key="b", at_least_round=1)
    (question,) = asked(server, m.GetRounds)
    assert question.message == m.GetRounds("k_sync:2", (), 0)
    server.handle(st.Received(LEADER, question.request, m.Verdict(0, "", ((1, ((0, 1), (2, 1))),))))
    assert pull.pending, "it is the first step of these ranks, so more is to come"
    server.push(0, key="b", clock=1)
    server.push(2, key="b", clock=1)
    assert pull.answer == m.Value(1, round=1)


def test_nobody_hears_of_a_question_about_rounds_that_has_failed() -> None:
    server = second()
    pull = server.pull(1, at_least_round=1)
    (question,) = asked(server, m.GetRounds)
    server.handle(st.Received(LEADER, question.request, m.Accepted()))
    server.handle(st.PeerLost(LEADER, "reset"))
    assert pull.pending
    server.servers[0] = ("lost", "killed")
    server.publish()
    other = server.pull(2, at_least_round=1)
    assert len(asked(server, m.GetRounds)) == 1
    server.tick(5.0)
    assert pull.answer == other.answer == m.Value(0)


def test_first_server_says_which_rounds_are_closed() -> None:
    server = Server(3, "k_sync:2", servers=2)
    server.init()
    server.servers_at.add(THERE)
    server.handle(st.Received(THERE, 1, m.AttachServer(1, "server-1", 1, server.epoch, 5.0)))
    server.push(0)
    server.push(1)
    server.handle(st.Received(THERE, 2, m.GetRounds("k_sync:2", (), 0)))
    (answer,) = [send.message for send in server.seen(ef.Send) if (send.peer, send.request) == (THERE, 2)]
    assert answer == m.Verdict(0, "", ((1, ((0, 1), (1, 1))),))


def test_read_that_waits_for_a_lost_worker_gets_what_is_there() -> None:
    server = first(keys="ab")
    for key in "ab":
        server.push(0, key=key)
    server.push(1, key="a")
    pull, waiting = server.pull(2, key="b", at_least_round=1), await_round(server, 2, key="b")
    server.lose(1)
    assert pull.answer == m.Value(0)
    assert isinstance(waiting.error, WorkerLostError)


def test_compressed_value_says_its_round() -> None:
    server = first()
    for rank in range(3):
        server.ask(rank, m.SetCompression(1, "fp16", {}, "fp16", {}, 5.0))
    server.push(0)
    server.push(1)
    (codec,) = {effect.codec.number for effect in server.seen(ef.Prepare)}
    assert [server.pull(2, value_codec=codec).answer for _ in range(2)] == [
        m.Value(1, round=1),
        m.Value(1, codec, round=1),
    ]


# --- a server that is asked for a round ---


@pytest.mark.parametrize(("policy", "number"), [("k_sync:2", 1), ("bsp", 1), ("asp", 1)])
def test_worker_is_told_when_there_is_something_newer(policy: str, number: int) -> None:
    server = first(policy, workers=2)
    waiting = await_round(server, 1)
    assert waiting.pending
    server.push(0)
    server.push(1)
    assert isinstance(waiting.answer, m.Reached)
    assert waiting.answer.round == number
    assert isinstance(await_round(server, 0).answer, m.Reached)


def test_wait_for_a_key_of_a_bundle_is_one_for_that_key_when_it_is_divided() -> None:
    server = Server(2)
    keys, shapes = ("a", "b"), ((1,), (1,))
    server.bundle_size = 2
    server.ask(0, m.InitBundle(keys, shapes, "float32", "bsp", 5.0, (), (b"", b"")), 0.0)
    waiting = await_round(server, 1, key="b")
    for rank in range(2):
        server.push(rank, key="a")
    assert waiting.pending
    for rank in range(2):
        server.push(rank, key="b")
    assert waiting.answer == m.Reached(1)


def test_wait_for_a_round_that_does_not_come_says_so() -> None:
    server = first()
    waiting = await_round(server, 1, newer_than=4)
    server.tick(5.0)
    assert isinstance(waiting.error, RoundTimeoutError)
    assert "round 5: nobody has closed it within 5 s" in str(waiting.error)


def test_wait_for_a_round_of_a_lost_worker_ends() -> None:
    server = first("bsp", workers=2)
    server.push(1)
    waiting = await_round(server, 1)
    server.lose(0)
    assert isinstance(waiting.error, WorkerLostError)


def test_wait_for_a_round_ends_with_its_key() -> None:
    server = first()
    waiting = await_round(server, 1)
    server.ask(0, m.Delete(("w",), 5.0))
    assert isinstance(waiting.error, KeyDeletedError)
    assert isinstance(await_round(server, 1).error, UnknownKeyError)


def test_wait_for_a_round_that_cannot_be() -> None:
    server = first()
    assert isinstance(await_round(server, 1, newer_than=-1).error, ProtocolError)
    server.init("half", shape=(2,), start=1, stop=2)
    assert "its first chunk is on another server" in str(await_round(server, 1, key="half").error)


def test_who_waits_for_a_round_is_let_go_when_the_policy_changes() -> None:
    server = first(workers=2)
    pull, waiting = server.pull(0, at_least_round=1), await_round(server, 1)
    for rank in range(2):
        server.ask(rank, m.SetPolicy("asp", ("w",), "k_sync:2", (), 5.0, 0))
    assert (pull.answer, waiting.answer) == (m.Value(0), m.Reached(0))


# --- a worker ---


def worker(policy: str = "k_sync:2") -> Worker:
    """Return a worker with a key that is cut over two servers."""
    made = Worker(policy=policy, chunk_bytes=12, split_bytes=12)
    made.finish(made.transfer("init"))
    return made


def again(worker: Worker, call: Call, *rounds: int) -> list[ef.Send]:
    """Answer all that was sent for a call with values of these rounds; return what is sent then."""
    sent: list[ef.Effect] = []
    for send, number in zip(call.sends, rounds, strict=True):
        sent = worker.answer(send, m.Value(number, round=number))
    call.sends = [effect for effect in sent if isinstance(effect, ef.Send)]
    return call.sends


def torn(worker: Worker) -> int:
    return worker.machine.torn_reads


def test_values_of_one_round_are_taken_as_they_are() -> None:
    session = worker()
    call = session.transfer("pull")
    assert again(session, call, 3, 3) == []
    assert call.outcome == "done"
    assert torn(session) == 0


def test_older_part_is_asked_for_again_into_the_same_memory() -> None:
    session = worker()
    call = session.transfer("pushpull")
    old = call.sends[1]
    memory = session.machine.landing(old.request, 12)
    (asks,) = again(session, call, 4, 3)
    head = ("w", (2, 3), "float32", 3, 6)
    assert (asks.peer, asks.message) == (old.peer, m.Pull(*head, 1, PATIENCE, 0, 0, 4))
    assert session.machine.landing(asks.request, 12) == memory
    assert call.outcome is None
    (asks,) = again(session, call, 5)
    assert asks.message == m.Pull("w", (2, 3), "float32", 0, 3, 1, PATIENCE, 0, 0, 5), "the other one is older now"
    assert again(session, call, 5) == []
    assert call.outcome == "done"
    pushed = session.transfer("push").messages
    assert [message.read_version for message in pushed] == [5, 5]
    assert torn(session) == 0


def test_values_are_of_several_rounds_when_a_server_gives_up() -> None:
    session = worker()
    call = session.transfer("pull")
    assert len(again(session, call, 2, 1)) == 1
    assert again(session, call, 1) == []
    assert call.outcome == "done"
    assert torn(session) == 1


def test_values_are_of_several_rounds_when_these_go_on_for_too_long() -> None:
    session = worker()
    call = session.transfer("pull")
    sends = again(session, call, 2, 1)
    for number in range(3, 3 + MOST_TRIES):
        assert len(sends) == 1
        sends = again(session, call, number)
    assert sends == []
    assert call.outcome == "done"
    assert torn(session) == 1


def test_rows_are_asked_for_again() -> None:
    session = Worker(policy="k_sync:2", split_bytes=16)
    session.finish(session.transfer_rows("init", st.Rows([0, 0])))
    ids = b"".join(row.to_bytes(8, "little") for row in (0, 9))
    call = session.transfer_rows("pull", st.Rows([1, 1], ids))
    (asks,) = again(session, call, 1, 2)
    assert asks.message == m.PullRows("t", (10, 2), "float32", 0, 5, ids[:8], 0, PATIENCE, 0, 2)
    assert again(session, call, 2) == []
    assert call.outcome == "done"


def test_compressed_part_is_asked_for_again_as_a_difference_from_its_replica() -> None:
    session = worker()
    compress = session.call(st.ConfigureCompression, name="", params={}, pull_name="fp16", pull_params={}, timeout=10.0)
    session.finish(compress)
    call = session.transfer("pull")
    replica = session.machine.landing(call.sends[0].request, 12)
    assert isinstance(replica, ef.Replica)
    (asks,) = again(session, call, 1, 2)
    assert isinstance(asks.message, m.Pull)
    assert asks.message.value_codec == replica.codec.number
    assert session.machine.landing(asks.request, 12) is replica


def test_keys_of_other_policies_are_compared_with_none() -> None:
    session = worker()
    session.call(
        st.Transfer,
        operation=st.Operation.INIT,
        tensors=[("b", session.machine.spec("w"))],
        timeout=10.0,
        options=st.KeyOptions("asp"),
    )
    session.finish(session.calls[max(session.calls)])
    call = session.transfer("pull", "w", "b")
    assert again(session, call, 3, 3, 0, 0) == []
    assert call.outcome == "done"
    call = session.transfer("pull", "unknown")
    assert again(session, call, 0, 1) == []


def wait(session: Worker, key: Any = "w", newer_than: int | None = None) -> Call:
    return session.call(st.AwaitRound, key=key, newer_than=newer_than, timeout=10.0)


def test_worker_waits_for_a_newer_round_than_it_has_read() -> None:
    session = worker()
    again(session, session.transfer("pull"), 3, 3)
    call = wait(session)
    assert call.messages == [m.AwaitRound("w", 3, 9.5)]
    (done,) = [effect for effect in session.answer(call.sends[0], m.Reached(5), 0) if isinstance(effect, ef.Complete)]
    assert done.result == 5
    assert wait(session, newer_than=7).messages == [m.AwaitRound("w", 7, 9.5)]


def test_worker_waits_for_a_newer_version_where_rounds_are_those_of_a_key() -> None:
    session = worker("bsp")
    again(session, session.transfer("pull"), 2, 2)
    assert wait(session).messages == [m.AwaitRound("w", 2, 9.5)]
    session.finish(session.transfer("init", "a", "b", shape=(1,)))
    assert wait(session, "a").messages == [m.AwaitRound("a", 0, 9.5)]
    session.finish(session.transfer_rows("init", st.Rows([0, 0])))
    assert wait(session, "t").messages == [m.AwaitRound("t", 0, 9.5)]


def test_worker_can_wait_only_for_keys_that_it_knows() -> None:
    assert isinstance(wait(worker(), "x").error, UnknownKeyError)
    assert isinstance(wait(Worker(join=False)).error, ClosedError)
