"""Sync rounds on a server: when they close, what they add up to, and who is told what."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.server.rounds.rounds import MAX_OPEN_PUSHES
from aiokv.errors import ProtocolError, RoundTimeoutError
from aiokv.types import Piece
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Like, Server


# --- when a round closes ---


def test_round_closes_when_every_rank_has_pushed(server: Server) -> None:
    server.init()
    pushes = [server.push(rank) for rank in range(3)]
    assert server.value() == 3.0
    assert [push.answer for push in pushes] == [m.Done(1)] * 3


def test_round_stays_open_while_a_rank_is_missing(server: Server) -> None:
    server.init()
    pushes = [server.push(0), server.push(2)]
    assert [push.answer for push in pushes] == [None, None]
    assert not server.seen(ef.Apply)


def test_ranks_are_counted_and_not_requests(server: Server) -> None:
    server.init()
    for _ in range(3):
        server.push(0)
    assert not server.seen(ef.Apply)


def test_worker_that_pushes_twice_takes_part_in_two_rounds(server: Server) -> None:
    server.init()
    server.push(0, 1.0)
    server.push(0, 10.0)
    for rank in (1, 2):
        server.push(rank, 0.0)
    assert server.value() == 1.0
    for rank in (1, 2):
        server.push(rank, 0.0)
    assert server.value() == 11.0


def test_worker_that_was_never_seen_is_waited_for(make_server: type[Server]) -> None:
    server = make_server(workers=2, attach=False)
    server.handle(st.Join(0, 10.0))
    server.publish()
    server.attach(0)
    server.init()
    push = server.push(0)
    server.tick(5.0)
    assert push.error.details == {"ranks": [1], "key": "w", "round": 1}
    assert "1 (worker-1)" in str(push.error)
    assert server.value() == 0.0


def test_rounds_of_different_keys_are_independent(server: Server) -> None:
    server.init("a")
    server.init("b")
    server.push(0, key="a")
    for rank in range(3):
        server.push(rank, 2.0, key="b")
    assert (server.value("a"), server.value("b")) == (0.0, 6.0)


# --- what it adds up to ---


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_sum_is_made_in_rank_order_whatever_the_order_of_arrival(server: Server, order: tuple[int, ...]) -> None:
    # In float32, (1e8 + 1) - 1e8 is 0, (1e8 - 1e8) + 1 is 1.
    server.init()
    for rank in order:
        server.push(rank, (1e8, 1.0, -1e8)[rank])
    assert server.value() == 0.0


def test_contribution_in_order_is_added_as_it_comes(server: Server, like: type[Like]) -> None:
    server.init()
    server.push(0)
    first = max(server.slots)
    server.push(1)
    assert server.seen(ef.Fold) == [like(ef.Fold, target=first, dtype="float32")]


def test_contribution_that_comes_early_is_held_until_its_turn(server: Server, like: type[Like]) -> None:
    server.init()
    server.push(2)
    last = max(server.slots)
    server.push(1)
    middle = max(server.slots)
    assert not server.seen(ef.Fold)
    server.hold = True
    server.push(0)
    (apply,) = server.seen(ef.Apply)
    assert apply.slot not in (middle, last)
    assert server.seen(ef.Fold) == [
        like(ef.Fold, target=apply.slot, source=middle),
        like(ef.Fold, target=apply.slot, source=last),
    ]


def test_sum_of_integers_stays_a_sum_of_integers(server: Server, like: type[Like]) -> None:
    server.init(dtype="int32")
    for rank in range(3):
        server.push(rank, dtype="int32")
    assert server.seen(ef.Fold) == [like(ef.Fold, dtype="int32")] * 2


def test_update_names_its_contributors_in_the_order_of_the_sum(server: Server, like: type[Like]) -> None:
    server.init()
    for rank in (1, 2, 0):
        server.push(rank)
    assert server.seen(ef.Apply) == [like(ef.Apply, key="w", start=0, version=1, ranks=[0, 1, 2])]


def test_staleness_is_counted_from_the_version_that_was_read(server: Server, like: type[Like]) -> None:
    server.init()
    for rank in range(3):
        server.push(rank)
    for rank in range(3):
        server.push(rank, read_version=min(rank, 1))
    assert server.seen(ef.Apply)[1] == like(ef.Apply, version=2, staleness=[1, 0, 0])


# --- shapes ---


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_element_of_any_shape_takes_part(server: Server, shape: tuple[int, ...]) -> None:
    server.init(shape=shape)
    for rank in range(3):
        server.push(rank, shape=shape)
    assert server.value() == 3.0


def test_tensor_without_elements_takes_part_in_rounds(server: Server, like: type[Like]) -> None:
    assert server.init(shape=(0, 5), stop=0).answer == m.Done()
    pushes = [server.push(rank, shape=(0, 5), stop=0) for rank in (2, 1)]
    assert [push.answer for push in pushes] == [None, None]
    pushes.append(server.push(0, shape=(0, 5), stop=0))
    assert [push.answer for push in pushes] == [m.Done(1)] * 3
    assert server.seen(ef.Install) == [ef.Install("w", 0, "float32", 0, None, [Piece("w", 0, 0, 5)])]
    assert server.seen(ef.Apply) == [like(ef.Apply, slot=None, ranks=[0, 1, 2])]
    assert server.pull(0, shape=(0, 5), stop=0).answer == m.Value(1)


# --- several rounds at a time ---


def test_answers_come_when_the_update_is_done_and_not_before(server: Server) -> None:
    server.init()
    server.hold = True
    pushes = [server.push(rank) for rank in range(3)]
    assert [push.answer for push in pushes] == [None] * 3
    server.finish()
    assert [push.answer for push in pushes] == [m.Done(1)] * 3


def test_pipelined_rounds_are_applied_in_order_and_one_at_a_time(server: Server) -> None:
    server.init()
    server.hold = True
    for _ in range(3):
        for rank in (2, 0, 1):
            server.push(rank)
    versions = []
    while server.applying:
        versions.append([apply.version for apply in server.applying])
        server.finish()
    assert versions == [[1], [2], [3]]
    assert server.value() == 9.0


def test_chunks_of_a_key_are_updated_side_by_side(server: Server) -> None:
    for start in (0, 1):
        server.init(shape=(2,), start=start, stop=start + 1)
    server.hold = True
    for start in (0, 1):
        for rank in range(3):
            server.push(rank, shape=(2,), start=start, stop=start + 1, sequence=1)
    assert [(apply.start, apply.version) for apply in server.applying] == [(0, 1), (1, 1)]
    server.finish()
    server.finish()


def test_pushing_ahead_without_end_is_refused(server: Server) -> None:
    server.init()
    for _ in range(MAX_OPEN_PUSHES):
        assert server.push(0).pending
    assert isinstance(server.push(0).answer, ProtocolError)
    for rank in (1, 2):
        server.push(rank)
    assert server.push(0).pending


# --- reading ---


def test_pull_after_a_push_returns_the_round_of_that_push(server: Server) -> None:
    server.init()
    server.push(0)
    pull = server.pull(0)
    assert pull.pending
    for rank in (1, 2):
        server.push(rank)
    assert (pull.answer, pull.payload) == (m.Value(1), 3.0)


def test_pull_after_two_pushes_waits_for_the_second(server: Server) -> None:
    server.init()
    server.push(0)
    server.push(0)
    pull = server.pull(0)
    for rank in (1, 2, 1, 2):
        assert pull.pending
        server.push(rank)
    assert (pull.answer, pull.payload) == (m.Value(2), 6.0)


def test_pull_of_a_closed_round_does_not_wait_for_the_open_one(server: Server) -> None:
    server.init()
    for rank in range(3):
        server.push(rank)
    server.push(1)
    pull = server.pull(0)
    assert (pull.answer, pull.payload) == (m.Value(1), 3.0)


def test_pull_without_a_push_is_answered_at_once(server: Server) -> None:
    server.init(value=7.0)
    server.push(1)
    pull = server.pull(0)
    assert (pull.answer, pull.payload) == (m.Value(0), 7.0)


def test_pushpull_is_answered_with_the_value_of_its_round(server: Server) -> None:
    server.init(value=1.0)
    asked = [server.push(rank, want_value=rank == 1) for rank in range(3)]
    assert [a.answer for a in asked] == [m.Done(1), m.Value(1), m.Done(1)]
    assert asked[1].payload == 4.0


def test_value_is_sent_by_reference_to_an_immutable_version(server: Server, like: type[Like]) -> None:
    server.init(shape=(4,), stop=4)
    server.pull(2, shape=(4,), stop=4)
    assert server.effects[-1] == like(ef.Send, payload=ef.StoredChunk("w", 0, 0, 16))


# --- time ---


def test_deadline_is_that_of_the_request_that_waits_least(server: Server) -> None:
    server.now = 1.0
    server.init()
    server.push(0, timeout=1.5)
    server.push(1, timeout=0.5)
    assert server.machine.deadline() == 1.5


def test_late_round_names_key_round_and_the_missing_workers(server: Server) -> None:
    server.init()
    push = server.push(1, timeout=1.0)
    server.tick(1.0)
    assert isinstance(push.error, RoundTimeoutError)
    assert push.error.details == {"ranks": [0, 2], "key": "w", "round": 1}
    for word in ("'w'", "round 1", "0 (worker-0), 2 (worker-2)", "1 s"):
        assert word in str(push.error)


def test_late_pull_names_the_same(server: Server) -> None:
    server.init()
    server.push(0)
    pull = server.pull(0, timeout=1.0)
    server.tick(1.0)
    assert isinstance(pull.error, RoundTimeoutError)
    assert pull.error.details == {"ranks": [1, 2], "key": "w", "round": 1}


def test_late_pull_of_a_worker_that_is_ahead_names_the_round_of_its_last_push(server: Server) -> None:
    server.init()
    for rank in (0, 0, 1):
        server.push(rank)
    pull = server.pull(0, timeout=1.0)
    server.tick(1.0)
    assert isinstance(pull.error, RoundTimeoutError)
    assert pull.error.details == {"ranks": [1, 2], "key": "w", "round": 2}


def test_update_that_takes_too_long_is_not_blamed_on_a_worker(server: Server) -> None:
    server.init()
    server.hold = True
    push, *_ = [server.push(rank) for rank in range(3)]
    server.tick(5.0)
    assert push.error.details["ranks"] == []
    assert "not applied yet" in str(push.error)
    server.finish()


def test_contribution_stays_counted_after_a_time_out(server: Server) -> None:
    server.init()
    server.push(0, timeout=1.0)
    server.tick(1.0)
    late = [server.push(rank) for rank in (1, 2)]
    assert server.value() == 3.0
    assert [push.answer for push in late] == [m.Done(1)] * 2


def test_worker_can_read_the_round_that_closed_after_its_time_out(server: Server) -> None:
    server.init()
    server.push(0, timeout=1.0)
    server.tick(1.0)
    pull = server.pull(0)
    for rank in (1, 2):
        server.push(rank)
    assert (pull.answer, pull.payload) == (m.Value(1), 3.0)


def test_pull_of_a_push_that_never_came_ends_by_its_time_out(server: Server) -> None:
    server.init()
    pull = server.pull(0, at_least=1, timeout=1.0)
    server.tick(1.0)
    assert pull.error.details["ranks"] == [0]


def test_nothing_waits_after_everybody_was_answered(server: Server) -> None:
    server.init()
    for rank in range(3):
        server.push(rank)
        server.pull(rank)
    machine = server.machine
    (chunk,) = machine._catalog.chunks.values()
    assert not machine._answers._waiters
    assert not chunk.pulls
    assert not chunk.updates
    assert not server.slots
    assert len(machine._deadlines) == 0


# --- what does not fit ---


@pytest.mark.parametrize("sequence", [0, 3], ids=["none", "gap"])
def test_push_out_of_sequence_changes_nothing(server: Server, sequence: int) -> None:
    server.init()
    server.push(0)
    again = server.push(0, 100.0, sequence=sequence)
    assert isinstance(again.error, ProtocolError)
    assert "expected push 2" in str(again.error)
    for rank in (1, 2):
        server.push(rank)
    assert server.value() == 3.0


@pytest.mark.parametrize("version", [-1, 1])
def test_push_computed_at_a_version_that_does_not_exist_is_refused(server: Server, version: int) -> None:
    server.init()
    assert isinstance(server.push(0, read_version=version).answer, ProtocolError)


def test_push_of_too_few_bytes_is_refused_and_its_slot_freed(server: Server) -> None:
    server.init(shape=(4,), stop=4)
    slot, asked = 7, server.asked
    message = m.Push("w", (4,), "float32", 0, 4, 1, 0, want_value=False, timeout=5.0)
    effects = server.machine.handle(st.Received(10, 1, message, slot, 8), now=0.0)
    assert [type(effect) for effect in effects] == [ef.Free, ef.Refuse]
    assert "16 bytes" in str(effects[1].error)  # type: ignore[union-attr]
    assert (10, 1) not in asked


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (1, 4)])
def test_push_of_other_elements_than_the_chunk_has_is_refused(server: Server, start: int, stop: int) -> None:
    server.init(shape=(4,), stop=4)
    assert isinstance(server.push(0, shape=(4,), start=start, stop=stop).answer, ProtocolError)


def test_request_id_that_waits_already_is_refused(server: Server) -> None:
    server.init()
    waiting = server.push(0)
    message = m.Pull("w", (1,), "float32", 0, 1, 0, 5.0)
    effects = server.machine.handle(st.Received(waiting.peer, waiting.request, message), now=0.0)
    (refuse,) = effects
    assert isinstance(refuse, ef.Refuse)
    assert isinstance(refuse.error, ProtocolError)
