"""State of keys that is read and put back: which chunk it is, when, and how the clock goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import (
    ClosedError,
    DataError,
    MembershipError,
    OptimizerError,
    ProtocolError,
    SpecMismatchError,
    UnknownKeyError,
)
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Server, Worker

SGD = m.SetOptimizer("sgd", {"learning_rate": 1.0}, "sum", 5.0)


def get(key: Any = "w", **changes: Any) -> m.GetState:
    """Return what asks for all of a key of one element."""
    fields: dict[str, Any] = {"shape": (1,), "dtype": "float32", "start": 0, "stop": 1, "arrays": True}
    return m.GetState(key, timeout=5.0, **(fields | changes))


def put(key: Any = "w", **changes: Any) -> m.PutState:
    """Return what replaces all of a key of one element."""
    fields: dict[str, Any] = {"shape": (1,), "dtype": "float32", "start": 0, "stop": 1}
    return m.PutState(key, timeout=5.0, **(fields | changes))


def bundle(server: Server) -> None:
    """Let two keys of one element be a bundle."""
    server.bundle_size = 2
    message = m.InitBundle(("a", "b"), ((1,), (1,)), "float32", "bsp", 5.0, (), (b"a", b"b"))
    assert server.ask(0, message, 3.0).answer == m.Bundled(0)


# --- the server ---


def test_a_state_has_the_version_that_its_value_has(server: Server) -> None:
    server.init(value=2.0)
    for rank in range(3):
        server.push(rank)
    asked = server.ask(1, get())
    assert asked.answer == m.State(1)
    assert asked.payload == ef.StoredState("w", 0, 1, "w", 0, True)


def test_a_key_is_read_out_of_its_bundle_which_stays_whole(server: Server) -> None:
    bundle(server)
    asked = server.ask(0, get("b", arrays=False))
    assert asked.payload == ef.StoredState("a", -1, 0, "b", 0, False)
    assert not server.seen(ef.Divide)


def test_a_key_that_gets_a_state_leaves_its_bundle(server: Server) -> None:
    bundle(server)
    assert server.ask(0, put("b"), 7.0).answer == m.Done()
    assert (server.value("a"), server.value("b")) == (3, 7)


def test_a_value_that_is_put_takes_no_part_in_rounds_and_they_go_on(server: Server) -> None:
    server.init(value=2.0)
    for rank in range(3):
        server.push(rank)
    assert server.ask(0, put(), 10.0).answer == m.Done()
    for rank in range(3):
        server.push(rank)
    assert server.pull(0).payload == 13
    assert server.pull(0).answer == m.Value(2)


@pytest.mark.parametrize("message", [get(), put()])
def test_a_state_waits_for_an_update_that_is_under_way(server: Server, message: Any) -> None:
    server.init()
    server.hold = True
    for rank in range(3):
        server.push(rank)
    asked = server.ask(0, message, 1.0 if isinstance(message, m.PutState) else None)
    assert asked.pending
    server.finish()
    assert asked.answer in [m.State(1), m.Done()]


def test_rows_are_read_from_any_row_of_a_chunk_on(server: Server) -> None:
    server.init_rows({1: 5.0})
    asked = server.ask(0, get("t", shape=(10,), start=3, stop=10))
    assert asked.payload == ef.StoredState("t", 0, 0, "t", 3, True)
    for start, stop in ((-1, 10), (0, 9)):
        refused = server.ask(0, get("t", shape=(10,), start=start, stop=stop))
        assert isinstance(refused.error, ProtocolError)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (get("nobody"), UnknownKeyError),
        (get(shape=(2,)), SpecMismatchError),
        (get(stop=2), ProtocolError),
        (put(), ProtocolError),
    ],
    ids=["unknown key", "another shape", "no chunk", "no payload"],
)
def test_what_can_not_be_is_refused(server: Server, message: m.Message, error: type[Exception]) -> None:
    server.init()
    assert isinstance(server.ask(0, message).error, error)
    assert server.value() == 0


def test_who_sends_a_state_hears_what_the_store_says(server: Server) -> None:
    server.init()
    server.restore_error = DataError("not like this")
    assert server.ask(0, put(), 1.0).error is server.restore_error
    assert server.value() == 0


@pytest.mark.parametrize("message", [get(), put(), m.GetRules(1.0), m.PutRules("", {}, "sum", (), 0, 1.0)])
def test_only_workers_that_said_who_they_are_may(server: Server, message: m.Message) -> None:
    server.init()
    assert isinstance(server.ask(0, message, peer=99).error, MembershipError)


def test_the_rule_of_a_key_that_keeps_its_sum_keeps_nothing(server: Server) -> None:
    server.init(policy="sum")
    server.ask(0, SGD)
    server.init("v")
    server.ask(0, put(), 1.0)
    server.ask(0, put("v"), 1.0)
    assert [restore.rule.name for restore in server.seen(ef.Restore)] == ["assign", "sgd"]


# --- rules ---


def rules(server: Server) -> m.RulesState:
    """Return what a server says of its rule."""
    answer = server.ask(0, m.GetRules(5.0)).answer
    assert isinstance(answer, m.RulesState)
    return answer


def put_rules(state: m.RulesState, **changes: Any) -> m.PutRules:
    fields: dict[str, Any] = {name: getattr(state, name) for name in state.__struct_fields__}
    return m.PutRules(**(fields | changes), timeout=5.0)


def test_no_rule_has_no_name_and_a_clock(server: Server) -> None:
    assert rules(server) == m.RulesState("", {}, "sum", (), 0)


def test_a_rule_goes_on_elsewhere_with_its_changes_and_clock(server: Server, make_server: type[Server]) -> None:
    server.init()
    server.ask(0, SGD)
    server.ask(0, m.ChangeOptimizer(2, {"learning_rate": 0.5}, 5.0))
    server.ask(0, m.ChangeOptimizer(5, {"lr_mult": {"w": 2.0}}, 5.0))
    for rank in range(3):
        server.push(rank, clock=3)
    saved = rules(server)
    assert saved.clock == 3
    assert saved.changes == ((2, {"learning_rate": 0.5}), (5, {"lr_mult": [["w", 2.0]]}))
    other = make_server()
    assert other.ask(0, put_rules(saved)).answer == m.Done()
    assert len(other.seen(ef.Configure)) == 1
    assert rules(other) == saved
    other.init()
    for rank in range(3):
        other.push(rank, clock=4)
    assert other.seen(ef.Apply)[-1].rule.learning_rate == 0.5  # type: ignore[attr-defined]


def test_the_same_rule_goes_back_and_keeps_the_states(server: Server) -> None:
    server.ask(0, SGD)
    saved = rules(server)
    server.ask(0, m.ChangeOptimizer(2, {"learning_rate": 0.5}, 5.0))
    assert server.ask(0, put_rules(saved)).answer == m.Done()
    assert rules(server) == saved
    assert len(server.seen(ef.Configure)) == 1


def test_another_rule_or_a_change_that_can_not_be_changes_nothing(server: Server) -> None:
    server.ask(0, SGD)
    saved = rules(server)
    for changes in (
        {"reduction": "mean", "clock": 9},
        {"name": "adam", "params": {}, "clock": 9},
        {"changes": ((3, {"momentum": 0.5}),), "clock": 9},
        {"changes": ((3, {"learning_rate": -1.0}),), "clock": 9},
    ):
        assert isinstance(server.ask(0, put_rules(saved, **changes)).error, OptimizerError)
        assert rules(server) == saved


def test_without_a_rule_only_the_clock_is_set(server: Server) -> None:
    server.ask(0, SGD)
    saved = rules(server)
    assert server.ask(0, m.PutRules("", {}, "sum", (), 7, 5.0)).answer == m.Done()
    assert rules(server) == put_clock(saved, 7)


def put_clock(state: m.RulesState, clock: int) -> m.RulesState:
    return m.RulesState(state.name, state.params, state.reduction, state.changes, clock)


# --- the worker ---


def test_a_worker_asks_the_server_of_each_chunk_and_takes_answers_of_any_length(make_worker: type[Worker]) -> None:
    worker = make_worker(servers=2)
    worker.finish(worker.transfer("init", shape=(1 << 15,)))
    assert worker.machine.keys == ["w"]
    ends = worker.machine.state_parts("w")
    call = worker.call(st.ReadState, parts=[st.StatePart("w", *end) for end in ends], timeout=5.0)
    assert [(send.message.start, send.message.stop) for send in call.sends] == ends  # type: ignore[attr-defined]
    assert {send.peer for send in call.sends} == {0, 1}
    for number, send in enumerate(call.sends):
        for nbytes in (5, 500):
            assert worker.machine.landing(send.request, nbytes) == ef.CallBuffer(call.number, number)
        worker.answer(send, m.State(0), nbytes=100 + number)
    assert call.outcome == "done"


def test_an_answer_without_a_state_is_an_error(make_worker: type[Worker]) -> None:
    worker = make_worker()
    worker.finish(worker.transfer("init", shape=(1,)))
    call = worker.call(st.ReadState, parts=[st.StatePart("w", 0, 1)], timeout=5.0)
    worker.answer(call.sends[0], m.Done(), nbytes=0)
    assert isinstance(call.error, ProtocolError)


def test_states_are_sent_out_of_the_memory_of_the_call(make_worker: type[Worker]) -> None:
    worker = make_worker()
    worker.finish(worker.transfer("init", shape=(1,)))
    call = worker.call(st.WriteState, parts=[st.StatePart("w", 0, 1)], nbytes=[77], timeout=5.0)
    assert call.sends[0].payload == ef.CallMemory(call.number, 0, 0, 77)
    worker.answer(call.sends[0], m.Done())
    assert call.outcome == "done"


def test_a_key_that_is_not_initialised_has_no_state(make_worker: type[Worker]) -> None:
    worker = make_worker()
    call = worker.call(st.ReadState, parts=[st.StatePart("w", 0, 1)], timeout=5.0)
    assert isinstance(call.error, UnknownKeyError)


def test_rules_of_all_servers_are_the_result(make_worker: type[Worker]) -> None:
    worker = make_worker(servers=2)
    call = worker.call(st.ReadRules, timeout=5.0)
    states = [m.RulesState("", {}, "sum", (), clock) for clock in (3, 4)]
    effects = [worker.answer(send, state) for send, state in zip(call.sends, states, strict=True)]
    assert effects == [[], [ef.Complete(call.number, states)]]


def test_rules_go_to_all_servers(make_worker: type[Worker]) -> None:
    worker = make_worker(servers=2)
    state = m.RulesState("sgd", {}, "sum", ((2, {"wd": 1.0}),), 3)
    call = worker.call(st.WriteRules, rules=state, timeout=5.0)
    assert [send.peer for send in call.sends] == [0, 1]
    message = call.sends[0].message
    assert isinstance(message, m.PutRules)
    assert (message.name, message.changes, message.clock) == ("sgd", state.changes, 3)


def test_the_next_push_has_the_clock_after_the_one_that_was_resumed(make_worker: type[Worker]) -> None:
    """And so on, as if all pushes had been made here; a change without a round is for the next one."""
    worker = make_worker()
    worker.finish(worker.transfer("init", shape=(1,)))
    for clock in (3, 1):
        assert worker.call(st.Resume, clock=clock, updates={"w": clock}).outcome == "done"
        assert worker.machine.clock == clock
        for later in (clock + 1, clock + 2):
            push = worker.transfer("push", shape=(1,))
            message = push.sends[0].message
            assert isinstance(message, m.Push)
            assert message.clock == later
            worker.answer(push.sends[0], m.Done(1))
        change = worker.call(st.AdjustOptimizer, params={"wd": 1.0}, since=None, timeout=5.0)
        assert change.sends[0].message.since == clock + 3  # type: ignore[attr-defined]


def test_each_key_goes_on_from_its_own_count(make_worker: type[Worker]) -> None:
    """As if all pushes had been made here: a key that was pushed less often does not move the clock."""
    worker = make_worker(servers=1)
    names = ("a", "b", "c", "d", "e", "f")
    worker.finish(worker.transfer("init", *names, shape=(1,)))
    updates = dict.fromkeys(names, 1) | {"a": 4}
    # A rule that was set after the first push has seen one update less.
    assert worker.call(st.Resume, clock=5, updates=updates).outcome == "done"

    def clock_of(*keys: str) -> int:
        call = worker.finish(worker.transfer("push", *keys, shape=(1,)))
        return int(call.messages[0].clock)

    assert [clock_of("b"), clock_of("b"), clock_of(*names), clock_of("c"), clock_of("a")] == [5, 5, 6, 6, 7]


def test_a_closed_worker_says_so(make_worker: type[Worker]) -> None:
    worker = make_worker()
    worker.call(st.Depart, timeout=5.0)
    for stimulus, fields in ((st.ReadState, {"parts": []}), (st.ReadRules, {})):
        call = worker.call(stimulus, timeout=5.0, **fields)
        assert isinstance(call.error, ClosedError)
