"""A worker's row-sparse keys: which server gets which rows, and what a call waits for."""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as hs

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.placement import place_rows
from aiokv.core.worker import row_parts
from aiokv.errors import ClosedError, ConfigError, KeyUseError, ProtocolError, SpecMismatchError
from aiokv.types import TensorSpec
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Worker

SPEC = TensorSpec((10, 2), "float32")
ROW = 8 + 8
"""Bytes of a row with its id."""


@pytest.fixture
def cut(make_worker: type[Worker]) -> Worker:
    """A worker of a cluster with two servers, over which even small tables are cut."""
    return make_worker(split_bytes=1)


@given(rows=hs.integers(0, 10**12), servers=hs.integers(1, 9), key=hs.one_of(hs.text(min_size=1), hs.integers(0, 99)))
def test_rows_are_cut_evenly_over_all_servers(rows: int, servers: int, key: Any) -> None:
    chunks = place_rows(key, TensorSpec((rows, 3), "float32"), servers=servers, split_bytes=1)
    assert chunks[0].start == 0
    assert chunks[-1].stop == rows
    assert all(before.stop == after.start for before, after in itertools.pairwise(chunks))
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert max(sizes) - min(sizes) <= 1
    assert len({chunk.server for chunk in chunks}) == len(chunks) == max(1, min(servers, rows))


def test_a_small_table_lives_on_one_server() -> None:
    assert len(place_rows("t", SPEC, servers=7, split_bytes=2**16)) == 1


def test_every_push_goes_to_every_chunk_even_without_rows(cut: Worker) -> None:
    assert cut.machine.row_bounds("t", SPEC) == [0, 5]
    call = cut.transfer_rows("push", st.Rows([3, 0]))
    first, second = call.sends
    head, empty = call.messages
    assert (head.start, head.stop, head.count, head.total) == (0, 5, 3, 3)
    assert (empty.start, empty.stop, empty.count) == (5, 10, 0)
    assert first.payload == ef.CallMemory(call.number, 0, 0, 3 * ROW)
    assert second.payload == ef.CallMemory(call.number, 0, 3 * ROW, 3 * ROW)
    assert first.peer != second.peer
    assert cut.finish(call).outcome == "done"


def test_pushes_are_counted_and_share_the_clock_of_the_call(cut: Worker) -> None:
    for _ in range(2):
        cut.finish(cut.transfer("push", "w", shape=(1,)))
    tensors = [("w", TensorSpec((1,), "float32")), ("t", SPEC)]
    fields = {"operation": st.Operation.PUSH, "tensors": tensors, "timeout": 10.0, "rows": [st.Rows([1, 1])]}
    dense, *parts = cut.call(st.Transfer, **fields).messages
    assert dense.clock == 3
    assert [(part.clock, part.sequence) for part in parts] == [(3, 1), (3, 1)]


def test_a_pull_asks_only_servers_that_have_wanted_rows(cut: Worker) -> None:
    ids = struct.pack("2q", 6, 9)
    call = cut.transfer_rows("pull", st.Rows([0, 2], ids))
    (send,) = call.sends
    (message,) = call.messages
    assert (message.start, message.rows, message.at_least) == (5, ids, 0)
    assert cut.machine.landing(send.request, 16) == ef.CallMemory(call.number, 0, 0, 16)
    cut.answer(send, m.Value(4))
    assert call.outcome == "done"
    assert cut.transfer_rows("push", st.Rows([0, 0])).messages[1].read_version == 4


def test_a_pull_of_no_rows_is_done_at_once(cut: Worker) -> None:
    call = cut.transfer_rows("pull", st.Rows([0, 0]))
    assert not call.sends
    assert call.outcome == "done"


def test_a_pull_waits_for_this_workers_last_push(cut: Worker) -> None:
    cut.transfer_rows("push", st.Rows([0, 0]))
    (message,) = cut.transfer_rows("pull", st.Rows([1, 0], struct.pack("q", 1))).messages
    assert message.at_least == 1


def test_a_pull_is_cut_so_that_no_answer_is_long(make_worker: type[Worker]) -> None:
    worker = make_worker(chunk_bytes=16, servers=1)
    ids = struct.pack("5q", *range(5))
    call = worker.transfer_rows("pull", st.Rows([5], ids))
    assert b"".join(message.rows for message in call.messages) == ids
    landings = [
        worker.machine.landing(send.request, nbytes) for send, nbytes in zip(call.sends, (16, 16, 8), strict=True)
    ]
    assert landings == [ef.CallMemory(call.number, 0, start, min(start + 16, 40)) for start in (0, 16, 32)]


def test_a_large_push_goes_in_several_messages_of_which_the_last_counts(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_parts, "SENT_BYTES", 2 * ROW)
    call = worker.transfer_rows("push", st.Rows([5]))
    counted = [(message.first, message.count, message.total, message.sequence) for message in call.messages]
    assert counted == [(0, 2, 5, 1), (2, 2, 5, 1), (4, 1, 5, 1)]
    assert [send.payload for send in call.sends] == [
        ef.CallMemory(call.number, 0, start * ROW, stop * ROW) for start, stop in ((0, 2), (2, 4), (4, 5))
    ]
    assert len({send.priority for send in call.sends}) == 1
    for send in call.sends:
        worker.refuse(send, ProtocolError("no"))
    assert worker.transfer_rows("push", st.Rows([0])).messages[0].sequence == 1, "it was not taken"


def test_pushes_of_a_table_under_way_are_limited_too(make_worker: type[Worker]) -> None:
    worker = make_worker(max_open_pushes=1)
    first = worker.transfer_rows("push", st.Rows([1]))
    second = worker.transfer_rows("push", st.Rows([2]))
    assert not second.sends
    worker.finish(first)
    send = worker.effects[-1]
    assert isinstance(send, ef.Send)
    assert isinstance(send.message, m.PushRows)
    assert send.message.sequence == 2


def test_the_root_sends_the_rows_of_an_init_and_the_others_none(make_worker: type[Worker]) -> None:
    options = st.KeyOptions("asp", lazy=False, initializer={"name": "uniform"}, digests=(b"d",))
    for rank, counts in ((0, [2, 1]), (1, [0, 0])):
        worker = make_worker(rank=rank, split_bytes=1)
        call = worker.transfer_rows("init", st.Rows([2, 1]), options=options)
        assert [message.count for message in call.messages] == counts
        assert [message.total for message in call.messages] == counts
        for message in call.messages:
            assert (message.policy, message.lazy, message.initializer) == ("asp", False, {"name": "uniform"})
            assert message.digest == (b"" if rank else b"d")
        assert all((send.payload is None) == (rank == 1) for send in call.sends)
        assert not worker.machine.is_sparse("t")
        worker.finish(call)
        assert worker.machine.is_sparse("t")
        assert worker.machine.spec("t") == SPEC


def test_what_this_worker_has_initialised_is_used_as_that(cut: Worker) -> None:
    cut.finish(cut.transfer_rows("init", st.Rows([0, 0])))
    cut.finish(cut.transfer("init", "w", shape=SPEC.shape))
    for wrong in (cut.transfer("push", "t", shape=SPEC.shape), cut.transfer_rows("pull", st.Rows([0, 0]), key="w")):
        assert isinstance(wrong.error, SpecMismatchError)
    assert isinstance(cut.transfer_rows("push", st.Rows([0]), shape=(9, 2)).error, SpecMismatchError)


def test_what_can_not_be_a_table_is_refused_here(cut: Worker) -> None:
    assert isinstance(cut.transfer_rows("push", st.Rows([0]), shape=()).error, SpecMismatchError)
    options = st.KeyOptions(initializer={"name": "normal", "scale": -1.0})
    assert isinstance(cut.transfer_rows("init", st.Rows([0, 0]), options=options).error, ConfigError)
    with pytest.raises(KeyUseError):
        cut.machine.row_bounds(-1, SPEC)


def test_where_rows_live_is_known_when_the_worker_has_joined(make_worker: type[Worker]) -> None:
    with pytest.raises(ClosedError):
        make_worker(join=False).machine.row_bounds("t", SPEC)
