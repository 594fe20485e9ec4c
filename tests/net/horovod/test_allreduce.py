"""Horovod's test/parallel (its allreduce) over real clusters: sums, means, scales, groups of tensors, many at a time.

Its errors, broadcast, joins, process sets and lifetimes are in the modules beside this one. What has no place here, and
why:

- Minimum, maximum and product: updates are made of sums, means, medians and trimmed means.
- All-to-all and reduce-scatter: workers do not talk to each other; who needs a part of a tensor reads it as a key.
- Gradients of collectives in TensorFlow and PyTorch: the calls here are not part of a graph.
- Tensors on different devices, and several devices for one worker: arrays lie in the host's memory; lists of arrays are
  in `tests/net/mxnet`.
- Broadcast of optimizer state: it is on the servers and never sent around; `test_saving.py` saves and loads it for all
  rules.
- Adasum, hierarchical and MPI variants, `local_rank`: there is one way to sum, and no hosts with ranks of their own.
- The timeline is `profile_servers` (`test_commands.py`); a stalled rank is a `RoundTimeoutError` (`test_failures.py`);
  states and samplers of elastic training are in `tests/data`, its driver in `tests/launch` and `tests/core`.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 - with it NumPy knows the name "bfloat16"
import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv import RowSparse

if TYPE_CHECKING:
    import aiokv
    from tests.net.conftest import MakeCluster

Array = NDArray[Any]

FLOATS = ["bfloat16", "float16", "float32", "float64"]
INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
SHAPES: list[tuple[int, ...]] = [(17,), (17, 17), (17, 17, 17), (), (0,), (17, 0), (0, 17, 17)]
CUT = {"servers": 2, "split_bytes": 4096, "chunk_bytes": 4096}
"""With these settings the largest of the shapes is in several chunks, on both servers."""


def name_of(shape: tuple[int, ...]) -> str:
    return f"shape {shape}"


def whole_numbers(rank: int, dtype: str) -> dict[str, Array]:
    """Return a rank's tensors: whole numbers so small that the sum of three is exact in every dtype."""
    rng = np.random.default_rng(rank)
    low = 0 if dtype.startswith("u") else -40
    return {name_of(shape): rng.integers(low, 41, shape).astype(dtype) for shape in SHAPES}


def zeros_like(tensors: dict[str, Array]) -> dict[str, Array]:
    return {key: np.zeros_like(tensor) for key, tensor in tensors.items()}


def assert_equal(results: list[Array], expected: dict[str, Array]) -> None:
    """Compare a call's results, in the order of its keys, with what they should be; shapes and dtypes too."""
    for result, (key, value) in zip(results, expected.items(), strict=True):
        assert result.dtype == value.dtype, key
        np.testing.assert_array_equal(result, value, err_msg=key, strict=True)


@pytest.mark.parametrize("in_place", [False, True], ids=["new arrays", "in place"])
@pytest.mark.parametrize("dtype", FLOATS + INTS)
async def test_sums_of_every_dtype_and_number_of_dimensions(cluster: MakeCluster, dtype: str, in_place: bool) -> None:
    given = [whole_numbers(rank, dtype) for rank in range(3)]
    expected = {key: sum(tensors[key].astype("int64") for tensors in given).astype(dtype) for key in given[0]}  # type: ignore[union-attr]

    async def work(kv: aiokv.Client) -> None:
        tensors = {key: tensor.copy() for key, tensor in given[kv.rank].items()}
        await kv.init(zeros_like(tensors))
        results = await kv.pushpull(tensors, out=tensors if in_place else None)
        assert_equal(results, expected)
        assert_equal(list(tensors.values()), expected if in_place else given[kv.rank])

    async with cluster(workers=3, **CUT) as running:
        await running.each(work)


@pytest.mark.parametrize("reduction", ["mean", "mean_of_world"])
@pytest.mark.parametrize("dtype", FLOATS)
async def test_the_mean_of_rank_times_x_is_x(cluster: MakeCluster, dtype: str, reduction: str) -> None:
    """Ranks 0, 1 and 2: (0 + 1 + 2) x / 3 = x, exactly."""
    given = whole_numbers(7, dtype)

    async def work(kv: aiokv.Client) -> None:
        await kv.set_optimizer("assign", reduction=reduction)
        await kv.init(zeros_like(given))
        rank = np.asarray(kv.rank, dtype)
        assert_equal(await kv.pushpull({key: np.asarray(rank * x) for key, x in given.items()}), given)

    async with cluster(workers=3, **CUT) as running:
        await running.each(work)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bfloat16", 2**-8), ("float16", 2**-11), ("float32", 2**-23), ("float64", 2**-52)]
)
@pytest.mark.parametrize("where", ["before", "after"])
async def test_a_random_scale_before_or_after_the_sum(
    cluster: MakeCluster, where: str, dtype: str, tolerance: float
) -> None:
    """Horovod's prescale is the caller's own multiplication, and its postscale `rescale_grad`."""
    factor = float(np.asarray(random.Random(1234).uniform(0.1, 2), dtype))
    given = [whole_numbers(rank, dtype) for rank in range(3)]
    exact = {key: factor * sum(tensors[key].astype("float64") for tensors in given) for key in given[0]}

    async def work(kv: aiokv.Client) -> None:
        scale = np.asarray(factor if where == "before" else 1.0, dtype)
        tensors = {key: np.asarray(tensor * scale) for key, tensor in given[kv.rank].items()}
        await kv.set_optimizer("accumulate", rescale_grad=factor if where == "after" else 1.0)
        await kv.init(zeros_like(tensors))
        for result, (key, expected) in zip(await kv.pushpull(tensors), exact.items(), strict=True):
            assert result.dtype == np.dtype(dtype)
            # Each of the three was rounded, and then their sum: four times at most half a unit of the largest sum.
            atol = 4 * tolerance * factor * 120
            np.testing.assert_allclose(result.astype("float64"), expected, rtol=0, atol=atol, err_msg=key)

    async with cluster(workers=3, **CUT) as running:
        await running.each(work)


async def test_grouped_tensors_have_the_bits_of_single_ones(cluster: MakeCluster) -> None:
    """Random floats, so that a sum in another order would have other bits: one list, one dict, one call for each."""

    async def work(kv: aiokv.Client) -> list[list[Array]]:
        rng = np.random.default_rng(kv.rank)
        tensors = {name_of(shape): rng.standard_normal(shape).astype("float32") for shape in SHAPES}
        await kv.init({key: np.zeros_like(np.asarray(tensor)) for key, tensor in tensors.items()})
        grouped = await kv.pushpull(list(tensors), list(tensors.values()))
        as_dict = await kv.pushpull(tensors)
        single = await asyncio.gather(*(kv.pushpull(key, tensor) for key, tensor in tensors.items()))
        return [grouped, as_dict, list(single)]

    async with cluster(workers=3, **CUT) as running:
        first, *others = [result for results in await running.each(work) for result in results]
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert one.tobytes() == two.tobytes()


async def test_many_tensors_in_flight_in_another_order_on_every_rank(cluster: MakeCluster) -> None:
    """Every rank shuffles 60 tensors, cuts them into groups of its own, and has two rounds of all in flight."""
    rng = random.Random(60)
    specs = {f"t{i}": (rng.choice(SHAPES), rng.choice(FLOATS + INTS)) for i in range(60)}

    def tensor(key: str, rank: int, step: int) -> Array:
        shape, dtype = specs[key]
        return np.full(shape, (rank + 1) * (step + 1) + int(key[1:]) % 20, dtype)

    async def exchange(kv: aiokv.Client, keys: list[str], step: int) -> None:
        for key, value in zip(keys, await kv.pushpull({key: tensor(key, kv.rank, step) for key in keys}), strict=True):
            shape, dtype = specs[key]
            expected = 6 * (step + 1) + 3 * (int(key[1:]) % 20)
            np.testing.assert_array_equal(value, np.full(shape, expected, dtype), err_msg=key, strict=True)

    async def work(kv: aiokv.Client) -> None:
        await kv.init({key: np.zeros(shape, dtype) for key, (shape, dtype) in specs.items()})
        order = random.Random(kv.rank)
        calls = []
        for step in range(2):
            keys = list(specs)
            order.shuffle(keys)
            while keys:
                size = order.randint(1, 7)
                calls.append(exchange(kv, keys[:size], step))
                del keys[:size]
        await asyncio.gather(*calls)

    async with cluster(workers=3, **CUT) as running:
        await running.each(work)
        assert all(server.store.open_slots == 0 for server in running.servers)


async def test_a_name_that_is_in_flight_already_is_the_next_round(cluster: MakeCluster) -> None:
    """Horovod refuses the second one. Here both count, in the order of the calls on each rank."""

    async def work(kv: aiokv.Client) -> None:
        await kv.init({"w": np.zeros(17, "int64"), "v": np.zeros((17, 17), "int64")})
        alone = [kv.pushpull("w", np.full(17, (kv.rank + 1) * 10**i)) for i in range(4)]
        both = [kv.pushpull({"v": np.full((17, 17), kv.rank + i), "w": np.full(17, kv.rank + i)}) for i in range(4)]
        for i, value in enumerate(await asyncio.gather(*alone)):
            np.testing.assert_array_equal(value, np.full(17, 6 * 10**i))
        for i, (v, w) in enumerate(await asyncio.gather(*both)):
            np.testing.assert_array_equal(v, np.full((17, 17), 3 + 3 * i))
            np.testing.assert_array_equal(w, np.full(17, 3 + 3 * i))

    async with cluster(workers=3, **CUT) as running:
        await running.each(work)


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_compressed_whole_numbers_come_back_as_they_were(cluster: MakeCluster, codec: str, dtype: str) -> None:
    """Sums of at most 120 have few enough bits for both formats. The dtype that comes back is the one that went in."""
    given = [whole_numbers(rank, dtype) for rank in range(3)]
    expected = {key: np.asarray(sum(tensors[key] for tensors in given)) for key in given[0]}

    async def work(kv: aiokv.Client) -> None:
        await kv.set_gradient_compression(codec)
        await kv.init(zeros_like(given[kv.rank]))
        for _ in range(2):
            assert_equal(await kv.pushpull(given[kv.rank]), expected)

    async with cluster(workers=3, **CUT) as running:
        await running.each(work)


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
async def test_gather_of_unequal_parts_is_a_table_to_which_each_rank_gives_its_rows(
    cluster: MakeCluster, dtype: str
) -> None:
    """First dimensions 17, 32 and 81, each times 5, one of them without any rows the second time."""
    sizes = [17, 32, 81]
    starts = [0, 17, 49, 130]

    async def work(kv: aiokv.Client) -> None:
        await kv.init_rows("all", (130, 5), dtype)
        for step in range(2):
            size = 0 if (step, kv.rank) == (1, 2) else sizes[kv.rank]
            rows = np.arange(starts[kv.rank], starts[kv.rank] + size)
            values = np.full((size, 5), kv.rank + 1 + 10 * step, dtype)
            await kv.push("all", RowSparse(rows, values, (130, 5)))
            table = await kv.row_sparse_pull("all", np.empty((130, 5), dtype), np.arange(130))
            for rank in range(3):
                # Without a rule a row that nobody gives keeps what it had.
                expected = 3 if (step, rank) == (1, 2) else rank + 1 + 10 * step
                part = table[starts[rank] : starts[rank + 1]]
                np.testing.assert_array_equal(part, np.full((sizes[rank], 5), expected, dtype), strict=True)

    async with cluster(workers=3, servers=2) as running:
        await running.each(work)
