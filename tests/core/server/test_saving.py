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
    PolicyError,
    ProtocolError,
    SpecMismatchError,
    UnknownKeyError,
)
from aiokv.types import TensorSpec
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
    asked = server.ask(1, get(names=("mean",)))
    assert asked.answer == m.State(1)
    assert asked.payload == ef.StoredState("w", 0, 1, "w", 0, True, ("mean",))


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


def test_a_key_that_is_here_in_part_is_named_with_what_is_missing(server: Server) -> None:
    """Who initialised it was lost in the middle of it."""
    half: dict[str, Any] = {"shape": (6,), "start": 0, "stop": 3}
    assert server.init(**half).answer == m.Done()
    rest = half | {"start": 3, "stop": 6}
    for asked in (server.ask(0, get(**rest)), server.push(1, **rest)):
        assert isinstance(asked.error, UnknownKeyError)
        assert asked.error.details["key"] == "w"
        assert "elements 3 to 6 are not initialized" in str(asked.error)
    assert isinstance(server.ask(0, get(shape=(6,), start=2, stop=6)).error, ProtocolError), "it is cut elsewhere"
    assert server.init(**rest).answer == m.Done()
    assert server.ask(0, get(**rest)).answer == m.State(0)


def test_a_bundle_has_only_whole_keys(server: Server) -> None:
    bundle(server)
    assert isinstance(server.ask(0, get("b", stop=0)).error, ProtocolError)


def test_who_sends_a_state_hears_what_the_store_says(server: Server) -> None:
    server.init()
    server.restore_error = DataError("not like this")
    assert server.ask(0, put(), 1.0).error is server.restore_error
    assert server.value() == 0


@pytest.mark.parametrize("message", [get(), put(), m.GetRules(1.0), m.PutRules("", {}, "sum", (), 0, 1.0)])
def test_only_workers_that_said_who_they_are_may(server: Server, message: m.Message) -> None:
    server.init()
    assert isinstance(server.ask(0, message, peer=99).error, MembershipError)


# --- keys that are made of their state ---


def test_a_state_makes_a_key_that_is_not_there(server: Server) -> None:
    """Its rounds are those of its group, and who had waited for it reads what was put."""
    pull, init = server.pull(2), server.ask(2, root_of(1))
    assert server.ask(0, put(policy="bsp", group=(1, 2)), 7.0).answer == m.Done()
    assert init.answer == m.Done()
    assert pull.payload == 7
    for rank in (1, 2):
        server.push(rank)
    assert server.pull(1).payload == 9


def root_of(rank: int) -> m.Init:
    return m.Init("w", (1,), "float32", 0, 1, "bsp", 5.0, (rank, 2))


def test_rows_make_a_row_sparse_key_whichever_come_first(server: Server) -> None:
    message = put("t", shape=(10,), start=3, stop=10, policy="bsp", sparse=True, first=0)
    server.ask(0, message, 7.0)
    (install,) = server.seen(ef.InstallRows)
    assert (install.key, install.start, install.stop, install.slot) == ("t", 0, 10, None)
    server.ask(0, message, 7.0)
    assert len(server.seen(ef.InstallRows)) == 1
    assert [restore.first for restore in server.seen(ef.Restore)] == [3, 3]


def test_a_key_that_is_there_is_not_made_anew(server: Server) -> None:
    server.init(value=2.0)
    assert server.ask(0, put(policy="sum"), 7.0).answer == m.Done()
    assert len(server.seen(ef.Install)) == 1
    assert server.value() == 7


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"policy": "nosuch"}, PolicyError),
        ({"policy": "bsp", "group": (2, 1)}, ProtocolError),
        ({"policy": "bsp", "group": (0, 70)}, MembershipError),
        ({"policy": "bsp", "dtype": "int32"}, OptimizerError),
        ({"policy": "bsp", "start": 5, "stop": 4}, SpecMismatchError),
    ],
)
def test_what_can_not_be_made_is_refused(server: Server, changes: dict[str, Any], error: type[Exception]) -> None:
    server.ask(0, SGD)
    assert isinstance(server.ask(0, put(**changes), 7.0).error, error)
    assert not server.seen(ef.Install)


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


def record(key: str = "w", shape: tuple[int, ...] = (1,), *, sparse: bool = False, **options: Any) -> st.KeyRecord:
    return st.KeyRecord(key, TensorSpec(shape, "float32"), sparse, st.KeyOptions(**options))


def test_a_worker_asks_the_server_of_each_chunk_and_takes_answers_of_any_length(make_worker: type[Worker]) -> None:
    worker = make_worker(servers=2)
    worker.finish(worker.transfer("init", shape=(1 << 15,)))
    (known,) = worker.machine.records
    assert known == record(shape=(1 << 15,), policy="bsp")
    ends = worker.machine.state_parts(known)
    parts = [st.StatePart(known, *end, ("value",)) for end in ends]
    call = worker.call(st.ReadState, parts=parts, timeout=5.0)
    assert [(send.message.start, send.message.stop) for send in call.sends] == ends  # type: ignore[attr-defined]
    assert all(send.message.names == ("value",) for send in call.sends)  # type: ignore[attr-defined]
    assert {send.peer for send in call.sends} == {0, 1}
    effects = []
    for number, send in enumerate(call.sends):
        for nbytes in (5, 500):
            assert worker.machine.landing(send.request, nbytes) == ef.CallBuffer(call.number, number)
        effects += worker.answer(send, m.State(7 + number), nbytes=100 + number)
    assert effects == [ef.Complete(call.number, {number: 7 + number for number in range(len(ends))})]


def test_an_answer_without_a_state_is_an_error(make_worker: type[Worker]) -> None:
    worker = make_worker()
    call = worker.call(st.ReadState, parts=[st.StatePart(record(), 0, 1)], timeout=5.0)
    worker.answer(call.sends[0], m.Done(), nbytes=0)
    assert isinstance(call.error, ProtocolError)


def test_states_are_sent_out_of_the_memory_of_the_call(make_worker: type[Worker]) -> None:
    worker = make_worker()
    call = worker.call(st.WriteState, parts=[st.StatePart(record(policy="bsp"), 0, 1)], nbytes=[77], timeout=5.0)
    assert call.sends[0].payload == ef.CallMemory(call.number, 0, 0, 77)
    assert call.sends[0].message.policy == ""  # type: ignore[attr-defined]
    worker.answer(call.sends[0], m.Done())
    assert call.outcome == "done"


def test_a_state_that_makes_its_key_says_how(make_worker: type[Worker]) -> None:
    """Of a row-sparse key also where its chunk begins, since these may be its later rows."""
    worker = make_worker(servers=1)
    table = record("t", (10, 1), sparse=True, policy="asp", group=(1, 2), lazy=False, initializer={"name": "zeros"})
    parts = [st.StatePart(table, 3, 10, creates=True)]
    call = worker.call(st.WriteState, parts=parts, nbytes=[77], timeout=5.0)
    message = call.sends[0].message
    assert isinstance(message, m.PutState)
    made = (message.policy, message.group, message.sparse, message.first, message.lazy, message.initializer)
    assert made == ("asp", (1, 2), True, 0, False, {"name": "zeros"})


def test_keys_that_a_load_has_made_are_used_like_others(make_worker: type[Worker]) -> None:
    worker = make_worker()
    records = [record(policy="sum", group=(0, 1)), record("t", (10, 1), sparse=True, policy="bsp")]
    assert worker.call(st.Adopt, records=records).outcome == "done"
    assert worker.machine.records == records
    assert worker.machine.spec("w") == TensorSpec((1,), "float32")
    assert worker.machine.is_sparse("t")


def test_ranks_that_there_are_not_are_no_group(make_worker: type[Worker]) -> None:
    worker = make_worker()
    worker.machine.check_group((0, 1))
    with pytest.raises(MembershipError):
        worker.machine.check_group((0, 70))


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
