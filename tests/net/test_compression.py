"""Compressed gradients and values over TCP: what is sent, what is left, and what becomes of it.

The tables of MXNet's tests/nightly/dist_sync_kvstore.py are run with its numbers: 7 workers, 7 servers, w += 2 * sum.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

import aiokv
from aiokv.codec import TwoBit
from aiokv.core import stimuli as st
from aiokv.errors import CodecError, NotFiniteError, ProtocolError, UnknownKeyError
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.net.conftest import Cluster, MakeCluster

Array = NDArray[Any]

TWO_BIT = {"type": "2bit", "threshold": 0.5}
N = 7
SHAPES: dict[str, tuple[int, ...]] = {"small": (2, 3), "odd": (1211, 1211), "even": (1200, 1200)}


def full(shape: tuple[int, ...], value: float, dtype: str = "float32") -> Array:
    return np.full(shape, value, dtype)


async def set_all(running: Cluster, *args: Any, **kwargs: Any) -> None:
    await running.each(lambda kv: kv.set_gradient_compression(*args, **kwargs))


def two_bit(gradient: Array, residual: Array) -> Array:
    """Return what an independent codec says with threshold 0.5; the residual is written."""
    residual += gradient
    said = np.where(residual >= 0.5, 0.5, np.where(residual <= -0.5, -0.5, 0)).astype(np.float32)
    residual -= said
    return said


def one_bit(gradient: Array, residual: Array) -> Array:
    """Return what an independent codec says with threshold 0; the residual is written."""
    residual += gradient
    said = np.where(residual > 0, 1, -1).astype(np.float32)
    residual -= said
    return said


# --- MXNet's tables ---

TABLES: list[tuple[Any, Any, list[tuple[float, float]]]] = [
    # What every worker pushes, and what the weights are then, in units of 2 * n.
    (TWO_BIT, two_bit, [(0, 0), (0.4, 0), (0.1, 0.5), (0.2, 0.5), (0.3, 1), (0.5, 1.5)]),
    ({"type": "1bit", "threshold": 0.0}, one_bit, [(1, 1), (-1, 0), (2, 1), (0, 2), (-2, 1)]),
]


@pytest.mark.one_loop("it is about what is computed")
@pytest.mark.parametrize(("compression", "codec", "table"), TABLES, ids=["2bit", "1bit"])
async def test_tables_of_mxnet_with_7_workers_and_7_servers(
    cluster: MakeCluster, compression: Any, codec: Any, table: list[tuple[float, float]]
) -> None:
    """Its three shapes; what is initialised and pulled is never compressed; then 7 random pushes."""
    async with cluster(workers=N, servers=N) as running:
        await running.each(
            lambda kv: kv.init({f"{name}-{i}": full(shape, i) for name, shape in SHAPES.items() for i in (0, 1)})
        )
        await running.each(lambda kv: kv.set_optimizer("accumulate", rescale_grad=2))
        await set_all(running, compression)
        reader = running.workers[-1]
        for name, shape in SHAPES.items():
            np.testing.assert_array_equal(await reader.pull(f"{name}-0"), full(shape, 0))
            np.testing.assert_array_equal(await reader.pull(f"{name}-1"), full(shape, 1))
        for pushed, said in table:
            gradients = {f"{name}-0": full(shape, pushed) for name, shape in SHAPES.items()}
            await running.each(functools.partial(aiokv.Client.push, key=gradients))
            for name, shape in SHAPES.items():
                np.testing.assert_array_equal(await reader.pull(f"{name}-0"), full(shape, said * 2 * N))
        left = {key: state["residual"] for key, state in (await reader.compression_state()).items()}
        random = np.random.default_rng(3)
        for _ in range(7):
            gradients = {f"{name}-0": random.uniform(-0.6, 0.6, shape).astype("f4") for name, shape in SHAPES.items()}
            before = [await reader.pull(key) for key in gradients]
            await running.each(functools.partial(aiokv.Client.push, key=gradients))
            for (key, gradient), old in zip(gradients.items(), before, strict=True):
                said = codec(gradient.reshape(-1), left[key]).reshape(gradient.shape)
                np.testing.assert_array_equal(await reader.pull(key), old + 2 * N * said)


# --- scenario 46 ---


async def test_scenario_46_what_2bit_says(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=2) as running:
        await running.each(lambda kv: kv.init({"w": full((70_000,), 0), "a": full((2, 3), 0), "b": full((4,), 0)}))
        await running.each(lambda kv: kv.set_optimizer("accumulate"))
        await set_all(running, "2bit", threshold=0.5)
        for pushed, total in [(0.4, 0), (0.1, 0.5), (0.2, 0.5), (0.3, 1.0)]:
            values = {"w": full((70_000,), pushed), "a": full((2, 3), pushed), "b": full((4,), pushed)}
            for got in (await running.each(functools.partial(aiokv.Client.pushpull, key=values)))[0]:
                np.testing.assert_array_equal(got, np.full_like(got, 2 * total))


async def test_scenario_46_a_threshold_travels_as_the_number_that_it_is(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init("w", full((5,), 0))
        await kv.set_gradient_compression("2bit", threshold=1e-7)
        np.testing.assert_array_equal(await kv.pushpull("w", full((5,), 1e-7)), full((5,), 1e-7))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
async def test_scenario_46_other_floats_are_compressed_and_integers_are_not(cluster: MakeCluster, dtype: str) -> None:
    """0.3 is no float16: with a sum in float32, 8 * 0.3 is rounded once."""
    async with cluster(workers=8) as running:
        await running.each(lambda kv: kv.init({"w": np.zeros(3, dtype), "i": np.zeros(2, "int64")}))
        await set_all(running, "2bit", threshold=0.3)
        values = {"w": np.full(3, 0.375, dtype), "i": np.full(2, 3)}
        w, i = (await running.each(lambda kv: kv.pushpull(values)))[0]
        # The codec's threshold is a float32; the sum is made in float64 only for float64.
        said = np.full((8, 3), np.float32(0.3)).astype("float64" if dtype == "float64" else "float32")
        np.testing.assert_array_equal(w, functools.reduce(np.add, said).astype(dtype))
        np.testing.assert_array_equal(i, [24, 24])


async def test_scenario_46_a_key_is_compressed_alike_with_rows_of_others_and_without(cluster: MakeCluster) -> None:
    rows = aiokv.RowSparse([2], full((1, 2), 0.375), (4, 2))
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.set_optimizer("accumulate")
        await kv.init("w", full((3,), 0))
        await kv.init_rows("t", (4, 2))
        await set_all(running, TWO_BIT)
        said = []
        for _ in range(2):
            await kv.push({"w": full((3,), 0.375), "t": rows})
            said.append(float((await kv.pull("w"))[0]))
        assert said == [0, 0.5]
        await set_all(running, None)
        await kv.push({"w": full((3,), 1), "t": rows})
        assert (await kv.pull("w")).tolist() == [1.75] * 3, "what was left has gone with it"
        assert (await kv.row_sparse_pull("t", row_ids=[2])).values.tolist() == [[1.125] * 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
async def test_scenario_46_nan_is_told_to_who_pushed_it_and_the_residual_stays_clean(
    cluster: MakeCluster, bad: float
) -> None:
    async with cluster(workers=2) as running:
        first, second = running.workers
        await running.each(lambda kv: kv.init({"w": full((3,), 0), "v": full((3,), 0)}))
        await running.each(lambda kv: kv.set_optimizer("accumulate"))
        await set_all(running, TWO_BIT)
        await running.each(lambda kv: kv.push({"w": full((3,), 0.3), "v": full((3,), 0.3)}))
        other = asyncio.create_task(second.pushpull("w", full((3,), 0.3)))
        with pytest.raises(NotFiniteError, match=r"key 'w' has .* at element 1"):
            await first.push({"v": full((3,), 0.3), "w": np.array([0, bad, 0], np.float32)})
        np.testing.assert_array_equal(await first.pushpull("w", full((3,), 0.3)), full((3,), 1.0))
        np.testing.assert_array_equal(await other, full((3,), 1.0))
        # Nothing of the other key of that call was pushed either.
        np.testing.assert_array_equal((await first.compression_state())["v"]["residual"], full((3,), 0.3))


async def test_scenario_46_turned_off_what_is_left_goes_with_the_next_push(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=2) as running:
        await running.each(lambda kv: kv.init({"w": full((70_000,), 0), "a": full((3,), 0)}))
        await running.each(lambda kv: kv.set_optimizer("accumulate"))
        await set_all(running, TWO_BIT)
        await running.each(lambda kv: kv.push({"w": full((70_000,), 0.25), "a": full((3,), 0.75)}))
        await set_all(running, None)
        zeros = {"w": full((70_000,), 0), "a": full((3,), 0)}
        for _ in range(2):
            w, a = (await running.each(lambda kv: kv.pushpull(zeros)))[0]
            np.testing.assert_array_equal(w, full((70_000,), 0.5))
            np.testing.assert_array_equal(a, full((3,), 1.5))


# --- scenario 86 ---

EXACT: list[Any] = [
    "bf16",
    "fp8",
    "qsgd",
    {"type": "topk", "fraction": 0.1},
    {"type": "randomk", "fraction": 0.3},
]


async def rounds_until_equal(running: Cluster, *, rounds: int) -> Array:
    """Change weights in two rounds, then push zeros; return the weights of rank 0 once every worker has the same."""
    random = np.random.default_rng(8)
    zero = {"w": full((9000,), 0), "a": full((5,), 0), "b": full((6,), 0)}
    changes = [{key: random.normal(size=value.size).astype("f4") for key, value in zero.items()} for _ in range(2)]
    for step in range(rounds):
        values = changes[step] if step < len(changes) else zero
        got = await running.each(functools.partial(aiokv.Client.pushpull, key=values))
        flat = [np.concatenate(arrays) for arrays in got]
        if step >= len(changes) and all(np.array_equal(flat[0], one) for one in flat):
            await set_all(running, None)
            exact = await running.each(lambda kv: kv.pull(dict.fromkeys(zero)))
            if np.array_equal(np.concatenate(exact[0]), flat[0]):
                return flat[0]
            break
    pytest.fail("the weights differ")


@pytest.mark.parametrize("codec", EXACT, ids=str)
async def test_scenario_86_compressed_values_become_equal(cluster: MakeCluster, codec: Any) -> None:
    async with cluster(workers=2, servers=2, split_bytes=4096) as running:
        start = {"w": full((9000,), 0.1), "a": full((5,), 0.1), "b": full((6,), 0.1)}
        await running.each(lambda kv: kv.init(start))
        await running.each(lambda kv: kv.set_optimizer("accumulate"))
        await set_all(running, None, pull_compression=codec)
        # Both have a replica, and a different past.
        await running.workers[0].pull(dict.fromkeys(start))
        await rounds_until_equal(running, rounds=70)


async def test_scenario_86_it_is_off_by_default(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        weights = np.random.default_rng(1).normal(size=500).astype("f4")
        await kv.init("w", weights)
        await kv.set_gradient_compression(TWO_BIT)
        for _ in range(3):
            np.testing.assert_array_equal(await kv.pull("w"), weights)


async def test_scenario_86_a_cancelled_pull_leaves_the_replica_right(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init("w", full((50,), 0))
        await kv.set_gradient_compression(None, pull_compression={"type": "topk", "k": 20})
        await kv.pull("w")
        values = np.arange(1, 51, dtype="f4")
        await kv.push("w", values)
        pull = asyncio.create_task(kv.pull("w"))
        await asyncio.sleep(0)
        pull.cancel()
        await asyncio.gather(pull, return_exceptions=True)
        for _ in range(3):
            got = await kv.pull("w")
        np.testing.assert_array_equal(got, values)


async def test_values_with_nan_are_refused_and_the_push_counts(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init("w", full((3,), 0))
        await kv.set_gradient_compression(None, pull_compression="bf16")
        await kv.pull("w")
        with pytest.raises(NotFiniteError, match="'w'"):
            await kv.pushpull("w", full((3,), np.nan))
        np.testing.assert_array_equal(await kv.pushpull("w", full((3,), 2)), full((3,), 2))


# --- the rest ---


@pytest.mark.one_loop("it is about what is computed")
@pytest.mark.parametrize("codec", ["2bit", "1bit", "fp16", "bf16", "fp8", "topk", "randomk", "qsgd"])
async def test_all_codecs_solve_a_least_squares_problem(cluster: MakeCluster, codec: str) -> None:
    """Two workers with half of the data each, 400 rounds of gradient descent: the solution to 5 %.

    What `1bit` and `2bit` can say has a size: it has to be that of the gradients, and in the end weights swing by a
    step of that size.
    """
    params: dict[str, Any] = {
        "2bit": {"threshold": 0.25},
        "1bit": {"threshold": 0.0},
        "topk": {"fraction": 0.25},
        "randomk": {"fraction": 0.25},
    }.get(codec, {})
    random = np.random.default_rng(5)
    data, solution = random.normal(size=(200, 20)), random.normal(size=20) * 0.5
    parts = [(data[rank::2], data[rank::2] @ solution) for rank in range(2)]
    step = 0.01 if codec == "1bit" else 0.05
    async with cluster(workers=2, servers=2) as running:
        await running.each(lambda kv: kv.init("w", full((20,), 0)))
        await running.each(lambda kv: kv.set_optimizer("sgd", learning_rate=step, rescale_grad=0.5))
        await set_all(running, codec, **params)
        weights = [full((20,), 0)] * 2
        for _ in range(400):
            gradients = [(a.T @ (a @ w - b) / len(a)).astype("f4") for (a, b), w in zip(parts, weights, strict=True)]
            pairs = zip(running.workers, gradients, strict=True)
            weights = await asyncio.gather(*(kv.pushpull("w", gradient) for kv, gradient in pairs))
    assert np.linalg.norm(weights[0] - solution) < 0.05 * np.linalg.norm(solution)


@pytest.mark.parametrize("codec", [TWO_BIT, "qsgd", {"type": "topk", "k": 100}], ids=str)
async def test_cut_over_servers_is_the_same_as_uncut(cluster: MakeCluster, codec: Any) -> None:
    gradients = np.random.default_rng(2).normal(size=(3, 40_000)).astype("f4")
    seen = []
    for servers in (1, 3):
        async with cluster(workers=1, servers=servers, chunk_bytes=4096) as running:
            (kv,) = running.workers
            await kv.init("w", full((40_000,), 0))
            await kv.set_optimizer("accumulate")
            await kv.set_gradient_compression(codec)
            seen.append([(await kv.pushpull("w", gradient)).tobytes() for gradient in gradients])
    assert seen[0] == seen[1]


async def test_large_gradients_are_encoded_in_order_and_pulls_see_them(cluster: MakeCluster) -> None:
    """More than a turn of the loop: they are encoded in a thread. Nothing is awaited before all is called."""
    async with cluster(workers=1, servers=2) as running:
        (kv,) = running.workers
        await kv.init("w", full((1_000_000,), 0))
        await kv.set_optimizer("accumulate")
        await kv.set_gradient_compression(TWO_BIT)
        pushed = (0.4, 0.2, 0.4)
        calls: list[asyncio.Task[Any]] = []
        for value in pushed:
            calls += [asyncio.create_task(kv.push("w", full((1_000_000,), value))), asyncio.create_task(kv.pull("w"))]
        for value, total in zip((await asyncio.gather(*calls))[1::2], (0, 0.5, 1.0), strict=True):
            assert (value == value[0]).all()
            assert value[0] >= total, "a pull sees the pushes before it"
        np.testing.assert_array_equal(await kv.pull("w"), full((1_000_000,), 1.0))


async def test_a_push_that_is_cancelled_while_it_is_encoded_counts_and_gives_its_array_back(
    cluster: MakeCluster,
) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init("w", full((1_000_000,), 0))
        await kv.set_gradient_compression(TWO_BIT)
        gradient = full((1_000_000,), 0.5)
        push = asyncio.create_task(kv.push("w", gradient))
        await asyncio.sleep(0)
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        gradient[:] = np.nan
        np.testing.assert_array_equal(await kv.pull("w"), full((1_000_000,), 0.5))


async def test_a_client_may_close_while_it_encodes(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init("w", full((1_000_000,), 0))
        await kv.set_gradient_compression(TWO_BIT)
        push = asyncio.create_task(kv.push("w", full((1_000_000,), 0.5)))
        await asyncio.sleep(0)
        await kv.close()
        assert (await asyncio.gather(push, return_exceptions=True))[0] is not None


async def test_a_push_that_a_server_refuses_is_said_with_the_next_one(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.set_gradient_compression(TWO_BIT)
        with pytest.raises(UnknownKeyError):
            await kv.push("w", full((3,), 0.7))
        await kv.init("w", full((3,), 0))
        await kv.set_optimizer("accumulate")
        await kv.push("w", full((3,), 0))
        await kv.push("w", full((3,), 0.4))
        np.testing.assert_array_equal(await kv.pull("w"), full((3,), 1.0))


async def test_workers_that_differ_get_an_error(cluster: MakeCluster) -> None:
    """Trap of MXNet: other values on ranks other than 0 were not noticed."""
    async with cluster(workers=2) as running:
        first, second = running.workers
        await first.set_gradient_compression(TWO_BIT)
        with pytest.raises(CodecError, match=r"rank 1 \(worker-1\) compresses .*0.25.*, but rank 0 .*0.5"):
            await second.set_gradient_compression("2bit", threshold=0.25)
        await second.set_gradient_compression(TWO_BIT)
        await set_all(running, "qsgd", levels=7)


@pytest.mark.parametrize("wrong", [7, {}, {"threshold": 0.5}, "", "zip", {"type": 3}])
async def test_what_is_no_codec_is_refused(cluster: MakeCluster, wrong: Any) -> None:
    async with cluster(workers=1) as running:
        with pytest.raises(CodecError):
            await running.workers[0].set_gradient_compression(wrong)
        with pytest.raises(CodecError):
            await running.workers[0].set_gradient_compression(None, threshold=0.5)


async def test_a_malformed_payload_is_refused_and_nothing_is_counted(cluster: MakeCluster) -> None:
    """Code 01 is none of 2bit's: no encoder makes it."""
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        (server,) = running.servers
        await kv.init("w", full((3,), 0))
        await kv.set_gradient_compression(TWO_BIT)
        peer = next(peer for peer in server._links if peer > SCHEDULER)
        slot, view = server.store.land(4)
        view[:] = bytes([0b01000000, 0, 0, 0])
        message = m.Push("w", (3,), "float32", 0, 3, 1, 0, False, 5.0, codec=TwoBit().number)
        answers: list[Any] = []
        server._send = lambda *sent: answers.append(sent)  # type: ignore[method-assign]
        server.feed(st.Received(peer, 77, message, slot, 4))
        del server._send
        ((sent,),) = answers
        assert (sent.request, sent.message.code) == (77, ProtocolError.code)
        assert "the codes 00, 10 and 11" in sent.message.message
        assert server.store.open_slots == 0
        np.testing.assert_array_equal(await kv.pushpull("w", full((3,), 0.5)), full((3,), 0.5))


async def test_a_worker_that_is_restored_goes_on_with_the_same_bits(cluster: MakeCluster) -> None:
    gradients = np.random.default_rng(4).normal(size=(4, 300)).astype("f4")
    seen = []
    for split in (0, 2):
        state: Any = {}
        values: list[bytes] = []
        for part in (gradients[:split], gradients[split:]):
            async with cluster(workers=1) as running:
                (kv,) = running.workers
                await kv.init("w", full((300,), 0))
                await kv.set_gradient_compression("qsgd", levels=3)
                await kv.restore_compression_state(state)
                values += [(await kv.pushpull("w", gradient)).tobytes() for gradient in part]
                state = await kv.compression_state()
        seen.append(values)
    assert seen[0] == seen[1]
