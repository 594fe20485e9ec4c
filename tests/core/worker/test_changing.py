"""What holds on all servers or on none: each is asked whether it can be before one has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.merging import Merging
from aiokv.errors import OptimizerError, PolicyError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Call, Server, Worker

SAVED = m.RulesState("sgd", {"learning_rate": 0.5}, "sum", ((3, {"learning_rate": 0.25}),), 2)
ERROR = OptimizerError("optimizer 'sgd' updates floats, but key 'count' has int64", key="count", got="int64")


def set_rule(worker: Worker) -> Call:
    """Let a worker set the update rule."""
    return worker.call(st.ConfigureOptimizer, name="sgd", params={}, merging=Merging("mean"), timeout=10.0)


def load_rule(worker: Worker) -> Call:
    """Let a worker load a saved one."""
    return worker.call(st.WriteRules, rules=SAVED, timeout=10.0)


def change_policy(worker: Worker) -> Call:
    """Let a worker move its keys to another policy."""
    return worker.call(st.ChangePolicy, policy="asp", keys=[], timeout=10.0)


EACH = pytest.mark.parametrize("begin", [set_rule, load_rule, change_policy])


@pytest.fixture
def trained(worker: Worker) -> Worker:
    """A worker of two servers that has the key "w"."""
    worker.finish(worker.transfer("init", "w"))
    return worker


@EACH
def test_all_servers_agree_before_one_of_them_has_it(trained: Worker, begin: Any) -> None:
    call = begin(trained)
    trials = call.sends
    assert [(send.peer, send.message.trial) for send in trials] == [(0, True), (1, True)]
    assert trained.answer(trials[1], m.Done(), 0) == []
    told: list[Any] = [one for one in trained.answer(trials[0], m.Done(), 0) if isinstance(one, ef.Send)]
    assert [(send.peer, send.message.trial) for send in told] == [(0, False), (1, False)]
    assert [type(send.message) for send in told] == [type(send.message) for send in trials]
    assert call.outcome is None
    for send in told:
        trained.answer(send, m.Done(), 0)
    assert call.outcome == "done"


@EACH
def test_what_one_server_cannot_have_no_server_has(trained: Worker, begin: Any) -> None:
    call = begin(trained)
    first, second = call.sends
    trained.answer(first, m.Done(), 0)
    assert not any(isinstance(one, ef.Send) for one in trained.refuse(second, ERROR))
    assert type(call.error) is OptimizerError
    assert call.error.message == (
        "server 1 (server-1 at 127.0.0.1:9001) can't have that, so it holds on no server: "
        "optimizer 'sgd' updates floats, but key 'count' has int64"
    )
    assert call.error.details == {"key": "count", "got": "int64"}
    assert [record.options.policy for record in trained.machine.records] in (["bsp"], [""])
    assert trained.transfer("push", "w").sends, "nothing has changed"


@EACH
def test_later_pushes_do_not_overtake_it(trained: Worker, begin: Any) -> None:
    call = begin(trained)
    later = trained.transfer("push", "w")
    assert not later.sends
    trained.finish(trained.agree(call))
    assert call.outcome == "done"
    assert [type(one.message) for one in trained.effects if isinstance(one, ef.Send)][-1] is m.Push


@pytest.mark.parametrize("begin", [set_rule, load_rule])
def test_a_server_by_itself_is_told_at_once(make_worker: type[Worker], begin: Any) -> None:
    (send,) = begin(make_worker(servers=1)).sends
    assert not send.message.trial


def test_a_later_error_is_passed_on_as_it_is(trained: Worker) -> None:
    call = trained.agree(set_rule(trained))
    trained.refuse(call.sends[0], ERROR)
    assert call.error.message == ERROR.message


# --- a server ---


def test_a_server_that_is_only_asked_has_changed_nothing(make_server: type[Server]) -> None:
    server = make_server(workers=1)
    server.init("w")
    for trial in (
        m.SetOptimizer("sgd", {}, "sum", 5.0, trial=True),
        m.PutRules("sgd", {}, "sum", ((2, {"wd": 1.0}),), 7, 5.0, trial=True),
        m.PutRules("", {}, "sum", (), 7, 5.0, trial=True),
        m.SetPolicy("asp", ("w",), "bsp", (), 5.0, 0, trial=True),
    ):
        assert server.ask(0, trial).answer == m.Done()
    assert not server.seen(ef.Configure)
    assert server.ask(0, m.GetRules(5.0)).answer == m.RulesState("", {}, "sum", (), 0)
    assert [chunk.policy.name for chunk in server.machine._catalog.chunks.values()] == ["bsp"]


def test_a_server_says_what_cannot_be(make_server: type[Server]) -> None:
    server = make_server(workers=1)
    server.init("w")
    server.ask(0, m.SetOptimizer("sgd", {}, "sum", 5.0))
    for trial, error, text in (
        (m.SetOptimizer("adam", {}, "sum", 5.0, trial=True), OptimizerError, "set the same rule everywhere"),
        (m.PutRules("adam", {}, "sum", (), 7, 5.0, trial=True), OptimizerError, "set the same rule everywhere"),
        (m.PutRules("sgd", {}, "sum", ((2, {"momentum": 1}),), 7, 5.0, trial=True), OptimizerError, "can't change"),
        (m.SetPolicy("asp", ("w",), "ssp:1", (), 5.0, 0, trial=True), PolicyError, "kept under policy bsp, not ssp:1"),
    ):
        refused = server.ask(0, trial)
        assert type(refused.error) is error
        assert text in refused.error.message
