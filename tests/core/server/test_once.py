"""Requests that a server carries out once, however often they come; processes in whose place there is a later one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.server import once
from aiokv.errors import CommandError, MembershipError, StaleEpochError
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m
from tests.core.conftest import only

if TYPE_CHECKING:
    from tests.core.conftest import Asked, Server

AGAIN = 50
"""The connection over which rank 0 comes again."""

COMMAND = m.Command("statistics", {}, 5.0)


def again(server: Server, asked: Asked, message: m.Message, peer: int = AGAIN) -> list[ef.Effect]:
    """Let rank 0 ask the same again over another connection; return what is answered there."""
    if peer not in server.machine._workers:
        assert server.attach(0, peer=peer).answer == m.Done()
    effects = server.machine.handle(st.Received(peer, asked.request, message), now=server.now)
    server.machine.validate()
    return [effect for effect in effects if isinstance(effect, ef.Send | ef.Refuse) and effect.peer == peer]


def test_answer_to_a_delete_is_given_again_and_nothing_is_deleted_twice(server: Server) -> None:
    server.init()
    delete = m.Delete(("w",), 5.0)
    asked = server.ask(0, delete)
    server.values.clear()
    server.init(value=7.0)
    assert again(server, asked, delete) == [ef.Send(AGAIN, asked.request, m.Done())]
    assert server.value() == 7.0


def test_error_is_given_again(server: Server) -> None:
    command = m.Command("nonsense", {}, 5.0)
    asked = server.ask(0, command)
    assert isinstance(asked.answer, CommandError)
    (refuse,) = again(server, asked, command)
    assert isinstance(refuse, ef.Refuse)
    assert refuse.error is asked.answer


def test_command_that_still_runs_is_answered_over_the_new_connection(server: Server) -> None:
    asked = server.ask(0, COMMAND)
    server.lose_peer(0)
    assert again(server, asked, COMMAND) == []
    assert len(server.seen(ef.Execute)) == 1
    effects = server.machine.handle(st.Executed(10, asked.request, {"a": 1}), now=0.0)
    assert effects == [ef.Send(AGAIN, asked.request, m.CommandResult({"a": 1}))]
    assert again(server, asked, COMMAND, 60) == [ef.Send(60, asked.request, m.CommandResult({"a": 1}))]


def test_what_waited_over_a_connection_that_is_over_waits_over_the_new_one(server: Server) -> None:
    server.init()
    change = m.SetPolicy("asp", ("w",), "bsp", (), 5.0, 0)
    asked = server.ask(0, change)
    assert asked.pending
    assert again(server, asked, change) == []
    server.ask(1, change)
    effects = server.machine.handle(st.Received(12, 900, change), now=0.0)
    assert ef.Send(AGAIN, asked.request, m.Done()) in effects


def test_change_that_was_made_meanwhile_is_answered_although_others_ask_for_the_next_one(server: Server) -> None:
    server.init()
    first, second = m.SetPolicy("asp", ("w",), "bsp", (), 5.0, 0), m.SetPolicy("ssp:1", ("w",), "asp", (), 5.0, 0)
    asked = server.ask(0, first)
    server.lose_peer(0)
    for rank in (1, 2):
        server.ask(rank, first)
    server.ask(1, second)
    assert again(server, asked, first) == [ef.Send(AGAIN, asked.request, m.Done())]


def test_request_that_was_held_while_an_update_was_made_is_carried_out_then(server: Server) -> None:
    server.init()
    server.hold = True
    for rank in range(3):
        server.push(rank)
    delete = server.ask(0, m.Delete(("w",), 5.0))
    assert delete.pending
    server.finish()
    assert delete.answer == m.Done()


def test_only_the_last_answers_are_known(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "REMEMBERED", 1)
    asked = [server.ask(0, COMMAND) for _ in range(2)]
    server.machine.handle(st.Executed(10, asked[0].request, {}), now=0.0)
    assert again(server, asked[1], COMMAND) == []
    assert len(server.seen(ef.Execute)) == 2
    effects = server.machine.handle(st.Received(AGAIN, asked[0].request, COMMAND), now=0.0)
    assert len(only(effects, ef.Execute)) == 1


def test_what_is_not_known_any_longer_is_carried_out_when_it_comes_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "REMEMBERED", 1)
    server.init()
    change = m.SetPolicy("asp", ("w",), "bsp", (), 5.0, 0)
    first, _ = (server.ask(0, change) for _ in range(2))
    server.lose_peer(0)
    assert again(server, first, change) == []
    server.ask(1, change)
    effects = server.machine.handle(st.Received(12, 900, change), now=0.0)
    assert ef.Send(AGAIN, first.request, m.Done()) in effects


# --- processes in whose place there is a later one ---


def replace(server: Server, rank: int = 0, incarnation: int = 2) -> list[ef.Effect]:
    """Let the scheduler say that another process has a worker's place; workers may be replaced."""
    server.publish()
    view = server.machine._joiner.view
    assert view is not None
    server.epoch += 1
    workers = tuple(
        structs.replace(entry, incarnation=incarnation) if entry.rank == rank else entry for entry in view.workers
    )
    view = structs.replace(view, epoch=server.epoch, workers=workers, on_worker_loss="respawn")
    return server.handle(st.Received(SCHEDULER, 0, view))


def test_process_in_whose_place_there_is_a_later_one_is_told_so_and_changes_nothing(server: Server) -> None:
    server.init()
    waiting = server.push(0)
    replace(server)
    assert isinstance(waiting.error, StaleEpochError)
    late: list[Any] = [server.push(0, sequence=2), server.pull(0), server.ask(0, COMMAND)]
    for asked in late:
        assert isinstance(asked.error, StaleEpochError)
        assert "rank 0 (worker-0) is a later process by now" in str(asked.error)
    assert server.machine._catalog.chunks["w", 0].pushed == {0: 1}
    assert not server.seen(ef.Execute)


def test_later_process_goes_on_and_the_others_are_not_concerned(server: Server) -> None:
    server.init()
    server.push(0, 1.0)
    replace(server)
    assert server.attach(0, peer=AGAIN, incarnation=2).answer == m.Done()
    duplicate = server.ask(0, m.Push("w", (1,), "float32", 0, 1, 1, 0, False, 5.0, 0, 1), 1000.0, peer=AGAIN)
    for rank in (1, 2):
        assert server.push(rank, 1.0).pending == (rank == 1)
    assert duplicate.answer == m.Done(1)
    assert server.value() == 3.0


def test_process_that_was_stopped_may_not_attach_again(server: Server) -> None:
    replace(server)
    server.lose_peer(0)
    assert isinstance(server.attach(0).error, StaleEpochError)
    assert isinstance(server.attach(0, incarnation=3).error, MembershipError)
    server.attach(0, incarnation=2)


def test_requests_of_a_later_process_have_numbers_of_their_own(server: Server) -> None:
    asked = server.ask(0, COMMAND)
    server.machine.handle(st.Executed(10, asked.request, {}), now=0.0)
    replace(server)
    server.attach(0, peer=AGAIN, incarnation=2)
    effects = server.machine.handle(st.Received(AGAIN, asked.request, COMMAND), now=0.0)
    assert len(only(effects, ef.Execute)) == 1


def test_command_of_a_process_that_is_no_more_may_end_late(server: Server) -> None:
    asked = server.ask(0, COMMAND)
    replace(server)
    server.attach(0, peer=AGAIN, incarnation=2)
    effects = server.machine.handle(st.Executed(10, asked.request, {}), now=0.0)
    assert only(effects, ef.Send) == [ef.Send(10, asked.request, m.CommandResult({}))]


@pytest.mark.parametrize("state", ["alive", "away", "finished"])
def test_worker_that_is_here_may_connect_again(server: Server, state: str) -> None:
    server.states[0] = (state, "")
    server.publish()
    assert server.attach(0, peer=AGAIN).answer == m.Done()


@pytest.mark.parametrize(("state", "error"), [("lost", StaleEpochError), ("left", MembershipError)])
def test_worker_that_is_gone_may_not(server: Server, state: str, error: type[MembershipError]) -> None:
    server.states[0] = (state, "why")
    server.publish()
    assert type(server.attach(0, peer=AGAIN).answer) is error
