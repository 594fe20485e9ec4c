"""What goes first: by priority, for messages and answers, but never two pushes of a key out of order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import ConfigError
from aiokv.types import TensorSpec
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Call, Like, Server, Worker


def transfer(worker: Worker, operation: st.Operation, *keys: str, priority: int = 0) -> Call:
    tensors: list[Any] = [(key, TensorSpec((2,), "float32")) for key in keys]
    return worker.call(st.Transfer, operation=operation, tensors=tensors, timeout=10.0, priority=priority)


def priorities(call: Call) -> set[int]:
    return {send.priority for send in call.sends}


def test_messages_leave_with_the_priority_of_their_call(worker: Worker) -> None:
    for operation in (st.Operation.PUSH, st.Operation.PULL, st.Operation.PUSHPULL):
        call = transfer(worker, operation, "a", priority=-9)
        assert priorities(call) == {-9}
        assert [getattr(send.message, "priority", None) for send in call.sends] == [-9]
        worker.finish(call)


def test_init_goes_before_everything_that_may_need_it(worker: Worker) -> None:
    assert priorities(transfer(worker, st.Operation.INIT, "a")) == {ef.URGENT}


def test_push_does_not_overtake_an_earlier_one_of_its_key(worker: Worker) -> None:
    low = transfer(worker, st.Operation.PUSH, "a", priority=-9)
    assert priorities(transfer(worker, st.Operation.PUSH, "a", priority=5)) == {-9}
    assert priorities(transfer(worker, st.Operation.PUSH, "b", priority=5)) == {5}
    assert priorities(transfer(worker, st.Operation.PULL, "a", priority=5)) == {5}
    for call in [low, *list(worker.calls.values())[2:]]:
        worker.finish(call)
    assert priorities(transfer(worker, st.Operation.PUSH, "a", priority=5)) == {5}


def test_push_of_one_key_does_not_overtake_its_bundle(worker: Worker) -> None:
    keys = tuple(f"k{i}" for i in range(6))
    worker.finish(transfer(worker, st.Operation.INIT, *keys))
    assert priorities(transfer(worker, st.Operation.PUSH, *keys, priority=-9)) == {-9}
    assert priorities(transfer(worker, st.Operation.PUSH, "k0", priority=5)) == {-9}


def test_lost_server_leaves_no_push_under_way(make_worker: type[Worker]) -> None:
    worker = make_worker()
    transfer(worker, st.Operation.PUSH, "a", priority=-9)
    for peer in (0, 1):
        worker.lose_server(peer, "connection reset")
    assert not worker.machine._directory.pushes.open


@pytest.mark.parametrize("priority", [10**7, 0.5, True])
def test_what_is_no_priority_is_refused(worker: Worker, priority: Any) -> None:
    assert isinstance(transfer(worker, st.Operation.PUSH, "a", priority=priority).outcome, ConfigError)


def test_value_leaves_with_the_priority_of_its_request(server: Server, like: type[Like]) -> None:
    server.init()
    for rank in range(3):
        server.push(rank, want_value=True, priority=rank - 9)
    server.pull(0, priority=4)
    values = [send.priority for send in server.seen(ef.Send) if isinstance(send.message, m.Value)]
    assert values == [-9, -8, -7, 4]
