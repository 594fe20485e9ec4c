"""Saving in one cluster and loading in another, over TCP: training goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.checkpoint import files
from aiokv.errors import ConfigError, DataError, OptimizerError, SpecMismatchError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.net.conftest import Cluster, MakeCluster

# 40,000 bytes are cut, the others are not.
SETTINGS: dict[str, Any] = {"split_bytes": 16384, "chunk_bytes": 4096}
SHAPES = {"big": (100, 100), "bias": (7,), "gain": (3, 2), "scalar": ()}


def first(dtype: str = "float32") -> dict[Any, Any]:
    """Return the first values of all dense keys."""
    rng = np.random.default_rng(7)
    return {key: rng.standard_normal(shape).astype(dtype) for key, shape in SHAPES.items()}


def gradient(turn: int, rank: int, dtype: str = "float32") -> dict[Any, Any]:
    """Return what a rank pushes in a round."""
    rng = np.random.default_rng([turn, rank])
    return {key: rng.standard_normal(shape).astype(dtype) for key, shape in SHAPES.items()}


def row_gradient(turn: int, rank: int) -> aiokv.RowSparse:
    """Return what a rank pushes to the table in a round: other rows in each."""
    rng = np.random.default_rng([turn, rank, 1])
    rows = np.unique(rng.integers(0, 5000, 40))
    return aiokv.RowSparse(rows, rng.standard_normal((rows.size, 3)).astype("float32"), (5000, 3))


async def init(running: Cluster, dtype: str = "float32") -> None:
    await running.each(lambda worker: worker.init(first(dtype)))
    initializer = {"name": "normal", "scale": 0.1, "seed": 3}
    await running.each(lambda worker: worker.init_rows("table", (5000, 3), initializer=initializer))


async def push_own(values: list[dict[Any, Any]], worker: aiokv.Client) -> None:
    await worker.push(values[worker.rank])


async def push_own_rows(values: list[aiokv.RowSparse], worker: aiokv.Client) -> None:
    await worker.push("table", values[worker.rank])


async def train(running: Cluster, turns: range, dtype: str = "float32") -> None:
    for turn in turns:
        dense = [gradient(turn, worker.rank, dtype) for worker in running.workers]
        sparse = [row_gradient(turn, worker.rank) for worker in running.workers]
        await running.each(partial(push_own, dense))
        await running.each(partial(push_own_rows, sparse))


async def weights(running: Cluster, dtype: str = "float32") -> list[Any]:
    outs = {key: np.empty(shape, dtype) for key, shape in SHAPES.items()}
    worker = running.workers[0]
    dense = await worker.pull(outs)
    table = np.empty((5000, 3), "float32")
    await worker.row_sparse_pull("table", table, np.arange(5000))
    return [array.copy() for array in (*dense, table)]


def assert_same(got: list[Any], expected: list[Any]) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


RULES: list[tuple[str, str, dict[str, Any]]] = [
    ("adam", "float32", {"learning_rate": 0.01}),
    ("sgd", "float16", {"momentum": 0.9, "multi_precision": True, "learning_rate": 0.1}),
    ("sgd", "float32", {"momentum": 0.9, "schedule": {"name": "factor", "step": 2, "factor": 0.5}}),
    ("groupadagrad", "float32", {"learning_rate": 0.1}),
]


@pytest.mark.parametrize(("servers", "others"), [(2, 3), (3, 1)])
@pytest.mark.parametrize(("rule", "dtype", "params"), RULES, ids=["adam", "float16 with master", "schedule", "by row"])
async def test_scenario_21_training_goes_on_with_another_number_of_servers_bit_by_bit(
    cluster: MakeCluster,
    tmp_path: Path,
    rule: str,
    dtype: str,
    params: dict[str, Any],
    servers: int,
    others: int,
) -> None:
    url = str(tmp_path / "state.safetensors")
    async with cluster(servers=servers, **SETTINGS) as running:
        await init(running, dtype)
        await running.each(lambda worker: worker.set_optimizer(rule, **params))
        await train(running, range(3), dtype)
        await running.each(lambda worker: worker.save(url))
        await train(running, range(3, 6), dtype)
        undisturbed = await weights(running, dtype)
    async with cluster(servers=others, **SETTINGS) as running:
        await init(running, dtype)
        await running.each(lambda worker: worker.load(url))
        await train(running, range(3, 6), dtype)
        assert_same(await weights(running, dtype), undisturbed)
        counts = await running.workers[1].update_counts()
        assert counts == dict.fromkeys([*SHAPES, "table"], 6)


async def test_a_changed_learning_rate_is_kept_and_a_later_change_still_counts(
    cluster: MakeCluster, tmp_path: Path
) -> None:
    url = str(tmp_path / "state")
    ones = {"w": np.ones(2, "float32")}

    async def push(running: Cluster, turns: int) -> Any:
        for _ in range(turns):
            await running.each(lambda worker: worker.push(ones))
        return (await running.workers[0].pull("w")).tolist()

    async with cluster() as running:
        await running.each(lambda worker: worker.init("w", np.zeros(2, "float32")))
        await running.each(lambda worker: worker.set_optimizer("sgd", learning_rate=1.0))
        assert await push(running, 1) == [-2, -2]
        await running.each(lambda worker: worker.set_learning_rate(0.5))
        await running.each(lambda worker: worker.set_learning_rate(0.25, since=4))
        assert await push(running, 1) == [-3, -3]
        await running.each(lambda worker: worker.save(url))
    async with cluster() as running:
        await running.each(lambda worker: worker.init("w", np.zeros(2, "float32")))
        await running.each(lambda worker: worker.load(url))
        assert await push(running, 1) == [-4, -4]
        assert await push(running, 1) == [-4.5, -4.5]
        assert await running.workers[0].set_learning_rate(2.0) == 5
        await running.workers[1].set_learning_rate(2.0)
        assert await push(running, 1) == [-8.5, -8.5]


async def test_a_cluster_goes_back_to_what_it_saved(cluster: MakeCluster, tmp_path: Path) -> None:
    """Rows and changes of parameters that came after it are forgotten too."""
    url = str(tmp_path / "state")
    async with cluster(servers=2, **SETTINGS) as running:
        await init(running)
        await running.each(lambda worker: worker.set_optimizer("adam"))
        await train(running, range(2))
        await running.each(lambda worker: worker.save(url))
        saved = await weights(running)
        await train(running, range(2, 4))
        after = await weights(running)
        await running.each(lambda worker: worker.set_learning_rate(0.5))
        await train(running, range(4, 6))
        await running.each(lambda worker: worker.load(url))
        assert_same(await weights(running), saved)
        await train(running, range(2, 4))
        assert_same(await weights(running), after)


async def test_a_file_of_the_local_store_is_loaded_by_a_cluster_and_the_other_way_round(cluster: MakeCluster) -> None:
    url = "memory://state-of-the-local-store"
    value, push = np.arange(5, dtype="float32"), np.ones(5, "float32")
    with aiokv.create("local") as local:
        local.init(3, value)
        local.set_optimizer("adam", lr_mult={3: 0.5})
        local.push(3, push)
        local.save(url)
        local.push(3, push)
        expected = local.pull(3)
    async with cluster(workers=1) as running:
        (worker,) = running.workers
        await worker.init(3, value)
        await worker.load(url)
        await worker.save(url)
        await worker.push(3, push)
        np.testing.assert_array_equal(await worker.pull(3), expected)
    with aiokv.create("local") as local:
        local.init(3, value)
        local.load(url)
        local.push(3, push)
        np.testing.assert_array_equal(local.pull(3), expected)


async def test_optimizer_states_are_loaded_without_the_weights(cluster: MakeCluster, tmp_path: Path) -> None:
    """With momentum 0.5 and rate 1, pushes of 1 change the weight by -1, then -1.5, then -1.75."""
    url = str(tmp_path / "states")
    rows = aiokv.RowSparse(np.array([1]), np.ones((1, 1), "float32"), (4, 1))
    async with cluster(workers=1) as running:
        (worker,) = running.workers
        await worker.init("w", np.zeros(1, "float32"))
        await worker.init_rows("t", (4, 1))
        await worker.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        for key, value in (("w", np.ones(1, "float32")), ("t", rows)):
            await worker.push(key, value)
        await worker.save_optimizer_states(url)
        for key, value in (("w", np.ones(1, "float32")), ("t", rows)):
            await worker.push(key, value)
        assert await worker.pull("w") == -2.5
        await worker.load_optimizer_states(url)
        for key, value in (("w", np.ones(1, "float32")), ("t", rows)):
            await worker.push(key, value)
        assert await worker.pull("w") == -4
        assert (await worker.row_sparse_pull("t", row_ids=[1])).values.tolist() == [[-4]]


async def test_what_can_not_be_loaded_changes_nothing(cluster: MakeCluster, tmp_path: Path) -> None:
    url = str(tmp_path / "state")
    value = {"a": np.ones(4, "float32"), "b": np.ones(4, "float32")}
    async with cluster(workers=1) as running:
        (worker,) = running.workers
        await worker.init(value)
        await worker.set_optimizer("adam")
        await worker.push(value)
        await worker.save(url)
    async with cluster(workers=1) as running:
        (worker,) = running.workers
        await worker.init("a", np.zeros(4, "float32"))
        await worker.init("b", np.zeros(5, "float32"))
        with pytest.raises(SpecMismatchError, match="'b'"):
            await worker.load(url)
        await worker.delete("b")
        await worker.init("b", np.zeros(4, "float32"))
        await worker.set_optimizer("sgd")
        with pytest.raises(OptimizerError, match="Adam"):
            await worker.load(url)
        torn = tmp_path / "torn"
        torn.write_bytes((tmp_path / "state").read_bytes()[:-1])
        with pytest.raises(DataError, match="torn"):
            await worker.load(str(torn))
        for key in value:
            assert (await worker.pull(key, np.empty(4, "float32"))).tolist() == [0] * 4
        assert await worker.update_counts() == {"a": 0, "b": 0}


async def test_weights_without_a_rule_are_loaded_under_the_rule_that_is_set(
    cluster: MakeCluster, tmp_path: Path
) -> None:
    """The first step of Adam is its learning rate, whatever the gradient."""
    url = str(tmp_path / "state")
    async with cluster(workers=1) as running:
        (worker,) = running.workers
        await worker.init("w", np.zeros(1, "float32"))
        await worker.push("w", np.full(1, 3, "float32"))
        await worker.save(url)
        await worker.set_optimizer("adam", learning_rate=0.5)
        await worker.push("w", np.full(1, 8, "float32"))
        await worker.load(url)
        assert await worker.pull("w") == 3
        await worker.push("w", np.full(1, 8, "float32"))
        assert (await worker.pull("w"))[0] == pytest.approx(2.5)


async def test_chunks_that_do_not_fit_in_a_message_are_refused(cluster: MakeCluster, tmp_path: Path) -> None:
    async with cluster(workers=1, chunk_bytes=64 << 20, split_bytes=1 << 40) as running:
        (worker,) = running.workers
        await worker.init("w", np.zeros((9 << 20) // 4, "float32"))
        with pytest.raises(ConfigError, match="chunk_bytes"):
            await worker.save(str(tmp_path / "state"))


async def test_many_keys_and_rows_go_in_several_messages(
    cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiokv.checkpoint.snapshot.MOST_PARTS", 3)
    monkeypatch.setattr("aiokv.checkpoint.snapshot.MOST_BYTES", 100)
    monkeypatch.setattr("aiokv.store.states.MOST_BYTES", 100)
    url = str(tmp_path / "state")
    async with cluster(servers=2, **SETTINGS) as running:
        await init(running)
        await train(running, range(1))
        expected = await weights(running)
        await running.each(lambda worker: worker.save(url))
    async with cluster(**SETTINGS) as running:
        await init(running)
        await train(running, range(5, 6))
        await running.each(lambda worker: worker.load(url))
        assert_same(await weights(running), expected)


async def test_a_file_is_loaded_a_part_at_a_time(
    cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, reads = str(tmp_path / "large"), []
    read = files.Reader.read

    def counted(self: files.Reader, start: int, stop: int) -> bytes:
        reads.append(stop - start)
        return read(self, start, stop)

    monkeypatch.setattr(files.Reader, "read", counted)
    value = np.arange(6 << 20, dtype=np.float32)
    async with cluster(workers=1, servers=2) as running:
        (kv,) = running.workers
        await kv.init("w", value)
        await kv.save(url)
    assert reads == []
    async with cluster(workers=1, servers=1) as running:
        (kv,) = running.workers
        await kv.load(url)
        np.testing.assert_array_equal(await kv.pull("w"), value)
    # Twice: to check it, and to send it.
    assert 2 * value.nbytes < sum(reads) < 2.1 * value.nbytes
    assert max(reads) <= files.BLOCK_BYTES


async def test_keys_that_were_pushed_less_often_go_on_as_without_the_save(cluster: MakeCluster, tmp_path: Path) -> None:
    """The rate of a push of `b` alone is that of the same moment, not of one more round of `a`."""
    schedule = {"name": "factor", "step": 2, "factor": 0.5}

    async def push(running: Any, *keys: str) -> None:
        await running.each(lambda kv: kv.push({key: np.ones(3, np.float32) for key in keys}))

    async def begin(running: Any) -> None:
        await running.each(lambda kv: kv.init({key: np.zeros(3, np.float32) for key in "ab"}))

    async def end(running: Any) -> list[float]:
        await push(running, "b")
        await push(running, "a", "b")
        await push(running, "b")
        return [float(array[0]) for array in await running.workers[1].pull({"a": None, "b": None})]

    url = str(tmp_path / "weights.safetensors")
    async with cluster(workers=2, servers=2) as running:
        await running.each(lambda kv: kv.set_optimizer("sgd", learning_rate=1.0, schedule=schedule))
        await begin(running)
        await push(running, "a", "b")
        for _ in range(3):
            await push(running, "a")
        await running.each(lambda kv: kv.save(url))
        undisturbed = await end(running)
    async with cluster(workers=2, servers=3) as running:
        await begin(running)
        await running.each(lambda kv: kv.load(url))
        assert await end(running) == undisturbed


async def test_staleness_rate_is_in_the_file(cluster: MakeCluster, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    async with cluster(workers=2, policy="asp") as running:
        await running.each(lambda worker: worker.set_optimizer("accumulate", staleness_rate="1/(1+tau)"))
        await running.each(lambda worker: worker.init("w", np.zeros(1)))
        await running.each(lambda worker: worker.save(path))
    async with cluster(workers=2, policy="asp") as running:
        await running.each(lambda worker: worker.load(path))
        one, other = running.workers
        await one.push("w", np.array([8.0]))
        await other.push("w", np.array([8.0]))
        assert await one.pull("w") == 8.0 + 8.0 / 2
        with pytest.raises(OptimizerError, match=r"at staleness rate 1/\(1\+tau\)"):
            await one.set_optimizer("accumulate")


async def test_files_of_a_cluster_stay_in_the_folder_that_is_configured(cluster: MakeCluster, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    async with cluster(workers=2, checkpoint_folder=str(folder), **SETTINGS) as running:
        await init(running)
        await running.each(lambda worker: worker.save("first"))
        assert [path.name for path in folder.iterdir()] == ["first"]
        await running.each(lambda worker: worker.load("first"))
        for call in (aiokv.Client.save, aiokv.Client.load):
            results = await asyncio.gather(*(call(kv, "../second") for kv in running.workers), return_exceptions=True)
            assert [type(result) for result in results] == [DataError] * 2
            assert "../second: is not in the folder" in str(results[1])
    assert not (tmp_path / "second").exists()
