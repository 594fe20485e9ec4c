"""Pushes that come again, because their worker did not hear the answer: they count once, and are answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as hs

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import ProtocolError, SumOverflowError, WorkerLostError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Asked, Server

AGAIN = 50
"""The connection over which rank 0 comes again."""


def connect_again(server: Server, rank: int = 0, peer: int = AGAIN) -> None:
    """Let a worker attach over another connection; the server has not noticed that the first one is over."""
    assert server.attach(rank, peer=peer).answer == m.Done()


def push_again(server: Server, value: float = 1000.0, *, rank: int = 0, peer: int = AGAIN, **changes: Any) -> Asked:
    """Let a worker send its last push again, over its new connection; another value would show if it counted."""
    number = changes.pop("sequence", server.pushed.get((rank, "w")))
    fields: dict[str, Any] = {"shape": (1,), "dtype": "float32", "start": 0, "stop": 1, "sequence": number}
    fields |= {"read_version": 0, "want_value": False, "timeout": 5.0, "clock": number} | changes
    return server.ask(rank, m.Push(key="w", **fields), value, peer=peer)


def drop_update(server: Server) -> None:
    """Let the store find that it can't carry an update out."""
    slot = server.applying.pop().slot
    assert slot is not None
    del server.slots[slot]


def duplicates(server: Server) -> int:
    """Return how many pushes have come again."""
    return sum(tally.duplicates for tally in server.machine.tallies.answer().ranks.values())


# --- rounds of all workers ---


def test_push_that_comes_again_before_its_round_is_made_counts_once(server: Server) -> None:
    server.init()
    first = server.push(0, 1.0)
    connect_again(server)
    again = push_again(server, want_value=True)
    assert first.pending, "nobody hears it any longer"
    assert again.pending
    for rank in (1, 2):
        server.push(rank, 1.0)
    assert again.answer == m.Value(1)
    assert again.payload == server.value() == 3.0
    assert duplicates(server) == 1


def test_push_that_comes_again_while_its_round_is_being_made_is_answered_with_it(server: Server) -> None:
    server.init()
    server.hold = True
    for rank in range(3):
        server.push(rank, 1.0)
    connect_again(server)
    again = push_again(server, want_value=True)
    assert again.pending
    server.finish()
    assert again.payload == 3.0


def test_push_that_comes_again_after_its_round_is_answered_at_once(server: Server) -> None:
    server.init()
    for rank in range(3):
        server.push(rank, 1.0)
    connect_again(server)
    assert push_again(server, want_value=True).payload == 3.0
    assert push_again(server).answer == m.Done(1)
    assert server.value() == 3.0


def test_what_follows_a_push_that_comes_again_has_the_next_number(server: Server) -> None:
    server.init()
    server.push(0, 1.0)
    connect_again(server)
    push_again(server)
    push_again(server, 10.0, sequence=2)
    for rank in (1, 2):
        server.push(rank)
        server.push(rank)
    assert server.value() == 3.0 + 12.0


def test_push_that_comes_again_fails_as_the_first_one_did(make_server: type[Server]) -> None:
    server = make_server(1)
    server.init()
    server.hold = True
    server.push(0)
    drop_update(server)
    server.handle(st.Applied("w", 0, 1, SumOverflowError("too large")))
    connect_again(server)
    assert isinstance(push_again(server).answer, SumOverflowError)


def test_only_the_last_errors_are_remembered(make_server: type[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiokv.core.server.rounds.chunk.REMEMBERED_ERRORS", 1)
    server = make_server(1)
    server.init()
    server.hold = True
    for version in (1, 2):
        server.push(0)
        drop_update(server)
        server.handle(st.Applied("w", 0, version, SumOverflowError("too large")))
    connect_again(server)
    assert push_again(server, sequence=1).answer == m.Done(2)
    assert isinstance(push_again(server, sequence=2).answer, SumOverflowError)


def test_push_that_comes_again_hears_of_a_lost_worker(server: Server) -> None:
    server.init()
    server.push(0)
    server.lose(2)
    connect_again(server)
    assert isinstance(push_again(server).answer, WorkerLostError)


def test_push_that_comes_again_is_not_another_one_after_a_time_out(server: Server) -> None:
    server.init()
    server.push(0, 1.0, timeout=1.0)
    server.tick(1.0)
    again = push_again(server, peer=10)
    for rank in (1, 2):
        server.push(rank, 1.0)
    assert again.answer == m.Done(1)
    assert server.value() == 3.0


# --- the connection before ---


def test_worker_that_connects_again_is_heard_over_the_new_connection_only(server: Server) -> None:
    server.init()
    waiting = server.pull(0, at_least=1)
    connect_again(server)
    assert ef.Disconnect(10, "its worker has connected again") in server.effects
    assert server.handle(st.PeerLost(10, "closed")) == []
    server.push(1)
    server.push(2)
    push_again(server, 1.0, sequence=1, rank=0)
    assert server.value() == 3.0
    assert waiting.pending


def test_server_whose_last_worker_connects_again_goes_on_without_the_scheduler(make_server: type[Server]) -> None:
    server = make_server(1)
    server.handle(st.PeerLost(-1, "closed"))
    connect_again(server)
    assert not server.seen(ef.Stop)


# --- several keys together ---


def bundle(server: Server) -> None:
    """Make a bundle of two keys."""
    server.bundle_size = 2
    for rank in range(3):
        digests = (b"" if rank else b"0",) * 2
        message = m.InitBundle(("a", "w"), ((1,), (1,)), "float32", "bsp", 5.0, (), digests)
        server.ask(rank, message, None if rank else 0.0)


def push_bundle(server: Server, rank: int, value: float, sequence: int = 1, peer: int | None = None) -> Asked:
    """Let a worker push both keys."""
    return server.ask(rank, m.PushBundle(0, sequence, 0, True, 5.0, 0, sequence), value, peer=peer)


def test_bundle_that_comes_again_counts_once(server: Server) -> None:
    bundle(server)
    push_bundle(server, 0, 1.0)
    connect_again(server)
    again = push_bundle(server, 0, 1000.0, peer=AGAIN)
    for rank in (1, 2):
        push_bundle(server, rank, 1.0)
    assert again.payload == 3.0


def test_keys_of_a_bundle_of_which_one_was_pushed_alone_count_once_each(server: Server) -> None:
    bundle(server)
    server.push(0, 1.0)
    connect_again(server)
    again = push_bundle(server, 0, 5.0, peer=AGAIN)
    for rank in (1, 2):
        push_bundle(server, rank, 1.0)
    assert again.payload == [7.0, 3.0]


def test_keys_of_a_bundle_that_wait_for_a_lost_worker_are_refused_once(server: Server) -> None:
    bundle(server)
    server.push(0, 1.0)
    server.push(0, 1.0, key="a")
    server.lose(2)
    connect_again(server)
    assert isinstance(push_bundle(server, 0, 5.0, peer=AGAIN).answer, WorkerLostError)


# --- rows ---


def rows_again(server: Server, rows: dict[int, float], **changes: Any) -> Asked:
    """Let rank 0 push rows a second time, over the same connection."""
    return server.push_rows(0, rows, sequence=1, clock=1, **changes)


def test_rows_that_come_again_count_once(server: Server) -> None:
    server.init_rows()
    server.push_rows(0, {1: 1.0})
    again = rows_again(server, {1: 1000.0})
    for rank in (1, 2):
        server.push_rows(rank, {1: 1.0})
    assert again.answer == m.Done(1)
    assert server.pull_rows(1, 1).payload == [3]


def test_of_rows_in_several_messages_any_may_come_again(server: Server) -> None:
    server.init_rows()
    server.push_rows(0, {1: 1.0}, total=2)
    server.push_rows(0, {2: 1.0}, first=1, total=2)
    assert rows_again(server, {1: 1000.0}, total=2).answer == m.Done()
    last = rows_again(server, {2: 1000.0}, first=1, total=2)
    assert last.pending
    for rank in (1, 2):
        server.push_rows(rank, {})
    assert last.answer == m.Done(1)
    assert server.pull_rows(1, 1, 2).payload == [1, 1]


def test_all_of_a_contribution_comes_again_whose_connection_ended_before_the_last_message(server: Server) -> None:
    server.init_rows()
    server.push_rows(0, {1: 1.0}, total=2)
    server.lose_peer(0)
    server.attach(0)
    server.push_rows(0, {1: 1.0}, total=2)
    server.push_rows(0, {2: 1.0}, first=1, total=2)
    for rank in (1, 2):
        server.push_rows(rank, {})
    assert server.pull_rows(1, 1, 2).payload == [1, 1]


def test_initial_rows_that_come_again_are_no_error(server: Server) -> None:
    server.init_rows({1: 1.0}, total=2, digest=b"d")
    server.init_rows({2: 1.0}, first=1, total=2, digest=b"d")
    assert server.init_rows({2: 1.0}, first=1, total=2, digest=b"d").answer == m.Done()
    assert server.pull_rows(1, 1, 2).payload == [1, 1]


def test_messages_before_one_that_is_refused_are_answered_too(server: Server) -> None:
    server.init_rows()
    first = server.push_rows(0, {1: 1.0}, total=3)
    assert isinstance(server.push_rows(0, {2: 1.0}, first=2, total=3).answer, ProtocolError)
    assert first.answer == m.Done()
    assert not server.slots


# --- each push an update ---


def test_async_push_that_comes_again_makes_no_second_update(make_server: type[Server]) -> None:
    server = make_server(2, "asp")
    server.init()
    server.push(0, 1.0)
    server.push(1, 1.0)
    connect_again(server)
    assert push_again(server, want_value=True).payload == 2.0
    assert server.value() == 2.0


# --- rounds that are decided for all keys ---


def decided(make_server: type[Server], policy: str = "k_sync:2") -> Server:
    """Return a server with a key under such a policy, and three workers."""
    server = make_server(3, policy)
    server.init()
    return server


def test_step_that_comes_again_before_it_is_decided(make_server: type[Server]) -> None:
    server = decided(make_server)
    server.push(0, 1.0)
    connect_again(server)
    again = push_again(server)
    server.push(1, 1.0)
    assert again.answer == m.Done(1)
    assert server.value() == 2.0


def test_step_that_comes_again_when_its_round_is_made(make_server: type[Server]) -> None:
    server = decided(make_server)
    server.push(0, 1.0)
    server.push(1, 1.0)
    connect_again(server)
    assert push_again(server, want_value=True).payload == 2.0


@pytest.mark.parametrize("rounds", [2, 3])
def test_step_that_comes_again_while_rounds_before_it_wait(make_server: type[Server], rounds: int) -> None:
    server = decided(make_server, "k_async:2")
    server.hold = True
    for _ in range(rounds):
        server.push(0, 1.0)
        server.push(1, 1.0)
    connect_again(server)
    again = push_again(server)
    for _ in range(rounds - 1):
        server.finish()
        assert again.pending
    server.finish()
    assert again.answer == m.Done(rounds)
    assert server.value() == 2.0 * rounds


def test_dropped_step_that_comes_again_is_answered_as_dropped(make_server: type[Server]) -> None:
    server = decided(make_server)
    for rank in (1, 2, 0):
        server.push(rank, 1.0)
    connect_again(server)
    assert push_again(server).answer == m.Done(1, "late")
    assert push_again(server, want_value=True).answer == m.Value(1, dropped="late", round=1)
    assert server.value() == 2.0


@pytest.mark.parametrize("want", [True, False])
def test_dropped_step_that_comes_again_before_its_worker_may_go_on(make_server: type[Server], want: bool) -> None:
    server = decided(make_server)
    server.hold = True
    for rank in (1, 2, 0):
        server.push(rank, 1.0, want_value=True)
    connect_again(server)
    again = push_again(server, want_value=want)
    assert again.pending == want
    server.finish()
    assert again.answer == (m.Value(1, dropped="late", round=1) if want else m.Done(0, "late"))


def test_accepted_step_that_comes_again_is_answered_at_once_where_none_waits(make_server: type[Server]) -> None:
    server = decided(make_server, "k_batch_async:2")
    assert server.push(0, 1.0).answer == m.Done(0)
    connect_again(server)
    assert push_again(server).answer == m.Done(0)
    server.push(1, 1.0)
    assert server.value() == 2.0


def test_step_that_comes_again_hears_that_its_round_can_not_be_closed(make_server: type[Server]) -> None:
    server = decided(make_server)
    server.push(0)
    for rank in (1, 2):
        server.lose(rank)
    connect_again(server)
    assert isinstance(push_again(server).answer, WorkerLostError)


def test_step_that_is_sent_twice_at_the_same_time_is_a_mistake(make_server: type[Server]) -> None:
    server = decided(make_server)
    first = server.push(0, 1.0)
    assert isinstance(push_again(server, peer=10).answer, ProtocolError)
    server.push(1, 1.0)
    assert first.answer == m.Done(1)


# --- whatever comes again ---


@pytest.mark.no_cover
@pytest.mark.parametrize("policy", ["bsp", "asp", "ssp:1", "k_sync:2", "k_async:2", "ringmaster:2", "sum"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=hs.data())
def test_what_is_sent_again_changes_nothing(policy: str, make_server: type[Server], data: hs.DataObject) -> None:
    """Two workers push; every number of pushes may come again, and connections end whenever they like."""
    server, plain = make_server(2, policy), make_server(2, policy)
    for each in (server, plain):
        each.init()
    peers = [10, 11]
    made = [0, 0]
    for step in range(data.draw(hs.integers(1, 12))):
        rank = data.draw(hs.integers(0, 1))
        value, number = float(2**step), made[rank] + 1
        made[rank] = number
        plain.push(rank, value)
        push_again(server, value, rank=rank, peer=peers[rank], sequence=number)
        if data.draw(hs.booleans()):
            peers[rank] += 10
            connect_again(server, rank, peers[rank])
            for sequence in range(data.draw(hs.integers(1, number)), number + 1):
                push_again(server, 1e6, rank=rank, peer=peers[rank], sequence=sequence)
    assert server.value() == plain.value()
    assert server.machine.tallies.answer().ranks.keys() >= plain.machine.tallies.answer().ranks.keys()
