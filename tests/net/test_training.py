"""What a training loop relies on: the right values, in sync and in async, over real sockets."""

from __future__ import annotations

import asyncio
import functools
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.errors import AlreadyInitializedError, KeyUseError, OptimizerError, SpecMismatchError, UnknownKeyError

if TYPE_CHECKING:
    import aiokv
    from tests.net.conftest import MakeCluster


def full(shape: tuple[int, ...], value: float, dtype: str = "float32") -> Any:
    return np.full(shape, value, dtype)


def pushpull(kv: aiokv.Client, value: Any) -> Any:
    return kv.pushpull("w", value)


async def test_sync_assigns_the_sum_of_all_ranks(cluster: MakeCluster) -> None:
    async with cluster(workers=3, servers=2) as running:
        await running.each(lambda kv: kv.init({"w": full((2, 3), 0), "b": full((3,), 0)}))
        results = await running.each(
            lambda kv: kv.pushpull({"w": full((2, 3), kv.rank + 1), "b": full((3,), 10 * kv.rank)})
        )
    for w, b in results:
        np.testing.assert_array_equal(w, full((2, 3), 6))
        np.testing.assert_array_equal(b, full((3,), 30))


async def test_rank_0_initial_values_win_and_the_others_wait_for_them(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        root, other = running.workers
        waiting = asyncio.create_task(other.init("w", full((4,), 99)))
        # A round trip on the same connection: the init has arrived.
        await other.set_optimizer("assign")
        assert not waiting.done()
        await root.init("w", full((4,), 7))
        await waiting
        np.testing.assert_array_equal(await other.pull("w"), full((4,), 7))


async def test_scenario_9_pull_after_a_push_that_was_not_awaited_returns_the_new_round(cluster: MakeCluster) -> None:
    """Scenario 9: 0 pushes, then pulls at once; 1 pushes later."""
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init("w", full((1,), 0)))
        first, second = running.workers
        push = asyncio.create_task(first.push("w", full((1,), 1)))
        pull = asyncio.create_task(first.pull("w"))
        np.testing.assert_array_equal(await second.pull("w"), full((1,), 0))
        assert not pull.done()
        await second.push("w", full((1,), 2))
        await push
        np.testing.assert_array_equal(await pull, full((1,), 3))


async def test_ranks_are_counted_not_requests(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init("w", full((1,), 0)))
        first, second = running.workers
        pushes = [asyncio.create_task(first.pushpull("w", full((1,), value))) for value in (1, 100)]
        np.testing.assert_array_equal(await second.pushpull("w", full((1,), 2)), full((1,), 3))
        assert not pushes[1].done()
        np.testing.assert_array_equal(await second.pushpull("w", full((1,), 200)), full((1,), 300))
        np.testing.assert_array_equal([await push for push in pushes], [[3], [300]])


async def test_scenario_48_sums_have_the_same_bits_in_every_order_of_arrival(cluster: MakeCluster) -> None:
    """Scenario 48: in float32, (1e8 + 1) - 1e8 = 0 in rank order; other orders give 1."""
    values = [1e8, 1.0, -1e8]
    async with cluster(workers=3) as running:
        await running.each(lambda kv: kv.init("w", full((1,), 5)))
        sums = []
        for order in itertools.permutations(range(3)):
            pending = []
            for position, rank in enumerate(order):
                pending.append(asyncio.create_task(running.workers[rank].pushpull("w", full((1,), values[rank]))))
                # A round trip on the same connection: the push has arrived before the next rank pushes.
                if position < 2:
                    await running.workers[rank].set_optimizer("assign")
            sums += [float(value[0]) for value in await asyncio.gather(*pending)]
    assert sums == [0.0] * 18


@pytest.mark.parametrize("servers", [1, 3])
async def test_large_tensors_come_back_whole(cluster: MakeCluster, servers: int) -> None:
    generator = np.random.default_rng(3)
    parts = [generator.standard_normal((1031, 701), dtype=np.float32) for _ in range(2)]
    async with cluster(workers=2, servers=servers, chunk_bytes=65536, split_bytes=1000) as running:
        await running.each(lambda kv: kv.init("w", np.zeros((1031, 701), np.float32)))
        results = await running.each(lambda kv: kv.pushpull("w", parts[kv.rank]))
        held = [server.counters["updates"] for server in running.servers]
    for result in results:
        np.testing.assert_array_equal(result, parts[0] + parts[1])
    assert max(held) - min(held) <= 1


@pytest.mark.parametrize("shape", [(), (0, 5), (1,), (2, 0, 3)])
async def test_scenario_32_shapes_without_or_with_one_element(cluster: MakeCluster, shape: tuple[int, ...]) -> None:
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init("w", full(shape, 1)))
        for value in await running.each(lambda kv: kv.pushpull("w", full(shape, kv.rank + 1))):
            assert value.shape == shape
            np.testing.assert_array_equal(value, full(shape, 3))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint64"])
async def test_dtypes(cluster: MakeCluster, dtype: str) -> None:
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init("w", full((3,), 1, dtype)))
        for value in await running.each(lambda kv: kv.pushpull("w", full((3,), 20 * (kv.rank + 1), dtype))):
            assert value.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(value, full((3,), 60, dtype))


async def test_big_endian_and_strided_arrays_are_sent_by_value(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init("w", np.arange(6, dtype=">f4").reshape(2, 3))
        out = np.zeros((3, 2), np.float32).T
        assert await kv.pull("w", out) is out
        np.testing.assert_array_equal(out, [[0, 1, 2], [3, 4, 5]])
        np.testing.assert_array_equal(await kv.pushpull("w", np.ones((3, 2), np.float32).T), np.ones((2, 3)))


async def test_out_may_be_the_pushed_array(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init("w", full((500_000,), 0)))

        async def in_place(kv: aiokv.Client) -> Any:
            array = full((500_000,), kv.rank + 1)
            assert await kv.pushpull("w", array, out=array) is array
            return array

        for array in await running.each(in_place):
            np.testing.assert_array_equal(array, full((500_000,), 3))


async def test_a_pushed_array_is_not_written_by_a_later_pull(cluster: MakeCluster) -> None:
    """MXNet 1.9.1 keeps the array of a push, and a pull of the same key overwrites it."""
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init("w", full((3,), 0)))
        pushed, out = full((3,), 1), full((3,), -1)
        await running.each(lambda kv: kv.push("w", pushed))
        await running.each(lambda kv: kv.pull("w", out=out))
        np.testing.assert_array_equal(out, full((3,), 2))
        np.testing.assert_array_equal(pushed, full((3,), 1))


async def test_results_follow_the_order_of_the_dict(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init({"a": full((1,), 1), "b": full((2,), 2)})
        b, a = await kv.pull({"b": None, "a": None})
        assert (a.shape, b.shape) == ((1,), (2,))


async def test_scenario_5_async_applies_each_push_at_once(cluster: MakeCluster) -> None:
    """Scenario 5: one worker leaves, the other goes on; nothing is lost."""
    async with cluster(workers=2, policy="asp") as running:
        await running.each(lambda kv: kv.init("w", full((1,), 0)))
        await running.each(lambda kv: kv.set_optimizer("sgd", learning_rate=1.0, rescale_grad=-1.0))
        first, second = running.workers
        await first.push("w", full((1,), 1))
        await first.close()
        for _ in range(5):
            await second.push("w", full((1,), 1))
        np.testing.assert_array_equal(await second.pull("w"), full((1,), 6))


async def test_a_worker_that_left_is_not_waited_for(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init("w", full((1,), 0)))
        first, second = running.workers
        open_round = asyncio.create_task(second.pushpull("w", full((1,), 7)))
        await first.close()
        np.testing.assert_array_equal(await open_round, full((1,), 7))
        await second.barrier()


async def test_sgd_with_momentum_and_weight_decay(cluster: MakeCluster) -> None:
    """Golden trace of MXNet's rule: w0 = 1, gradients .5, .5, -.25, lr .1, momentum .9, wd .01."""
    async with cluster(workers=2, servers=2, split_bytes=1) as running:
        await running.each(lambda kv: kv.init("w", full((4,), 1, "float64")))
        await running.each(lambda kv: kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9, wd=0.01))
        seen = []
        for gradient in (0.5, 0.5, -0.25):
            half = full((4,), gradient / 2, "float64")
            value, _ = await running.each(functools.partial(pushpull, value=half))
            seen.append(value[0])
    np.testing.assert_allclose(seen, [0.949, 0.852151, 0.789134749], rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
async def test_mxnet_dist_sync_sequence(cluster: MakeCluster, dtype: str) -> None:
    """Seven workers push r + 1, seven rounds, rule w += 2 * sum: MXNet's own nightly test."""
    async with cluster(workers=7, servers=3) as running:
        await running.each(lambda kv: kv.init("3", full((2, 3), 1, dtype)))
        await running.each(lambda kv: kv.set_optimizer("sgd", learning_rate=2.0, rescale_grad=-1.0))
        seen = []
        for _ in range(7):
            values = await running.each(lambda kv: kv.pushpull("3", full((2, 3), kv.rank + 1, dtype)))
            assert all((value == values[0]).all() for value in values)
            seen.append(float(values[0][0, 0]))
    assert seen == [57, 113, 169, 225, 281, 337, 393]


async def test_many_calls_in_flight(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=2) as running:
        names = [f"k{i}" for i in range(100)]
        await running.each(lambda kv: kv.init({name: full((10,), 0) for name in names}))

        async def all_at_once(kv: aiokv.Client) -> list[Any]:
            return await asyncio.gather(*(kv.pushpull(name, full((10,), i)) for i, name in enumerate(names)))

        for values in await running.each(all_at_once):
            for i, value in enumerate(values):
                np.testing.assert_array_equal(value, full((10,), 2 * i))


async def test_scenario_49_names_decide_ranks_whatever_the_order_of_arrival(cluster: MakeCluster) -> None:
    """Scenario 49; worker-10 comes after worker-9."""
    async with cluster(workers=11, start_workers=False) as running:
        clients = [running.client(f"worker-{i}") for i in reversed(range(11))]
        await asyncio.gather(*(client.start() for client in clients))
        assert [client.rank for client in clients] == list(reversed(range(11)))
        assert {client.num_workers for client in clients} == {11}
        await asyncio.gather(*(client.close() for client in clients))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda kv: kv.push("w", full((6,), 1)), SpecMismatchError, ["'w'", "float32[2, 3]", "float32[6]"]),
        (lambda kv: kv.push("w", full((2, 3), 1, "float64")), SpecMismatchError, ["'w'", "float64"]),
        (lambda kv: kv.pull("w", full((3, 2), 1)), SpecMismatchError, ["'w'", "float32[3, 2]"]),
        (lambda kv: kv.pull("w", [0.0] * 6), SpecMismatchError, ["'w'", "list"]),
        (lambda kv: kv.push("nope", full((1,), 1)), UnknownKeyError, ["'nope'", "init"]),
        (lambda kv: kv.pull("nope", full((1,), 1), timeout=1.0), UnknownKeyError, ["'nope'"]),
        (lambda kv: kv.pull("nope"), KeyUseError, ["'nope'", "out"]),
        (lambda kv: kv.push(7, full((1,), 1)), KeyUseError, ["7", "int", "str"]),
        (lambda kv: kv.push({"w": full((2, 3), 1), 7: full((1,), 1)}), KeyUseError, ["7", "never mix"]),
        (lambda kv: kv.push(True, full((1,), 1)), KeyUseError, ["bool"]),
        (lambda kv: kv.init("w", full((2, 3), 2)), AlreadyInitializedError, ["'w'"]),
        (lambda kv: kv.init("t", np.array(["text"])), SpecMismatchError, ["'t'", "str", "float32"]),
        (lambda kv: kv.set_optimizer("nope"), OptimizerError, ["'nope'", "sgd"]),
        (lambda kv: kv.set_optimizer("sgd", learning_rate="fast"), OptimizerError, ["learning_rate"]),
        (lambda kv: kv.pushpull({"w": full((2, 3), 1)}, out={"v": full((2, 3), 1)}), KeyUseError, ["'w'", "'v'"]),
    ],
)
async def test_a_mistake_is_an_error_at_the_caller_and_the_server_lives_on(
    cluster: MakeCluster, call: Any, error: type[Exception], words: list[str]
) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init("w", full((2, 3), 1))
        with pytest.raises(error) as caught:
            await call(kv)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        np.testing.assert_array_equal(await kv.pushpull("w", full((2, 3), 5)), full((2, 3), 5))
        assert running.servers[0].store.open_slots == 0


async def test_a_shape_that_only_another_worker_knows_is_refused_by_the_server(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        root, other = running.workers
        await root.init("w", full((2, 3), 1))
        with pytest.raises(SpecMismatchError, match=r"'w' has float32\[2, 3\], got float32\[6\]"):
            await other.push("w", full((6,), 1))
        with pytest.raises(SpecMismatchError, match="'w'"):
            await other.init("w", full((6,), 1))
        with pytest.raises(KeyUseError, match="never mix"):
            await other.push(1, full((6,), 1))


async def test_the_same_optimizer_can_be_set_twice_but_not_another(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=2) as running:
        await running.each(lambda kv: kv.set_optimizer("sgd", learning_rate=0.1))
        with pytest.raises(OptimizerError, match=r"learning_rate=0\.1.*learning_rate=0\.2"):
            await running.workers[0].set_optimizer("sgd", learning_rate=0.2)


async def test_scenario_24_keys_of_64_bits_are_different_keys(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init({2: full((1,), 1), 2**32 + 2: full((1,), 2), 2**63 - 1: full((1,), 3)})
        assert [float(v[0]) for v in await kv.pull({2: None, 2**32 + 2: None, 2**63 - 1: None})] == [1, 2, 3]


async def test_small_keys_go_together_however_the_workers_use_them(cluster: MakeCluster) -> None:
    """Two workers push all keys in one call, the third one by one and in another order; the servers keep momentum."""
    names = [f"k{i}" for i in range(50)]
    expected = 1.0
    momentum = 0.0
    async with cluster(workers=3, servers=2) as running:
        await running.each(lambda kv: kv.init({name: full((i % 7 + 1,), 1) for i, name in enumerate(names)}))
        await running.each(lambda kv: kv.set_optimizer("sgd", learning_rate=0.25, momentum=0.5))

        async def step(kv: aiokv.Client, *, alone: bool) -> list[Any]:
            gradients = {name: full((i % 7 + 1,), kv.rank) for i, name in enumerate(names)}
            if not alone:
                return list(await kv.pushpull(gradients))
            backwards = names[::-1]
            values = await asyncio.gather(*(kv.pushpull(name, gradients[name]) for name in backwards))
            return values[::-1]

        for number in range(4):
            momentum = 0.5 * momentum - 0.25 * 3
            expected += momentum
            results = await asyncio.gather(*(step(kv, alone=kv.rank == 2 and number >= 2) for kv in running.workers))
            for values in results:
                for i, value in enumerate(values):
                    np.testing.assert_array_equal(value, full((i % 7 + 1,), expected))
        assert all(server.store.open_slots == 0 for server in running.servers)


async def test_keys_of_a_bundle_that_nobody_waits_for_any_longer_are_not_written(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        first, second = running.workers
        await running.each(lambda kv: kv.init({name: full((3,), 0) for name in "abc"}))
        outs = {name: full((3,), -1) for name in "abc"}
        call = asyncio.create_task(first.pushpull({name: full((3,), 1) for name in "abc"}, out=outs))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await second.push({name: full((3,), 2) for name in "abc"})
        for value in await first.pull(dict.fromkeys("abc")):
            np.testing.assert_array_equal(value, full((3,), 3))
        assert all((out == -1).all() for out in outs.values())


async def test_scenario_36_a_small_urgent_push_is_answered_before_a_big_one_that_was_first(
    cluster: MakeCluster,
) -> None:
    async with cluster(workers=1, policy="asp") as running:
        (kv,) = running.workers
        big = full((25_000_000,), 1)
        await kv.init({"big": big, "small": full((256,), 0)})
        order: list[str] = []

        async def push(name: str, array: Any, priority: int) -> None:
            await kv.push(name, array, priority=priority)
            order.append(name)

        await asyncio.gather(push("big", big, -9), push("small", full((256,), 2), 0))
        assert order == ["small", "big"]
        np.testing.assert_array_equal(await kv.pull("small"), full((256,), 2))
