"""Commands to servers: checked before they are run, answered when they are over, gathered by the servers' numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.commands import NoParams, make_command
from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import ClosedError, CommandError, ServerLostError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Server, Worker

STATISTICS = m.Command("statistics", {}, 5.0)


def test_a_command_is_run_and_its_answer_goes_back(server: Server) -> None:
    asked = server.ask(1, STATISTICS)
    assert asked.answer is None
    assert server.seen(ef.Execute) == [ef.Execute(asked.peer, asked.request, make_command("statistics", {}), 0)]
    assert server.seen(ef.Execute)[0].command.params == NoParams()
    server.handle(st.Executed(asked.peer, asked.request, {"n": 1}))
    assert asked.answer == m.CommandResult({"n": 1})


def test_a_command_that_fails_is_refused(server: Server) -> None:
    asked = server.ask(1, STATISTICS)
    server.handle(st.Executed(asked.peer, asked.request, CommandError("no")))
    assert isinstance(asked.answer, CommandError)


def test_an_unknown_command_is_refused_and_not_run(server: Server) -> None:
    answer = server.ask(0, m.Command("stop", {}, 5.0)).answer
    assert isinstance(answer, CommandError)
    assert "statistics" in answer.details["expected"]
    assert not server.seen(ef.Execute)


def test_a_lost_worker_commands_nothing(server: Server) -> None:
    server.lose(1)
    assert server.ask(1, STATISTICS).answer is not None
    assert not server.seen(ef.Execute)


def test_answers_of_all_servers_make_the_result(worker: Worker) -> None:
    call = worker.call(st.SendCommand, name="count", params={"a": 1}, timeout=10.0)
    assert [send.peer for send in call.sends] == [0, 1]
    assert all(isinstance(message, m.Command) and message.params == {"a": 1} for message in call.messages)
    worker.answer(call.sends[1], m.CommandResult({"from": 1}))
    assert call.outcome is None
    effects = worker.answer(call.sends[0], m.CommandResult({"from": 0}))
    assert effects == [ef.Complete(call.number, {0: {"from": 0}, 1: {"from": 1}})]


def test_one_server_that_refuses_ends_the_call(worker: Worker) -> None:
    call = worker.call(st.SendCommand, name="count", params={}, timeout=10.0)
    worker.refuse(call.sends[0], CommandError("unknown command 'count'"))
    assert isinstance(call.error, CommandError)


def test_a_server_that_is_gone_ends_the_call(worker: Worker) -> None:
    call = worker.call(st.SendCommand, name="count", params={}, timeout=10.0)
    worker.lose_server(1, "closed")
    assert isinstance(call.error, ServerLostError)


def test_a_closed_worker_sends_none(make_worker: type[Worker]) -> None:
    call = make_worker(join=False).call(st.SendCommand, name="count", params={}, timeout=10.0)
    assert isinstance(call.error, ClosedError)
