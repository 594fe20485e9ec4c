"""Reads that a policy holds back: who waits for whom, until when, and what is said when the wait can't end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as ef
from aiokv.errors import KeyDeletedError, RoundTimeoutError, WorkerLostError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Server


@pytest.fixture
def lockstep(make_server: type[Server]) -> Server:
    """A server with the key "w" under "ssp:0" and three workers."""
    return server_with(make_server, "ssp:0")


def server_with(make_server: type[Server], policy: str, workers: int = 3) -> Server:
    server = make_server(workers, policy)
    server.init()
    return server


def test_every_push_is_an_update_and_is_answered_at_once(lockstep: Server) -> None:
    assert [lockstep.push(rank).answer for rank in (2, 2, 0)] == [m.Done(1), m.Done(2), m.Done(3)]
    assert [apply.ranks for apply in lockstep.seen(ef.Apply)] == [[2], [2], [0]]


def test_pull_and_pushpull_wait_for_the_last_of_the_slowest(lockstep: Server) -> None:
    pushpull = lockstep.push(0, want_value=True)
    lockstep.push(1)
    pull = lockstep.pull(1)
    assert pushpull.pending
    assert pull.pending
    lockstep.now = 2.0
    last = lockstep.push(2, want_value=True)
    assert [(asked.answer, asked.payload) for asked in (pushpull, pull, last)] == [(m.Value(3), 3.0)] * 3


@pytest.mark.parametrize("staleness", [1, 3])
def test_worker_may_lead_by_the_staleness(make_server: type[Server], staleness: int) -> None:
    server = server_with(make_server, f"ssp:{staleness}", workers=2)
    for number in range(1, staleness + 1):
        assert server.push(0, want_value=True).answer == m.Value(number)
    ahead = server.push(0, want_value=True)
    assert ahead.pending
    server.push(1)
    assert ahead.answer == m.Value(staleness + 2)


def test_only_those_who_are_no_longer_too_far_ahead_go_on(make_server: type[Server]) -> None:
    server = server_with(make_server, "ssp:0", workers=2)
    for _ in range(2):
        server.push(0)
    far = server.pull(0)
    server.push(1)
    assert far.pending
    near = server.pull(1)
    assert near.answer == m.Value(3)
    server.push(1)
    assert far.answer == m.Value(4)


def test_pull_waits_for_its_own_push_and_then_for_the_others(make_server: type[Server]) -> None:
    server = server_with(make_server, "ssp:0", workers=2)
    server.hold = True
    server.push(0)
    pull = server.pull(0)
    server.finish()
    assert pull.pending
    server.push(1)
    server.finish()
    assert pull.answer == m.Value(2)


def test_who_has_left_holds_nobody_back(lockstep: Server) -> None:
    lockstep.push(0)
    lockstep.push(1)
    pull = lockstep.pull(0)
    lockstep.leave(2)
    assert pull.answer == m.Value(2)


def test_who_has_finished_holds_nobody_back(lockstep: Server) -> None:
    for rank in (0, 1):
        lockstep.push(rank)
    pull = lockstep.pull(0)
    lockstep.states[2] = ("finished", "")
    lockstep.publish()
    assert pull.answer == m.Value(2)


def test_who_waits_for_a_lost_worker_is_told_at_once(lockstep: Server) -> None:
    lockstep.push(0)
    before = lockstep.pull(0)
    lockstep.lose(2)
    after = lockstep.push(1, want_value=True)
    for asked in (before, after):
        assert isinstance(asked.error, WorkerLostError)
        assert asked.error.details["ranks"] == [2]
        assert "key 'w', read can't complete" in str(asked.error)
    assert lockstep.value() == 2.0, "what was pushed is there"


def test_loss_of_a_worker_that_is_ahead_changes_nothing(lockstep: Server) -> None:
    lockstep.push(0)
    lockstep.push(1)
    pull = lockstep.pull(0)
    lockstep.lose(1)
    assert pull.pending
    lockstep.push(2)
    assert pull.answer == m.Value(3)


def test_deadline_says_who_is_behind(lockstep: Server) -> None:
    lockstep.push(0)
    pull = lockstep.pull(0)
    lockstep.push(1)
    lockstep.tick(5.0)
    assert isinstance(pull.error, RoundTimeoutError)
    assert pull.error.details["ranks"] == [2]
    assert "rank 0 may not read on before rank 2 (worker-2) has pushed more within 5 s" in str(pull.error)
    lockstep.push(2)
    assert lockstep.pull(0).answer == m.Value(3)


def test_connection_of_a_reader_ends_while_it_waits(lockstep: Server) -> None:
    lockstep.push(0)
    lockstep.pull(0)
    lockstep.lose_peer(0)
    lockstep.push(1)
    lockstep.push(2)
    assert lockstep.value() == 3.0


def test_deletion_of_the_key_ends_the_wait(lockstep: Server) -> None:
    lockstep.push(0)
    pull = lockstep.pull(0)
    lockstep.ask(1, m.Delete(("w",), 5.0))
    assert isinstance(pull.error, KeyDeletedError)


def test_group_waits_for_its_own_ranks_only(make_server: type[Server]) -> None:
    server = make_server(3, "ssp:0")
    server.init(group=(0, 1))
    server.push(0)
    pull = server.pull(0)
    server.push(1)
    assert pull.answer == m.Value(2)


def test_time_that_reads_were_held_back_is_counted(lockstep: Server) -> None:
    lockstep.push(0)
    lockstep.pull(0)
    lockstep.now = 1.5
    lockstep.push(1)
    lockstep.push(2)
    (answer,) = [lockstep.ask(0, m.GetTally(5.0)).answer]
    assert isinstance(answer, m.Tally)
    assert [answer.ranks[rank].waited for rank in range(3)] == [1.5, 0.0, 0.0]
    assert [answer.ranks[rank].staleness for rank in range(3)] == [{0: 1}, {1: 1}, {2: 1}]


@pytest.mark.parametrize("policy", ["pbsp:2", "pssp:2:0", "dssp:0:0"])
def test_other_gates_hold_and_release_as_ssp_where_they_are_the_same(make_server: type[Server], policy: str) -> None:
    server = server_with(make_server, policy)
    held = [server.push(rank, want_value=True) for rank in (1, 0)]
    assert held[0].pending
    server.push(2)
    assert [asked.answer for asked in held] == [m.Value(3)] * 2


def test_fastest_may_go_ahead_where_waiting_would_take_longer(make_server: type[Server]) -> None:
    """Steps take 2 s and 5 s: at 12 s waiting takes 3 s, one more step and then waiting 1 s (Zhao et al., 2019)."""
    server = server_with(make_server, "dssp:3:5", workers=2)
    for rank, now in [(0, 2.0), (0, 4.0), (1, 5.0), (0, 6.0), (0, 8.0), (1, 10.0), (0, 10.0), (0, 12.0)]:
        server.now = now
        assert not server.push(rank, want_value=True).pending
    server.now = 14.0
    assert server.push(0, want_value=True).pending
