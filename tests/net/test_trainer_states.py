"""A trainer whose servers update goes on from a file with the same bits, on other servers."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import DataError, OptimizerError, UnknownKeyError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.net.conftest import ClusterInAThread, MakeCluster

SHAPES = {"big": (300, 70), "bias": (5,), "gain": (7,)}
"""The first one is cut over all servers, the others are small."""

BATCHES = {0: 4, 1: 16, 2: 8, 3: 2, 4: 32, 5: 6}
"""The size of rank 0's batch in each step; that of rank 1 is one more."""

SGD = {"learning_rate": 0.1, "momentum": 0.9, "schedule": {"name": "factor", "step": 2, "factor": 0.7}}

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compressed": {"compression_params": {"type": "2bit", "threshold": 0.02}},
    "sparsified at random": {"compression_params": {"type": "randomk", "fraction": 0.3, "seed": 5}},
    "with a loss scale": {"loss_scale": "dynamic"},
}


def on_cluster(run: ClusterInAThread, servers: int, work: Callable[[aiokv.KVStore], Any]) -> list[Any]:
    """Let two workers do something in threads; return what they have returned, by rank."""

    def begin(address: str) -> Any:
        with aiokv.create("dist_sync", scheduler=address, backend="reference") as kv:
            return kv.rank, work(kv)

    with run(2, servers) as address, concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(begin, address) for _ in range(2)]
        return [result for _, result in sorted(future.result() for future in futures)]


def new_params(value: float = 0.5) -> dict[str, Any]:
    return {name: np.full(shape, value, "float32") for name, shape in SHAPES.items()}


def take_steps(trainer: aiokv.Trainer, rank: int, steps: range) -> None:
    for step in steps:
        random = np.random.default_rng([step, rank])
        scale = BATCHES[step] * trainer.loss_scale / 8
        gradients = {name: (scale * random.standard_normal(shape)).astype("float32") for name, shape in SHAPES.items()}
        if trainer.loss_scale > 1 and step == 1 and rank == 1:
            gradients["bias"][0] = np.inf
        trainer.step(BATCHES[step] + rank, gradients)


@pytest.mark.parametrize("name", SETTINGS)
def test_three_steps_after_a_load_are_those_of_an_undisturbed_run(
    cluster_in_a_thread: ClusterInAThread, tmp_path: Path, name: str
) -> None:
    """With momentum, a schedule, a changed rate, and batch sizes of which none is again the first one."""
    url = str(tmp_path / "states")

    def undisturbed(kv: aiokv.KVStore) -> Any:
        params = new_params()
        trainer = aiokv.Trainer(params, "sgd", SGD, kvstore=kv, update_on_kvstore=True, **SETTINGS[name])
        take_steps(trainer, kv.rank, range(2))
        trainer.set_learning_rate(0.3)
        take_steps(trainer, kv.rank, range(2, 3))
        trainer.save_states(url)
        take_steps(trainer, kv.rank, range(3, 6))
        return {key: array.tobytes() for key, array in params.items()}, trainer.learning_rate, trainer.loss_scale

    def resumed(kv: aiokv.KVStore) -> Any:
        params = new_params(0.0)
        trainer = aiokv.Trainer(params, "sgd", SGD, kvstore=kv, update_on_kvstore=True, **SETTINGS[name])
        trainer.load_states(url)
        take_steps(trainer, kv.rank, range(3, 6))
        return {key: array.tobytes() for key, array in params.items()}, trainer.learning_rate, trainer.loss_scale

    expected = on_cluster(cluster_in_a_thread, 2, undisturbed)
    assert expected[0][0] == expected[1][0]
    assert on_cluster(cluster_in_a_thread, 3, resumed) == expected


def test_workers_that_update_go_on_with_what_compression_had_left(
    cluster_in_a_thread: ClusterInAThread, tmp_path: Path
) -> None:
    """And divide by the first batch size of the run that was saved, since what is compressed depends on it."""
    url = str(tmp_path / "states")

    def make(params: dict[str, Any], kv: aiokv.KVStore) -> aiokv.Trainer:
        return aiokv.Trainer(params, "sgd", SGD, kvstore=kv, update_on_kvstore=False, **SETTINGS["compressed"])

    def undisturbed(kv: aiokv.KVStore) -> Any:
        params = new_params()
        trainer = make(params, kv)
        take_steps(trainer, kv.rank, range(3))
        trainer.save_states(url)
        kept = {key: array.copy() for key, array in params.items()}
        take_steps(trainer, kv.rank, range(3, 6))
        return kept, {key: array.tobytes() for key, array in params.items()}

    first, _ = saved = on_cluster(cluster_in_a_thread, 2, undisturbed)

    def resumed(kv: aiokv.KVStore) -> Any:
        params = {key: array.copy() for key, array in first[0].items()}
        trainer = make(params, kv)
        trainer.load_states(url)
        take_steps(trainer, kv.rank, range(3, 6))
        return {key: array.tobytes() for key, array in params.items()}

    assert on_cluster(cluster_in_a_thread, 1, resumed) == [expected for _, expected in saved]
    alone = aiokv.Trainer(new_params(), "sgd", SGD, kvstore=None)
    alone.load_states(url)


def test_a_trainer_goes_back_to_what_it_has_saved(cluster_in_a_thread: ClusterInAThread, tmp_path: Path) -> None:
    url = str(tmp_path / "states")

    def work(kv: aiokv.KVStore) -> list[dict[str, bytes]]:
        params = new_params()
        trainer = aiokv.Trainer(
            params, "sgd", SGD, kvstore=kv, update_on_kvstore=True, **SETTINGS["sparsified at random"]
        )
        take_steps(trainer, kv.rank, range(2))
        trainer.save_states(url)
        seen = []
        for _ in range(2):
            take_steps(trainer, kv.rank, range(2, 4))
            seen.append({key: array.tobytes() for key, array in params.items()})
            trainer.load_states(url)
        return seen

    for first, second in on_cluster(cluster_in_a_thread, 2, work):
        assert first == second


def test_states_of_something_else_change_nothing(tmp_path: Path) -> None:
    url, other = str(tmp_path / "states"), str(tmp_path / "other")
    with aiokv.create("local") as kv:
        trainer = aiokv.Trainer(new_params(), "adam", kvstore=kv, update_on_kvstore=True)
        trainer.save_states(str(tmp_path / "before the first step"))
        take_steps(trainer, 0, range(2))
        trainer.save_states(url)
    with aiokv.create("local") as kv:
        kv.init("w", np.ones(2))
        kv.save(other)
    params = new_params()
    with aiokv.create("local") as kv:
        trainer = aiokv.Trainer(params, "sgd", kvstore=kv, update_on_kvstore=True)
        with pytest.raises(DataError, match="optimizer 'sgd', got 'adam'"):
            trainer.load_states(url)
        with pytest.raises(UnknownKeyError, match="has no key 'bias'"):
            trainer.load_states(other)
        trainer = aiokv.Trainer(params, "adam", kvstore=kv, update_on_kvstore=True, reduction="mean")
        with pytest.raises(DataError, match="reduction 'mean', got 'sum'"):
            trainer.load_states(url)
        assert (kv.pull("bias") == params["bias"]).all()
        assert (params["bias"] == 0.5).all()
    with aiokv.create("local") as kv:
        trainer = aiokv.Trainer(params, "adam", kvstore=kv, update_on_kvstore=True)
        trainer.load_states(str(tmp_path / "before the first step"))
        trainer.step(1, new_params())
        with pytest.raises(OptimizerError, match="rescale_grad"):
            trainer.load_states(url)


async def test_with_another_number_of_workers_nothing_of_the_gradients_is_lost(
    cluster: MakeCluster, tmp_path: Path
) -> None:
    """Two workers have 0.75 and 0.5 left of what they pushed; one, or the first two of three, go on with 1.25."""
    url = str(tmp_path / "a")
    start = np.zeros(2, "float32")
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init("w", start))
        await running.each(lambda kv: kv.set_optimizer("accumulate"))
        await running.each(lambda kv: kv.set_gradient_compression("2bit", threshold=2.0))
        await running.each(lambda kv: kv.push("w", start + (0.75, 0.5)[kv.rank]))
        await running.each(lambda kv: kv.save(url))
        assert (await running.workers[0].pull("w")).tolist() == [0, 0]
    for workers in (1, 3):
        async with cluster(workers=workers) as running:
            await running.each(lambda kv: kv.load(url))
            await running.each(lambda kv: kv.push("w", start))
            assert (await running.workers[0].pull("w")).tolist() == [1.25, 1.25]


async def test_a_missing_file_of_a_worker_is_named_and_nothing_is_loaded(cluster: MakeCluster, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init("w", np.zeros(2, "float32")))
        await running.each(lambda kv: kv.set_gradient_compression("2bit", threshold=2.0))
        await running.each(lambda kv: kv.push("w", np.ones(2, "float32")))
        await running.each(lambda kv: kv.save(url))
        await running.each(lambda kv: kv.push("w", np.ones(2, "float32")))
        (tmp_path / "a.rank1").unlink()

        async def load(kv: aiokv.Client) -> Any:
            with pytest.raises(DataError, match=r"a\.rank1: can't be read") as caught:
                await kv.load(url)
            return type(caught.value)

        await running.each(load)
        assert (await running.workers[0].pull("w")).tolist() == [4, 4]
