"""Horovod's tests of the lifetime of tensors: what a caller may do with an array, and when.

An array that was given belongs to its caller again when the call has returned, in whatever way it has ended. One that
was received belongs to the caller alone.
"""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.errors import SpecMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiokv
    from tests.net.conftest import MakeCluster

SIZES = {"small": 17, "neighbour": 5, "chunks": 50_000}
CUT = {"servers": 2, "split_bytes": 4096, "chunk_bytes": 16384}


def full(value: float) -> dict[str, Any]:
    return {key: np.full(size, value, "float32") for key, size in SIZES.items()}


def assert_full(arrays: Any, value: float) -> None:
    for array, (key, size) in zip(arrays, SIZES.items(), strict=True):
        np.testing.assert_array_equal(array, np.full(size, value, "float32"), err_msg=key)


@pytest.mark.parametrize("policy", ["bsp", "asp"])
@pytest.mark.parametrize("shared_memory", ["auto", "off"])
async def test_a_pushed_array_may_be_changed_when_the_call_has_returned(
    cluster: MakeCluster, shared_memory: str, policy: str
) -> None:
    """Each of ten pushes is overwritten at once; sums of what was given have no trace of it."""

    async def work(kv: aiokv.Client) -> None:
        await kv.set_optimizer("accumulate")
        await kv.init(full(0))
        given = full(0)
        for step in range(10):
            for array in given.values():
                array.fill(step + kv.rank)
            await kv.push(given)
            for array in given.values():
                array.fill(np.nan)
        await kv.barrier("pushed")
        # 0 + 1 + ... + 9, and the same with 1 more each time.
        assert_full(await kv.pull(list(SIZES)), 45 + 55)

    async with cluster(workers=2, policy=policy, shared_memory=shared_memory, **CUT) as running:
        await running.each(work)


async def test_arrays_that_only_the_call_refers_to_live_until_it_ends(cluster: MakeCluster) -> None:
    """Horovod frees a tensor right after the call was made; here ten rounds are in flight, and memory is used anew."""

    async def work(kv: aiokv.Client) -> None:
        await kv.init(full(0))
        calls = [asyncio.create_task(kv.pushpull(full(10**step * (kv.rank + 1)))) for step in range(4)]
        await asyncio.sleep(0)
        gc.collect()
        for _ in range(4):
            assert_full(full(np.nan).values(), np.nan)
        for step, call in enumerate(calls):
            assert_full(await call, 3 * 10**step)

    async with cluster(workers=2, **CUT) as running:
        await running.each(work)


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
async def test_what_was_received_is_the_caller_s_own(cluster: MakeCluster, shared_memory: str) -> None:
    """Writing into it changes neither the servers' value nor what others have received."""

    async def work(kv: aiokv.Client) -> None:
        await kv.init(full(1))
        for step in range(3):
            results = [await kv.pushpull(full(1)), await kv.pull(list(SIZES)), await kv.pull(list(SIZES))]
            for i, arrays in enumerate(results):
                assert_full(arrays, 2)
                for array in arrays:
                    array.fill(kv.rank - i - step - 7)
            await kv.barrier(f"spoilt {step}")
            assert_full(await kv.pull(list(SIZES)), 2)

    async with cluster(workers=2, shared_memory=shared_memory, **CUT) as running:
        await running.each(work)


async def test_the_values_given_to_init_are_the_caller_s_own_again(cluster: MakeCluster) -> None:
    async def work(kv: aiokv.Client) -> None:
        given = full(5)
        await kv.init(given)
        for array in given.values():
            array.fill(np.nan)
        assert_full(await kv.pull(list(SIZES)), 5)

    async with cluster(workers=2, **CUT) as running:
        await running.each(work)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "a part": lambda base: base[3:203, 5:105],
    "every second row": lambda base: base[10:410:2, :100],
    "every second column": lambda base: base[:200, 1:201:2],
    "transposed": lambda base: base[:100, :200].T,
    "backwards": lambda base: base[399:199:-1, 250:150:-1],
    "in Fortran's order": lambda base: np.asfortranarray(base[:200, :100]),
    "a subclass": lambda base: base[:200, :100].view(np.memmap),
}
"""Arrays of shape (200, 100) that do not lie in one piece, from one of shape (420, 300)."""


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
async def test_views_are_sent_and_received_into_and_what_is_around_them_stays(
    cluster: MakeCluster, view: Callable[[Any], Any]
) -> None:
    async def work(kv: aiokv.Client) -> None:
        await kv.init("w", np.zeros((200, 100), "float32"))
        numbers = np.arange(20_000, dtype="float32").reshape(200, 100)
        source, base = view(np.full((420, 300), -1, "float32")), np.full((420, 300), -1, "float32")
        source[...] = numbers
        out = view(base)
        assert await kv.pushpull("w", source, out=out) is out
        np.testing.assert_array_equal(out, 2 * numbers)
        np.testing.assert_array_equal(source, numbers)
        out[...] = -1
        assert await kv.pull("w", out) is out
        np.testing.assert_array_equal(out, 2 * numbers)
        out[...] = -1
        np.testing.assert_array_equal(base, np.full((420, 300), -1))

    async with cluster(workers=2, **CUT) as running:
        await running.each(work)


def _read_only(size: int) -> Any:
    array = np.full(size, 5, "float32")
    array.flags.writeable = False
    return array


OUTS: dict[str, Callable[[int], Any]] = {
    "read-only": _read_only,
    "repeated": lambda size: np.broadcast_to(np.full(1, 5, "float32"), (size,)),
    "another byte order": lambda size: np.full(size, 5, ">f4"),
    "longer": lambda size: np.full(size + 1, 5, "float32"),
    "two dimensions": lambda size: np.full((size, 1), 5, "float32"),
    "another dtype": lambda size: np.full(size, 5, "int32"),
    "wider": lambda size: np.full(size, 5, "float64"),
    "a list of numbers": lambda size: [5.0] * size,
    "a list of arrays that differ": lambda size: [np.full(size, 5, "float32"), np.full(size, 5, "float64")],
    "bytes": lambda size: bytearray(4 * size),
}


@pytest.mark.parametrize("key", ["small", "chunks"])
@pytest.mark.parametrize("make", OUTS.values(), ids=OUTS)
async def test_what_can_not_be_received_into_is_an_error_and_stays(
    cluster: MakeCluster, make: Callable[[int], Any], key: str
) -> None:
    """On every rank, before anything is pushed: the next round is that of two good pushes."""
    size = SIZES[key]

    async def work(kv: aiokv.Client) -> None:
        await kv.init(key, np.zeros(size, "float32"))
        ones = np.ones(size, "float32")
        out = make(size)
        for call in (kv.pull(key, out), kv.pushpull(key, ones, out=out), kv.pushpull(key, out=out, value=ones)):
            with pytest.raises(SpecMismatchError, match=f"'{key}'"):
                await call
        for array in out if isinstance(out, list) else [out]:
            assert np.all(np.asarray(array) == (0 if isinstance(array, bytearray) else 5))
        np.testing.assert_array_equal(await kv.pushpull(key, ones), 2 * ones)

    async with cluster(workers=2, **CUT) as running:
        await running.each(work)


async def test_arrays_that_trade_places_in_one_call(cluster: MakeCluster) -> None:
    """The new value of each goes where the other one lay: what is still to be sent must not be written over."""
    size = 2_000_000
    async with cluster(workers=1, servers=2, shared_memory="off") as running:
        (kv,) = running.workers
        await kv.init({"a": np.zeros(size, "float32"), "b": np.zeros(size, "float32")})
        for _ in range(2):
            a, b = np.full(size, 1, "float32"), np.full(size, 2, "float32")
            await kv.pushpull({"a": a, "b": b}, out={"a": b, "b": a})
            np.testing.assert_array_equal(b, np.full(size, 1))
            np.testing.assert_array_equal(a, np.full(size, 2))


async def test_a_value_that_is_received_one_place_further(cluster: MakeCluster) -> None:
    size = 2_000_000
    async with cluster(workers=1, servers=2, shared_memory="off") as running:
        (kv,) = running.workers
        await kv.init("w", np.zeros(size, "float32"))
        for _ in range(2):
            base = np.arange(size + 1, dtype="float32")
            await kv.pushpull("w", base[:-1], out=base[1:])
            np.testing.assert_array_equal(base[1:], np.arange(size))
