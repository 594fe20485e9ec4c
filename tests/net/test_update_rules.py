"""Update rules that look beyond the elements of one chunk, over real sockets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import OptimizerError, ServerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.net.conftest import MakeCluster

SIZE = 30_001
SHAPE = (SIZE,)
ROUNDS = 4


def start() -> Any:
    return np.random.default_rng(7).standard_normal(SIZE).astype(np.float32)


def gradients(rank: int) -> list[Any]:
    generator = np.random.default_rng(rank + 1)
    return [generator.standard_normal(SIZE).astype(np.float32) for _ in range(ROUNDS)]


def sums() -> list[Any]:
    """Return what each round's gradients of two workers add up to."""
    return [np.float64(a + b) for a, b in zip(gradients(0), gradients(1), strict=True)]


def lars(w: Any) -> Any:
    """You et al. 2017, algorithm 1."""
    v = np.zeros(SIZE)
    for g in sums():
        rate = 0.01 * np.linalg.norm(w) / (np.linalg.norm(g) + 0.05 * np.linalg.norm(w) + 1e-8)
        v = 0.9 * v + 0.5 * rate * (g + 0.05 * w)
        w = w - v
    return w


def lamb(w: Any) -> Any:
    """You et al. 2020, algorithm 2."""
    m, s = np.zeros(SIZE), np.zeros(SIZE)
    for t, g in enumerate(sums(), 1):
        m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * g**2
        r = m / (1 - 0.9**t) / (np.sqrt(s / (1 - 0.999**t)) + 1e-6) + 0.05 * w
        w = w - 0.01 * np.linalg.norm(w) / np.linalg.norm(r) * r
    return w


def lans(w: Any) -> Any:
    """Zheng et al. 2020, algorithm 2."""
    m, s = np.zeros(SIZE), np.zeros(SIZE)
    for t, total in enumerate(sums(), 1):
        g = total / np.linalg.norm(total)
        m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * g**2
        root = np.sqrt(s / (1 - 0.999**t)) + 1e-6
        a, b = m / (1 - 0.9**t) / root + 0.05 * w, g / root + 0.05 * w
        size = np.linalg.norm(w)
        w = w - 0.01 * (0.9 * size / np.linalg.norm(a) * a + 0.1 * size / np.linalg.norm(b) * b)
    return w


RULES: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "lars": ({"learning_rate": 0.5, "momentum": 0.9, "eta": 0.01, "wd": 0.05}, lars),
    "lamb": ({"learning_rate": 0.01, "wd": 0.05}, lamb),
    "lans": ({"learning_rate": 0.01, "wd": 0.05}, lans),
}

each_rule = pytest.mark.parametrize("rule", list(RULES))


async def train(kv: aiokv.Client, rule: str) -> Any:
    await kv.init("w", start())
    await kv.set_optimizer(rule, **RULES[rule][0])
    for gradient in gradients(kv.rank):
        value = await kv.pushpull("w", gradient)
    return value


@each_rule
async def test_norms_are_those_of_a_tensor_that_lies_on_three_servers(cluster: MakeCluster, rule: str) -> None:
    runs = []
    for _ in range(2):
        async with cluster(workers=2, servers=3, chunk_bytes=16384, split_bytes=1000) as running:
            runs += await running.each(lambda kv: train(kv, rule))
            assert all(server.counters["updates"] for server in running.servers)
    np.testing.assert_allclose(runs[0], RULES[rule][1](start().astype(np.float64)), rtol=2e-4, atol=2e-6)
    assert len({run.tobytes() for run in runs}) == 1, "the same bits for every worker, in every run"


async def test_norms_of_a_tensor_on_servers_inside_workers(settings: dict[str, Any], cluster: MakeCluster) -> None:
    settings |= {"chunk_bytes": 16384, "split_bytes": 1000}
    async with aiokv.Scheduler(num_workers=2, num_servers=2, bind_port=0, **settings) as scheduler:
        workers = [
            aiokv.connect(scheduler.address, name=f"worker-{rank}", colocate=True, **settings) for rank in range(2)
        ]
        await asyncio.gather(*(kv.start() for kv in workers))
        here = await asyncio.gather(*(train(kv, "lamb") for kv in workers))
        await asyncio.gather(*(kv.close() for kv in workers))
    async with cluster(workers=2, servers=2, chunk_bytes=16384, split_bytes=1000) as running:
        there = await running.each(lambda kv: train(kv, "lamb"))
    assert len({value.tobytes() for value in [*here, *there]}) == 1


async def test_servers_connect_to_each_other_when_a_rule_needs_it(cluster: MakeCluster) -> None:
    async with cluster(workers=1, servers=2, split_bytes=1000) as running:
        (kv,) = running.workers
        await kv.init("w", start())
        await kv.pushpull("w", start())
        assert not [peer for server in running.servers for peer in server._links if peer < -1]
        await kv.set_optimizer("lars")
        await kv.pushpull("w", start())
        assert len([peer for server in running.servers for peer in server._links if peer < -1]) == 1


async def test_async_rule_with_norms_updates_cut_keys_in_one_order(cluster: MakeCluster) -> None:
    """Two pushes of one worker, so the order is known; each update has the norms of the whole tensor."""
    finals = []
    for policy, split_bytes in (("k_async:1", 1000), ("asp", 10**6)):
        async with cluster(workers=1, servers=2, policy=policy, split_bytes=split_bytes) as running:
            (kv,) = running.workers
            await kv.set_optimizer("lars", momentum=0.0, learning_rate=0.5)
            await kv.init("w", start())
            await kv.pushpull("w", start())
            finals.append(await kv.pushpull("w", start()))
    np.testing.assert_allclose(finals[0], finals[1], rtol=1e-6)


async def test_async_rule_with_norms_wants_whole_keys(cluster: MakeCluster) -> None:
    async with cluster(workers=1, servers=2, policy="asp", split_bytes=1000) as running:
        (kv,) = running.workers
        await kv.init({"w": start(), "b": np.ones(3, np.float32)})
        with pytest.raises(
            OptimizerError, match=r"'lamb' needs norms of all of key 'w'.*split_bytes.*or use policy bsp"
        ):
            await kv.set_optimizer("lamb")
    async with cluster(workers=1, servers=2, policy="asp", split_bytes=10**6) as running:
        (kv,) = running.workers
        await kv.set_optimizer("lars", momentum=0.0, wd=0.0, learning_rate=0.5, eta=0.25)
        await kv.init("w", np.full(4, 2, np.float32))
        # The norm of w is 4, that of g is 2: w - 0.5 * 0.25 * 4 / 2 * g.
        np.testing.assert_allclose(await kv.pushpull("w", np.ones(4, np.float32)), np.full(4, 1.75), rtol=1e-6)


async def test_rule_by_row_wants_rows_that_are_not_cut(cluster: MakeCluster) -> None:
    """4 rows can't be spread evenly over 3 servers; whole on one server they can be used."""
    value = np.zeros((4, 175), np.float32)
    text = r"key 'w' with rows of 175 elements is cut inside a row.* chunk_bytes to at least 700 .*split_bytes.* 2800"
    async with cluster(workers=1, servers=3, split_bytes=1000) as running:
        (kv,) = running.workers
        await kv.init("w", value)
        with pytest.raises(OptimizerError, match=text):
            await kv.set_optimizer("groupadagrad")
    async with cluster(workers=1, servers=3, split_bytes=1000) as running:
        (kv,) = running.workers
        await kv.set_optimizer("groupadagrad")
        with pytest.raises(OptimizerError, match=text):
            await kv.init("w", value)
    async with cluster(workers=1, servers=3, split_bytes=2801) as running:
        (kv,) = running.workers
        await kv.init("w", value)
        await kv.set_optimizer("groupadagrad")


async def test_rule_by_row_on_a_large_key_has_the_same_bits_on_one_server_and_on_three(cluster: MakeCluster) -> None:
    """Under the default settings, 1.2 MB: cut over the servers, and into chunks."""
    rng = np.random.default_rng(5)
    first = rng.standard_normal((3000, 100)).astype(np.float32)
    gradients = rng.standard_normal((3, 2, *first.shape)).astype(np.float32)

    async def train_by_row(kv: aiokv.Client) -> list[Any]:
        await kv.init("w", first)
        await kv.set_optimizer("groupadagrad", learning_rate=0.1)
        return [await kv.pushpull("w", turn[kv.rank]) for turn in gradients]

    finals = []
    for servers in (1, 3):
        async with cluster(workers=2, servers=servers) as running:
            finals.append(await running.each(train_by_row))
            assert all(server.store._chunks for server in running.servers)
    np.testing.assert_array_equal(finals[0], finals[1])


async def test_rule_by_row_on_rows_over_three_servers_and_in_bundles(cluster: MakeCluster) -> None:
    """One history a row: the mean of the squares of its gradients (MXNet's group_adagrad)."""
    generator = np.random.default_rng(3)
    values = {
        "big": generator.standard_normal((90, 7)).astype(np.float32),
        "matrix": generator.standard_normal((2, 3)).astype(np.float32),
        "vector": generator.standard_normal(5).astype(np.float32),
    }
    expected = {}
    for name, g in values.items():
        history, weight = np.zeros((len(g), 1)), np.ones((len(g), g.size // len(g)))
        for _ in range(3):
            flat = np.float64(g).reshape(len(g), -1)
            history += (flat**2).mean(axis=1, keepdims=True)
            weight -= 0.1 * flat / (np.sqrt(history) + 1e-6)
        expected[name] = weight.reshape(g.shape)
    async with cluster(workers=1, servers=3, split_bytes=1000) as running:
        (kv,) = running.workers
        await kv.init({name: np.ones_like(value) for name, value in values.items()})
        await kv.set_optimizer("groupadagrad", learning_rate=0.1)
        for _ in range(2):
            await kv.push(values)
        # Alone, so that a bundle is divided with its histories.
        for name, value in values.items():
            np.testing.assert_allclose(await kv.pushpull(name, value), expected[name], rtol=1e-5)


async def test_multipliers_of_single_keys_hold_in_a_bundle(cluster: MakeCluster) -> None:
    """By hand: w = 1, g = 1, rate 0.1, wd 0.5: 1 - 0.1 * lr_mult * (1 + 0.5 * wd_mult)."""
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init({name: np.ones(2, np.float32) for name in ("a", "b", "c")})
        await kv.set_optimizer("sgd", learning_rate=0.1, wd=0.5, lr_mult={"a": 2.0}, wd_mult={"b": 0.0})
        got = await kv.pushpull({name: np.ones(2, np.float32) for name in ("a", "b", "c")})
    np.testing.assert_allclose(np.array(got)[:, 0], [0.7, 0.9, 0.85], rtol=1e-6)


async def test_norms_of_keys_in_a_bundle_are_their_own(cluster: MakeCluster) -> None:
    """By hand: w - 0.5 * 0.25 * |w| / |g| * g with w = 2 and g = 1 everywhere is 1.75, with w = 4 it is 3.5."""
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init({"a": np.full(4, 2, np.float32), "b": np.full(9, 4, np.float32)})
        await kv.set_optimizer("lars", momentum=0.0, wd=0.0, learning_rate=0.5, eta=0.25)
        a, b = await kv.pushpull({"a": np.ones(4, np.float32), "b": np.ones(9, np.float32)})
    np.testing.assert_allclose(a, np.full(4, 1.75), rtol=1e-6)
    np.testing.assert_allclose(b, np.full(9, 3.5), rtol=1e-6)


async def test_noise_of_a_key_is_the_same_in_a_bundle_and_alone(cluster: MakeCluster) -> None:
    async def sample(*, together: bool) -> Any:
        async with cluster(workers=1) as running:
            (kv,) = running.workers
            values = {name: np.zeros(3, np.float32) for name in ("a", "b")}
            for group in [values] if together else [{name: value} for name, value in values.items()]:
                await kv.init(group)
            await kv.set_optimizer("sgld", seed=5)
            return await kv.pushpull(values)

    together, apart = await sample(together=True), await sample(together=False)
    np.testing.assert_array_equal(together, apart)
    assert not np.array_equal(together[0], together[1])


async def test_delay_is_compensated_by_what_each_worker_had_read(cluster: MakeCluster) -> None:
    """Worker 0 pushes .5 three times and reads each value, then 1 pushes, who has the first one (MXNet's dcasgd)."""
    async with cluster(workers=2, policy="asp") as running:
        first, second = running.workers
        await running.each(lambda kv: kv.init("w", np.ones(1)))
        await running.each(lambda kv: kv.set_optimizer("dcasgd", learning_rate=0.1, lamda=0.04, momentum=0.0))
        got = [float((await first.pushpull("w", np.full(1, 0.5)))[0]) for _ in range(3)]
        got.append(float((await second.pushpull("w", np.full(1, 0.5)))[0]))
        np.testing.assert_allclose(got, [0.95, 0.9, 0.85, 0.80015], rtol=1e-12)
        # Now both have read what is there, so nothing older is kept.
        await first.pull("w")
        for kv in (first, second):
            await kv.pushpull("w", np.full(1, 0.5))
        (stored,) = running.servers[0].store._chunks.values()
        assert len(stored.earlier) <= 2


async def test_delays_of_the_contributions_to_a_sum_are_compensated_one_by_one(cluster: MakeCluster) -> None:
    """Worker 2 still has the first value: 1 - 0.1 * (0.5 + 0.5), then g + 0.04 g g (0.9 - 1) of its gradient."""
    async with cluster(workers=3, policy="k_async:2") as running:
        one, two, three = running.workers
        await running.each(lambda kv: kv.init("w", np.ones(1)))
        await running.each(lambda kv: kv.set_optimizer("dcasgd", learning_rate=0.1, lamda=0.04, momentum=0.0))
        await asyncio.gather(one.pushpull("w", np.full(1, 0.5)), two.pushpull("w", np.full(1, 0.5)))
        got, _ = await asyncio.gather(one.pushpull("w", np.full(1, 0.5)), three.push("w", np.full(1, 0.25)))
        expected = 0.9 - 0.1 * (0.5 + 0.25 + 0.04 * 0.25 * 0.25 * (0.9 - 1.0))
        np.testing.assert_allclose(got, [expected], rtol=1e-12)


async def test_sync_rule_that_reads_weights_keeps_none(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init("w", np.ones(1)))
        await running.each(lambda kv: kv.set_optimizer("dcasgd", learning_rate=0.1, lamda=0.04, momentum=0.0))
        for _ in range(3):
            await running.each(lambda kv: kv.push("w", np.full(1, 0.25)))
        np.testing.assert_allclose(await running.workers[0].pull("w"), [0.85], rtol=1e-12)
        (stored,) = running.servers[0].store._chunks.values()
        assert not stored.earlier


async def test_server_that_dies_while_norms_are_gathered_is_named(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=3, split_bytes=1000) as running:
        first, second = running.workers
        await running.each(lambda kv: train(kv, "lamb"))
        pushes = [asyncio.create_task(kv.push("w", start())) for kv in (first, second)]
        await running.servers[1].close()
        for push in pushes:
            with pytest.raises(ServerLostError, match=r"server 1 .*server-1"):
                await push
        with pytest.raises(ServerLostError, match="server 1"):
            await first.push("w", start())


async def test_a_rule_that_one_server_cannot_have_is_set_on_none(cluster: MakeCluster) -> None:
    """The key that can't have it is another worker's, on one of two servers."""
    async with cluster(workers=2, servers=2) as running:
        first, second = running.workers
        await second.init("count", np.zeros(3, np.int64), group=[1])
        text = r"server . \(server-.*\) can't have that, so it holds on no server: .*'count' has int64: make it floats"
        with pytest.raises(OptimizerError, match=text):
            await first.set_optimizer("sgd", learning_rate=0.5)
        names = [f"w{number}" for number in range(16)]
        await first.init({name: np.zeros(3) for name in names}, group=[0])
        values = await first.pushpull({name: np.ones(3) for name in names})
        assert all((value == 1.0).all() for value in values), "pushes become values as long as there is no rule"
