"""What is large is computed in threads, in pieces that the loop can wait for, in the order of the calls, bit by bit."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.compressing import Tensor
from aiokv.net.memory import TURN_BYTES
from aiokv.operations import values as value_operations
from aiokv.store.first_rows import FirstRows
from aiokv.store.memory import ParameterStore
from aiokv.storing import DRAWING_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.net.conftest import MakeCluster

ROWS, WIDTH = 20_000, 4
NORMAL = {"name": "normal", "scale": 0.5}
LARGE = 1_000_000
"""Elements of a tensor that is larger than what is computed in the loop."""


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[int, bool]]]:
    """Return what watches a function: for each call of it, the length of an argument, and whether a thread made it."""

    def watch(owner: Any, name: str, size: Callable[..., int]) -> list[tuple[int, bool]]:
        calls: list[tuple[int, bool]] = []
        function = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            calls.append((size(*arguments), threading.current_thread() is not threading.main_thread()))
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)
        return calls

    return watch


def some_rows(ids: Any, number: float = 1.0) -> aiokv.RowSparse:
    return aiokv.RowSparse(ids, np.full((len(ids), WIDTH), number, np.float32), (ROWS, WIDTH))


def expected_rows(*pushes: aiokv.RowSparse) -> Any:
    """Return all rows of the table after the pushes, from the store that has no loop and no threads."""
    kv = aiokv.create("local")
    kv.init_rows("t", (ROWS, WIDTH), initializer=NORMAL)
    kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.9)
    for rows in pushes:
        kv.push("t", rows)
    return kv.row_sparse_pull("t", row_ids=np.arange(ROWS)).values


async def test_first_values_of_many_rows_are_drawn_in_threads(
    cluster: MakeCluster, threads: Callable[..., list[tuple[int, bool]]]
) -> None:
    """The loop itself draws few at a time, and all have the bits that they have in one process."""
    drawn = threads(FirstRows, "make", lambda _self, rows: rows.size)
    async with cluster(workers=1, servers=2) as running:
        (kv,) = running.workers
        await kv.init_rows("t", (ROWS, WIDTH), initializer=NORMAL)
        await kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.9)
        few = await kv.row_sparse_pull("t", row_ids=np.arange(10))
        # Several pulls meet in one turn of the server's loop.
        ids = np.array_split(np.arange(ROWS), 3)
        before = await asyncio.gather(*(kv.row_sparse_pull("t", row_ids=some) for some in ids))
        await kv.push("t", some_rows(np.arange(0, ROWS, 2)))
        after = await kv.row_sparse_pull("t", row_ids=np.arange(ROWS))
    assert drawn[0] == (10, False)
    assert max(size for size, aside in drawn if not aside) <= TURN_BYTES // DRAWING_BYTES
    assert sum(size for size, aside in drawn if aside) > ROWS
    assert few.values.tobytes() == expected_rows()[:10].tobytes()
    assert np.concatenate([rows.values for rows in before]).tobytes() == expected_rows().tobytes()
    assert after.values.tobytes() == expected_rows(some_rows(np.arange(0, ROWS, 2))).tobytes()


async def test_what_comes_while_rows_are_updated_waits_for_its_turn(
    cluster: MakeCluster, threads: Callable[..., list[tuple[int, bool]]]
) -> None:
    """Pushes and pulls of two workers meet; each sees the rounds that it must see, and sums are in rank order."""
    updates = threads(ParameterStore, "apply_rows", lambda *_: 1)
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init_rows("t", (ROWS, WIDTH), initializer=NORMAL))
        await running.each(lambda kv: kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.9))
        numbers = [0.1, 0.7]

        async def work(kv: aiokv.Client) -> Any:
            pushes = [kv.push("t", some_rows(np.arange(ROWS), numbers[kv.rank] * scale)) for scale in (1, 2)]
            *_, seen = await asyncio.gather(*pushes, kv.row_sparse_pull("t", row_ids=np.arange(ROWS)))
            return seen.values

        await running.each(work)
        seen = await running.each(lambda kv: kv.row_sparse_pull("t", row_ids=np.arange(ROWS)))
    assert updates == [(1, True)] * 2
    added = [some_rows(np.arange(ROWS), float(np.float32(0.1 * scale) + np.float32(0.7 * scale))) for scale in (1, 2)]
    for rows in seen:
        assert rows.values.tobytes() == expected_rows(*added).tobytes()


async def test_a_server_that_computes_can_be_closed(cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread ends first; the call of the worker fails, since nobody answers."""
    reached, go_on = threading.Event(), threading.Event()
    make = FirstRows.make

    def slow(self: FirstRows, rows: Any) -> Any:
        reached.set()
        assert go_on.wait(20)
        return make(self, rows)

    async with cluster(workers=1) as running:
        (kv,), (server,) = running.workers, running.servers
        await kv.init_rows("t", (ROWS, WIDTH), initializer=NORMAL)
        monkeypatch.setattr(FirstRows, "make", slow)
        pull = asyncio.create_task(kv.row_sparse_pull("t", row_ids=np.arange(ROWS)))
        assert await asyncio.to_thread(reached.wait, 20)
        closing = asyncio.create_task(server.close())
        await asyncio.sleep(0)
        assert not closing.done()
        go_on.set()
        await closing
        with pytest.raises(aiokv.errors.AiokvError):
            await pull


async def test_large_sparse_pushes_are_packed_in_threads_and_go_in_their_order(
    cluster: MakeCluster, threads: Callable[..., list[tuple[int, bool]]]
) -> None:
    """The second push is small, and would be ready before the first one."""
    packed = threads(value_operations, "sending_rows", lambda _keys, values, *_: values[0].indices.size)
    rows, width = 4000, 400
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init_rows("t", (rows, width))
        large = aiokv.RowSparse(np.arange(rows)[::-1], np.ones((rows, width), np.float32), (rows, width))
        small = aiokv.RowSparse([7], np.full((1, width), 5, np.float32), (rows, width))
        await asyncio.gather(kv.push("t", large), kv.push("t", small))
        pulled = await kv.row_sparse_pull("t", row_ids=[6, 7])
    assert packed[-2:] == [(rows, True), (1, False)]
    np.testing.assert_array_equal(pulled.values[:, 0], [1, 5])


async def test_what_is_left_of_a_large_gradient_is_merged_in_a_thread(
    cluster: MakeCluster, threads: Callable[..., list[tuple[int, bool]]]
) -> None:
    """The residuals of two codecs go with the third push, with the bits that they have in one process."""
    merged = threads(Tensor, "merge", lambda tensor: tensor.gradient.size)
    gradients = np.random.default_rng(8).standard_normal((3, LARGE), np.float32)
    oracle = aiokv.create("local")
    oracle.init("w", np.zeros(LARGE, np.float32))
    expected = []
    for gradient, codec in zip(gradients, ("2bit", "fp8", None), strict=True):
        oracle.set_gradient_compression(codec)
        expected.append(oracle.pushpull("w", gradient).copy())
    merged.clear()
    async with cluster(workers=1, servers=2) as running:
        (kv,) = running.workers
        await kv.init("w", np.zeros(LARGE, np.float32))
        for gradient, codec, value in zip(gradients, ("2bit", "fp8", None), expected, strict=True):
            await kv.set_gradient_compression(codec)
            assert (await kv.pushpull("w", gradient)).tobytes() == value.tobytes()
        state = await kv.compression_state()
    assert merged == [(LARGE, True)] * 3
    assert not state["w"]["residual"].any()
