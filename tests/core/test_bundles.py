"""Bundles on a server and in a worker: one chunk while all use the keys together, one chunk for each key after that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import (
    AlreadyInitializedError,
    CallTimeoutError,
    OptimizerError,
    PolicyError,
    ProtocolError,
    RoundTimeoutError,
    SpecMismatchError,
    UnknownKeyError,
    WorkerLostError,
)
from aiokv.types import TensorSpec
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.types import Key, Rank
    from tests.core.conftest import Asked, Like, Server, Worker

KEYS: tuple[Key, ...] = ("a", "b", "c")
SHAPES = ((1,), (2,), ())


def init(server: Server, rank: Rank = 0, value: float = 0.0, **changes: Any) -> Asked:
    """Let a worker initialise the keys together: four elements."""
    fields: dict[str, Any] = {"keys": KEYS, "shapes": SHAPES, "dtype": "float32", "policy": "bsp", "timeout": 5.0}
    fields["digests"] = (b"" if rank else repr(value).encode(),) * 3
    server.bundle_size = 4
    return server.ask(rank, m.InitBundle(**(fields | changes)), None if rank else value)


def push(server: Server, rank: Rank, value: float = 1.0, sequence: int = 1, **changes: Any) -> Asked:
    """Let a worker push the keys together."""
    fields: dict[str, Any] = {"bundle": 0, "read_version": 0, "want_value": True, "timeout": 5.0}
    server.bundle_size = 4
    return server.ask(rank, m.PushBundle(sequence=sequence, **(fields | changes)), value)


def push_one(server: Server, rank: Rank, key: Key = "b", **changes: Any) -> Asked:
    """Let a worker push one of the keys alone."""
    size = {"a": 1, "b": 2, "c": 1}[str(key)]
    shape = SHAPES[KEYS.index(key)]
    return server.push(rank, 10.0, key=key, shape=shape, stop=size, **changes)


# --- init ---


def test_keys_that_are_initialised_together_are_one_chunk(server: Server, like: type[Like]) -> None:
    assert init(server, value=7.0).answer == m.Bundled(0)
    assert server.seen(ef.Install) == [like(ef.Install, key="a", start=-1, dtype="float32", size=4)]


def test_others_wait_for_rank_0_and_get_the_same_number(server: Server) -> None:
    early = init(server, 1)
    assert early.pending
    init(server)
    assert early.answer == init(server, 2).answer == m.Bundled(0)


def test_bundle_waits_until_all_its_keys_are_there_however_they_came(server: Server) -> None:
    early = init(server, 1)
    server.init("a")
    server.init("c", shape=())
    assert early.pending
    server.init("b", shape=(2,), stop=2)
    assert early.answer == m.Bundled(0)


def test_single_key_is_there_when_its_bundle_is(server: Server) -> None:
    early = server.init("b", rank=1, shape=(2,), stop=2)
    init(server)
    assert early.answer == m.Done(0)
    assert server.init("b", rank=2, shape=(2,), stop=2).answer == m.Done(0)


@pytest.mark.parametrize("again", [{"value": 2.0}, {"keys": ("z", "b", "y")}])
def test_key_of_a_bundle_is_initialised_once(server: Server, again: dict[str, Any]) -> None:
    init(server)
    error = init(server, **again).answer
    assert isinstance(error, AlreadyInitializedError)
    assert isinstance(server.init("b", 2.0, shape=(2,), stop=2).answer, AlreadyInitializedError)


def test_scenario_29_same_values_again_are_no_error(server: Server) -> None:
    init(server, value=1.0)
    for rank in range(3):
        push(server, rank)
    assert init(server, value=1.0).answer == m.Bundled(0)
    assert server.init("b", 1.0, shape=(2,), stop=2).answer == m.Done(1)
    assert server.value("a", -1) == 4.0


def test_bundle_has_a_digest_for_each_key(server: Server) -> None:
    assert isinstance(init(server, digests=(b"1", b"2")).answer, ProtocolError)
    assert init(server).answer == m.Bundled(0)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"keys": (), "shapes": ()}, ProtocolError),
        ({"keys": ("a", "b", "a")}, ProtocolError),
        ({"shapes": ((1,), (2,))}, ProtocolError),
        ({"shapes": ((1,), (2,), (7,))}, ProtocolError),
        ({"dtype": "text"}, SpecMismatchError),
        ({"policy": "nope"}, PolicyError),
    ],
    ids=["no-keys", "twice", "no-shape", "bytes", "dtype", "policy"],
)
def test_bundle_that_cannot_be_is_refused(server: Server, changes: dict[str, Any], error: type[Exception]) -> None:
    assert isinstance(init(server, **changes).answer, error)
    assert init(server).answer == m.Bundled(0)


def test_other_ranks_bring_no_values_and_no_other_shapes(server: Server) -> None:
    server.bundle_size = 4
    message = m.InitBundle(KEYS, SHAPES, "float32", "bsp", 5.0, (), (b"", b"", b""))
    assert isinstance(server.ask(1, message, 1.0).answer, ProtocolError)
    waiting = init(server, 1, shapes=((1,), (3,), ()))
    init(server)
    assert isinstance(waiting.answer, SpecMismatchError)
    assert isinstance(init(server, 2, policy="asp").answer, PolicyError)


def test_key_that_is_cut_into_chunks_goes_in_no_bundle(server: Server) -> None:
    server.init("big", shape=(8,), stop=4)
    server.init("d")
    answer = init(server, 1, keys=("big", "d"), shapes=((8,), (1,))).answer
    assert isinstance(answer, ProtocolError)
    assert "'big' is cut" in str(answer)


def test_wait_for_a_bundle_ends_with_the_names_of_its_keys(server: Server) -> None:
    late = init(server, 1)
    server.tick(5.0)
    assert isinstance(late.answer, CallTimeoutError)
    assert "keys 'a', 'b', 'c': not initialized by rank 0 (worker-0)" in str(late.answer)
    lost = init(server, 1)
    server.lose(0)
    assert isinstance(lost.answer, WorkerLostError)


def test_rule_for_floats_refuses_a_bundle_of_integers(server: Server) -> None:
    server.ask(0, m.SetOptimizer("sgd", {}, "sum", 5.0))
    assert isinstance(init(server, dtype="int32").answer, OptimizerError)
    assert init(server).answer == m.Bundled(0)


# --- together ---


def test_round_of_a_bundle_is_one_update(server: Server) -> None:
    init(server)
    asked = [push(server, rank, rank + 1.0) for rank in range(3)]
    assert [(a.answer, a.payload) for a in asked] == [(m.Value(1), 6.0)] * 3
    assert len(server.seen(ef.Apply)) == 1
    assert server.ask(0, m.PullBundle(0, 1, 5.0)).payload == 6.0


def test_push_of_a_bundle_that_does_not_fit_is_refused(server: Server) -> None:
    init(server)
    server.bundle_size = 3
    assert isinstance(server.ask(0, m.PushBundle(0, 1, 0, True, 5.0), 1.0).answer, ProtocolError)
    for number in (-1, 1):
        error = push(server, 0, bundle=number).answer
        assert isinstance(error, UnknownKeyError)
        assert "no bundle has the number" in str(error)
    assert isinstance(push(server, 0, sequence=2).answer, ProtocolError)


def test_time_out_of_a_bundle_names_its_keys_and_who_is_missing(server: Server) -> None:
    init(server)
    late = push(server, 1)
    server.tick(5.0)
    assert isinstance(late.answer, RoundTimeoutError)
    assert "keys 'a', 'b', 'c', round 1: no contribution from rank 0 (worker-0), 2 (worker-2)" in str(late.answer)


# --- divided ---


def test_key_that_is_used_alone_divides_the_bundle_and_nothing_is_lost(server: Server) -> None:
    init(server, value=5.0)
    together = [push(server, 0), push(server, 1)]
    alone = [push_one(server, 2, key, want_value=True) for key in KEYS]
    assert [a.payload for a in alone] == [5.0 + 1 + 1 + 10] * 3
    assert [(a.answer, a.payload) for a in together] == [(m.Value(1), [17.0] * 3)] * 2
    # The bundle can still be pushed together.
    asked = [push(server, rank, sequence=2, read_version=1) for rank in range(3)]
    assert asked[0].payload == [20.0] * 3


def test_rank_order_is_kept_when_a_bundle_is_divided(server: Server) -> None:
    """In float32, (1e8 + 1) - 1e8 = 0 in rank order; other orders give 1."""
    init(server)
    push(server, 1, 1.0)
    push(server, 0, 1e8)
    for key in KEYS:
        server.push(2, -1e8, key=key, shape=SHAPES[KEYS.index(key)], stop=2 if key == "b" else 1)
    assert [server.value(key) for key in KEYS] == [0.0] * 3


def test_parked_pull_of_a_bundle_waits_for_all_its_keys(server: Server) -> None:
    init(server)
    push(server, 0)
    pull = server.ask(0, m.PullBundle(0, 1, 5.0))
    push(server, 1)
    for key in KEYS:
        assert pull.pending
        push_one(server, 2, key)
    assert pull.payload == [12.0] * 3


def test_pull_of_divided_keys_is_answered_when_the_last_is_ready(server: Server) -> None:
    init(server)
    for rank in range(3):
        push_one(server, rank, "b")
    late = server.ask(1, m.PullBundle(0, 1, 5.0))
    assert late.pending
    for rank in range(3):
        push_one(server, rank, "a")
        push_one(server, rank, "c")
    assert late.payload == [30.0] * 3


def test_nothing_is_divided_while_its_update_is_made(server: Server) -> None:
    init(server)
    server.hold = True
    asked = [push(server, rank) for rank in range(3)]
    alone = push_one(server, 0, "a", sequence=2, read_version=0)
    other = server.pull(1, key="c", shape=(), at_least=0)
    assert alone.pending
    assert other.pending
    assert not server.seen(ef.Divide)
    server.finish()
    assert asked[0].payload == 3.0
    assert other.payload == 3.0
    server.hold = False
    for rank in (1, 2):
        push_one(server, rank, "a", sequence=2)
    assert server.value("a") == 3.0 + 30.0


def test_another_grouping_of_the_same_keys_waits_for_the_update_too(server: Server) -> None:
    init(server)
    assert init(server, 1, keys=("c", "a"), shapes=((), (1,))).answer == m.Bundled(1)
    server.hold = True
    for rank in range(3):
        push(server, rank)
    server.bundle_size = 2
    other = server.ask(1, m.PullBundle(1, 0, 5.0))
    assert other.pending
    server.finish()
    assert other.payload == [3.0, 3.0]


def test_another_grouping_divides_the_bundle_when_it_is_used(server: Server) -> None:
    init(server, value=5.0)
    init(server, 1, keys=("c", "a"), shapes=((), (1,)))
    assert not server.seen(ef.Divide)
    assert server.ask(1, m.PullBundle(1, 0, 5.0)).payload == [5.0, 5.0]
    assert server.value("b") == 5.0


def test_time_out_of_divided_keys_names_the_one_that_is_not_ready(server: Server) -> None:
    init(server)
    late = push(server, 0)
    for rank in (1, 2):
        push_one(server, rank, "a")
    assert server.value("a") == 21.0
    server.tick(5.0)
    assert isinstance(late.answer, RoundTimeoutError)
    assert "key 'b', round 1: no contribution from rank 1 (worker-1), 2 (worker-2)" in str(late.answer)


def test_request_for_a_lost_worker_is_not_held_for_ever(server: Server) -> None:
    init(server)
    server.hold = True
    for rank in range(3):
        push(server, rank)
    push_one(server, 2, "a", sequence=2)
    server.handle(st.PeerLost(12, "connection reset"))
    server.finish()
    assert not server.slots


def test_refused_use_of_one_key_divides_but_changes_nothing(server: Server) -> None:
    init(server, value=5.0)
    assert isinstance(push_one(server, 0, "a", sequence=7).answer, ProtocolError)
    assert isinstance(server.push(0, key="b", shape=(2,), start=1, stop=2).answer, ProtocolError)
    assert [server.value(key) for key in KEYS] == [5.0] * 3


def test_loss_fails_those_who_wait_for_divided_keys_once(server: Server) -> None:
    init(server)
    waiting = push(server, 0)
    push_one(server, 1, "a")
    server.lose(2)
    assert isinstance(waiting.answer, WorkerLostError)
    assert isinstance(push(server, 1, sequence=1).answer, WorkerLostError)


# --- a worker ---


def specs(*keys: Key, shape: tuple[int, ...] = (2,)) -> list[tuple[Key, TensorSpec]]:
    return [(key, TensorSpec(shape, "float32")) for key in keys]


def messages(worker: Worker, operation: st.Operation, *keys: Key) -> list[m.Message]:
    """Make a call, answer it, and return what was sent for it, most keys first."""
    call = worker.call(st.Transfer, operation=operation, tensors=specs(*keys), timeout=10.0)
    worker.finish(call)
    assert call.outcome == "done"
    return [send.message for send in call.sends]


ALL = tuple(f"k{i}" for i in range(6))


def kinds(sent: list[m.Message]) -> set[str]:
    return {type(message).__name__ for message in sent}


def test_small_keys_that_are_initialised_together_go_together(worker: Worker) -> None:
    assert kinds(messages(worker, st.Operation.INIT, *ALL)) == {"InitBundle"}
    assert kinds(messages(worker, st.Operation.PUSHPULL, *ALL)) == {"PushBundle"}
    assert kinds(messages(worker, st.Operation.PULL, *reversed(ALL))) == {"PullBundle"}


def test_every_worker_groups_them_in_the_same_way(make_worker: type[Worker]) -> None:
    first, second = make_worker(), make_worker()
    sent = [messages(first, st.Operation.INIT, *ALL), messages(second, st.Operation.INIT, *reversed(ALL))]
    assert [message.keys for message in sent[0] if isinstance(message, m.InitBundle)] == [
        message.keys for message in sent[1] if isinstance(message, m.InitBundle)
    ]


def test_tensor_that_is_used_alone_takes_its_bundle_apart_and_keeps_the_counts(worker: Worker) -> None:
    messages(worker, st.Operation.INIT, *ALL)
    messages(worker, st.Operation.PUSHPULL, *ALL)
    (alone,) = messages(worker, st.Operation.PUSHPULL, "k0")
    assert isinstance(alone, m.Push)
    assert (alone.sequence, alone.read_version) == (2, 1)
    sent = messages(worker, st.Operation.PUSH, *ALL)
    sequences = {message.key: message.sequence for message in sent if isinstance(message, m.Push)}
    assert sequences["k0"] == 3
    assert all(number == 2 for key, number in sequences.items() if key != "k0")


def test_bundle_that_a_key_left_before_its_answer_is_not_used(worker: Worker) -> None:
    init_call = worker.call(st.Transfer, operation=st.Operation.INIT, tensors=specs(*ALL), timeout=10.0)
    early = worker.call(st.Transfer, operation=st.Operation.PUSH, tensors=specs(*ALL), timeout=10.0)
    assert kinds([send.message for send in early.sends]) == {"Push"}
    worker.finish(init_call)
    worker.finish(early)
    assert kinds(messages(worker, st.Operation.PUSH, *ALL)) == {"Push"}


def test_push_of_a_bundle_that_was_refused_does_not_count(worker: Worker) -> None:
    messages(worker, st.Operation.INIT, *ALL)
    call = worker.call(st.Transfer, operation=st.Operation.PUSH, tensors=specs(*ALL), timeout=10.0)
    late = worker.call(st.Transfer, operation=st.Operation.PUSHPULL, tensors=specs("k0"), timeout=10.0)
    for send in call.sends:
        worker.refuse(send, UnknownKeyError("no such key", key="k0"))
    assert isinstance(call.outcome, UnknownKeyError)
    worker.finish(late)
    sent = messages(worker, st.Operation.PUSH, "k1")
    assert [message.sequence for message in sent if isinstance(message, m.Push)] == [1]


def test_version_of_a_bundle_that_was_taken_apart_under_way_counts_for_its_keys(worker: Worker) -> None:
    messages(worker, st.Operation.INIT, *ALL)
    together = worker.call(st.Transfer, operation=st.Operation.PUSHPULL, tensors=specs(*ALL), timeout=10.0)
    alone = worker.call(st.Transfer, operation=st.Operation.PUSH, tensors=specs("k0"), timeout=10.0)
    worker.finish(together)
    worker.finish(alone)
    sent = messages(worker, st.Operation.PUSH, *ALL)
    assert {message.read_version for message in sent if isinstance(message, m.Push)} <= {0, 1}
    assert any(isinstance(message, m.Push) and message.read_version == 1 for message in sent)


def test_plans_are_bounded(worker: Worker) -> None:
    messages(worker, st.Operation.INIT, *ALL)
    for number in range(200):
        messages(worker, st.Operation.PUSH, f"x{number}")
    assert len(worker.machine._directory._plans._plans) <= 64


def test_a_worker_knows_the_specs_that_it_has_initialised(worker: Worker) -> None:
    messages(worker, st.Operation.INIT, *ALL)
    assert worker.machine.spec("k0") == TensorSpec((2,), "float32")
    assert worker.machine.spec("nope") is None
