"""Local SGD, elastic averaging and balanced batches over real sockets: trajectories that are known in closed form."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import RoundTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.net.conftest import ClusterInAThread

    OnCluster = Callable[..., list[Any]]


@pytest.fixture
def on_cluster(cluster_in_a_thread: ClusterInAThread) -> OnCluster:
    """Return what lets every worker of a cluster do some work, each in a thread; it returns the results by rank."""

    def one(address: str, work: Callable[[aiokv.KVStore], Any], policy: str, rank: int) -> Any:
        with aiokv.blocking.connect(address, name=f"worker-{rank}", policy=policy, call_timeout=20.0) as kv:
            return work(kv)

    def run(work: Callable[[aiokv.KVStore], Any], workers: int = 2, *, servers: int = 1, policy: str = "bsp") -> Any:
        with cluster_in_a_thread(workers, servers) as address, ThreadPoolExecutor(workers) as pool:
            return list(pool.map(functools.partial(one, address, work, policy), range(workers)))

    return run


# Worker i minimises A[i] / 2 * (x - TARGET[i])**2 by gradient descent.
A = np.array([1.0, 3.0])
TARGET = np.array([2.0, -1.0])
RATE = 0.1


def descend(x: Any, rank: int) -> None:
    x -= RATE * A[rank] * (x - TARGET[rank])


# --- local SGD ---


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_local_sgd_follows_its_closed_form(policy: str, on_cluster: OnCluster) -> None:
    """A round maps x to mean(TARGET + k (x - TARGET)) with k = (1 - RATE A)^H, which is linear in x."""
    every, rounds, start = 5, 6, 7.0

    def work(kv: aiokv.KVStore) -> list[float]:
        # The values of rank 0 win.
        x = np.array([start + kv.rank])
        local = aiokv.LocalSGD(kv, {"x": x}, every=every)
        seen = []
        for _ in range(rounds * every):
            descend(x, kv.rank)
            if local.step():
                seen.append(float(x[0]))
        return seen

    kept = (1 - RATE * A) ** every
    slope, fixed_point = kept.mean(), (TARGET * (1 - kept)).mean() / (1 - kept.mean())
    expected = fixed_point + slope ** np.arange(1, rounds + 1) * (start - fixed_point)
    for seen in on_cluster(work, policy=policy):
        np.testing.assert_allclose(seen, expected, rtol=1e-12)


def test_averaging_every_step_is_descent_by_the_mean_gradient(on_cluster: OnCluster) -> None:
    def work(kv: aiokv.KVStore) -> float:
        x = np.array([7.0])
        local = aiokv.LocalSGD(kv, {"x": x}, every=1)
        for _ in range(10):
            descend(x, kv.rank)
            assert local.step()
        return float(x[0])

    x = 7.0
    for _ in range(10):
        x -= RATE * float((A * (x - TARGET)).mean())
    np.testing.assert_allclose(on_cluster(work), [x, x], rtol=1e-12)


def test_outer_nesterov_sees_the_mean_of_what_the_workers_moved_by(on_cluster: OnCluster) -> None:
    """From 8, rank 0 to 6 and rank 1 to 2: g = 4, m = -.5 g = -2, x = 8 + .5 m - .5 g = 5. Again: g = 4, m = -3."""

    def work(kv: aiokv.KVStore) -> list[float]:
        x = np.array([8.0])
        rule = {"learning_rate": 0.5, "momentum": 0.5}
        local = aiokv.LocalSGD(kv, {"x": x}, every=2, outer_optimizer="nag", outer_params=rule)
        seen = []
        for _ in range(2):
            for _ in range(2):
                x -= 1 + 2 * kv.rank
                local.step()
            seen.append(float(x[0]))
        return seen

    assert on_cluster(work, servers=2) == [[5.0, 1.5]] * 2


def test_workers_with_other_numbers_of_steps_end_with_the_same_parameters(on_cluster: OnCluster) -> None:
    """Rank 0 makes five steps of 1, rank 1 three of 3: (2 + 6) / 2 = 4, then (6 + 7) / 2 = 6.5, then rank 0 alone."""

    def work(kv: aiokv.KVStore) -> list[float]:
        x = np.zeros(1)
        local = aiokv.LocalSGD(kv, {"x": x}, every=2)
        seen = []
        for _ in range([5, 3][kv.rank]):
            x += [1, 3][kv.rank]
            if local.step():
                seen.append(float(x[0]))
        local.finish()
        return [*seen, float(x[0]), float(kv.pull("x")[0])]

    assert on_cluster(work) == [[4, 6.5, 7.5, 7.5], [4, 7.5, 7.5]]


def test_outer_momentum_is_not_moved_by_those_who_wait_for_the_end(on_cluster: OnCluster) -> None:
    """The mean is over those who made steps: rank 1 has finished, so rank 0's move of 2 is the outer gradient.

    Rank 0: 8 to 6, m = -1, x = 8 - .5 - 1 = 6.5. Then to 4.5: m = -.5 - 1 = -1.5, x = 6.5 - .75 - 1 = 4.75.
    """

    def work(kv: aiokv.KVStore) -> float:
        x = np.array([8.0])
        rule = {"learning_rate": 0.5, "momentum": 0.5}
        local = aiokv.LocalSGD(kv, {"x": x}, every=1, outer_optimizer="nag", outer_params=rule)
        for _ in range([2, 0][kv.rank]):
            x -= 2
            local.step()
        local.finish()
        return float(x[0])

    assert on_cluster(work) == [4.75, 4.75]


def test_nobody_waits_for_a_worker_that_leaves_without_finishing(on_cluster: OnCluster) -> None:
    """Both at 1 and 3, the mean is 2; then rank 0 alone makes two more steps of 1."""

    def work(kv: aiokv.KVStore) -> float:
        x = np.zeros(1)
        local = aiokv.LocalSGD(kv, {"x": x}, every=1)
        for _ in range([3, 1][kv.rank]):
            x += 1 + 2 * kv.rank
            local.step()
        if kv.rank == 0:
            local.finish()
        return float(x[0])

    assert on_cluster(work) == [4.0, 2.0]


def test_a_wait_for_a_worker_that_does_not_come_ends_and_names_it(on_cluster: OnCluster) -> None:
    def work(kv: aiokv.KVStore) -> str:
        local = aiokv.LocalSGD(kv, {"x": np.zeros(1)}, every=1, timeout=1.0)
        message = ""
        if kv.rank == 0:
            with pytest.raises(RoundTimeoutError) as caught:
                local.finish()
            message = str(caught.value)
        kv.barrier()
        return message

    assert "worker-1" in on_cluster(work)[0]


@pytest.mark.parametrize("outer", [None, "nag"])
def test_two_runs_have_the_same_bits_on_all_workers(outer: str | None, on_cluster: OnCluster) -> None:
    def work(kv: aiokv.KVStore) -> Any:
        rng = np.random.default_rng(kv.rank)
        params = {"w": np.ones((40, 25), np.float32), "b": np.zeros(7, np.float32)}
        local = aiokv.LocalSGD(kv, params, every=3, outer_optimizer=outer)
        for _ in range(10 + kv.rank):
            for name, value in params.items():
                params[name][...] = value - rng.standard_normal(value.shape, np.float32)
            local.step()
        local.finish()
        return params["w"].tobytes() + params["b"].tobytes()

    first, second = on_cluster(work, 3, servers=2), on_cluster(work, 3, servers=2)
    assert len({*first, *second}) == 1


def test_a_codec_touches_the_outer_gradients_and_no_counts(on_cluster: OnCluster) -> None:
    """Both move by 1, half of which is the threshold: each sends it exactly, so with rate 1 the center moves by 1."""

    def work(kv: aiokv.KVStore) -> float:
        x = np.zeros(20, np.float32)
        kv.set_gradient_compression("2bit", threshold=0.5)
        local = aiokv.LocalSGD(kv, {"x": x}, every=1, outer_optimizer="sgd", outer_params={"learning_rate": 1.0})
        for _ in range(3):
            x -= 1
            local.step()
        local.finish()
        return float(x[7])

    assert on_cluster(work) == [-3.0, -3.0]


# --- elastic averaging ---


def test_synchronous_elastic_averaging_follows_its_closed_form(on_cluster: OnCluster) -> None:
    """A period is an affine map of (x_0, x_1, center): tau steps of each worker, then the exchange."""
    tau, alpha, periods, start = 4, 0.3, 8, 7.0

    def work(kv: aiokv.KVStore) -> Any:
        x = np.array([start])
        elastic = aiokv.ElasticAveraging(kv, {"x": x}, every=tau, alpha=alpha, synchronous=True)
        for _ in range(periods * tau):
            descend(x, kv.rank)
            elastic.step()
        return float(x[0]), float(elastic.center()["x"][0])

    kept = (1 - RATE * A) ** tau
    local = np.diag([*kept, 1.0])
    shift = np.array([*(TARGET * (1 - kept)), 0.0])
    exchange = np.array([[1 - alpha, 0, alpha], [0, 1 - alpha, alpha], [alpha, alpha, 1 - 2 * alpha]])
    fixed_point = np.linalg.solve(np.eye(3) - exchange @ local, exchange @ shift)
    x0, x1, center = fixed_point + np.linalg.matrix_power(exchange @ local, periods) @ (start - fixed_point)
    np.testing.assert_allclose(on_cluster(work), [(x0, center), (x1, center)], rtol=1e-12)


def test_elastic_averaging_in_turns_by_hand(on_cluster: OnCluster) -> None:
    """Nobody waits: rank 0 exchanges before and after rank 1, from a center of 8, with alpha = 1/4.

    Rank 0 at 4: d = -1, so 5 and 7. Rank 1 at 15: d = (15 - 7) / 4 = 2, so 13 and 9. Rank 0 at 5 - 4: d = -2, 3 and 7.
    """

    def work(kv: aiokv.KVStore) -> Any:
        x = np.array([8.0])
        elastic = aiokv.ElasticAveraging(kv, {"x": x}, every=1, alpha=0.25)
        kv.barrier("all begin at 8")
        for turn, (rank, move) in enumerate([(0, -4), (1, 7), (0, -4)]):
            if kv.rank == rank:
                x += move
                elastic.step()
            kv.barrier(f"turn {turn}")
        return float(x[0]), float(elastic.center()["x"][0])

    assert on_cluster(work) == [(3, 7), (13, 7)]


def test_who_comes_late_begins_at_the_center(on_cluster: OnCluster) -> None:
    """Rank 0 has gone from 8 to 0, and the center half of the way, before rank 1 asks."""

    def work(kv: aiokv.KVStore) -> float:
        x = np.array([8.0])
        if kv.rank == 1:
            kv.barrier("rank 0 has moved the center")
        elastic = aiokv.ElasticAveraging(kv, {"x": x}, every=1, alpha=0.5)
        if kv.rank == 0:
            x -= 8
            elastic.step()
            kv.barrier("rank 0 has moved the center")
        return float(x[0])

    assert on_cluster(work) == [4.0, 4.0]


def test_elastic_exchanges_of_many_keep_the_sum_of_workers_and_center(on_cluster: OnCluster) -> None:
    """Whatever the order: what a worker gives away, the center gets. In the beginning the sum is 3 i + (0 + 1 + 2)."""

    def work(kv: aiokv.KVStore) -> Any:
        x = np.zeros(50)
        elastic = aiokv.ElasticAveraging(kv, {"x": x}, every=1)
        kv.barrier("all begin at 0")
        x += kv.rank + np.arange(50)
        for _ in range(20):
            elastic.step()
        kv.barrier("all are done")
        return x, elastic.center()["x"]

    results = on_cluster(work, 3, servers=2)
    total = sum(x for x, _ in results) + results[0][1]
    np.testing.assert_allclose(total, 3 * np.arange(50.0) + 3, rtol=1e-12)


# --- balanced batches ---


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_all_workers_compute_the_same_sizes_from_the_speeds_of_all(policy: str, on_cluster: OnCluster) -> None:
    """50 samples in 1 s and in 4 s: 80 to 20. Rank 1 then takes 3.2 s for 20: half of 6.25 + half of 12.5 = 9.375.

    Rank 0 is as fast as before, so its share is 50 / 59.375 of 100 = 84.2.
    """

    def work(kv: aiokv.KVStore) -> Any:
        kv.init("other", np.zeros(2, np.float32))
        kv.set_gradient_compression("2bit", threshold=0.5)
        balancer = aiokv.BatchBalancer(kv, 100, every=1, weight=0.5)
        seen = [balancer.batch_sizes]
        for seconds in ([1.0, 1.6], [4.0, 3.2])[kv.rank]:
            assert balancer.step(seconds)
            seen.append(balancer.batch_sizes)
        return seen, balancer.batch_size

    sizes = [[50, 50], [80, 20], [84, 16]]
    assert on_cluster(work, policy=policy) == [(sizes, 84), (sizes, 16)]


def test_sizes_come_to_rest_where_all_workers_take_the_same_time(on_cluster: OnCluster) -> None:
    speeds = [30.0, 60.0, 10.0]

    def work(kv: aiokv.KVStore) -> Any:
        balancer = aiokv.BatchBalancer(kv, 200, every=3)
        for _ in range(12):
            balancer.step(balancer.batch_size / speeds[kv.rank])
        return balancer.batch_sizes

    assert on_cluster(work, 3) == [[60, 120, 20]] * 3


def test_samples_of_a_worker_that_has_finished_go_to_the_others(on_cluster: OnCluster) -> None:
    def work(kv: aiokv.KVStore) -> Any:
        balancer = aiokv.BatchBalancer(kv, 90, every=1)
        if kv.rank == 2:
            kv.finish()
            return None
        balancer.step(1.0)
        return balancer.batch_sizes

    assert on_cluster(work, 3)[:2] == [[45, 45, 0]] * 2


@pytest.mark.parametrize("way", ["sum", "mean", "trainer"])
def test_the_update_is_that_of_the_mean_over_all_samples(way: str, on_cluster: OnCluster) -> None:
    """One step from w = 0 with rate .5 on the loss (w - y)**2 / 2: w is half of the mean of all 10 y."""
    y = np.arange(10.0) ** 2
    parts = [y[:8], y[8:]]

    def work(kv: aiokv.KVStore) -> float:
        w = np.zeros(1)
        balancer = aiokv.BatchBalancer(kv, 10, every=1)
        balancer.step([1.0, 4.0][kv.rank])
        mine = parts[kv.rank]
        assert len(mine) == balancer.batch_size
        gradients = w - mine
        if way == "trainer":
            trainer = aiokv.Trainer({"w": w}, "sgd", {"learning_rate": 0.5 / kv.num_workers}, kvstore=kv)
            trainer.step(balancer.total / kv.num_workers, {"w": gradients.sum(keepdims=True)})
            return float(w[0])
        kv.init("w", w)
        scale = 1 / balancer.total if way == "sum" else 1.0
        kv.set_optimizer("sgd", learning_rate=0.5, rescale_grad=scale)
        pushed = gradients.sum() if way == "sum" else balancer.weight * gradients.mean()
        return float(kv.pushpull("w", np.array([pushed]))[0])

    np.testing.assert_allclose(on_cluster(work), y.mean() / 2, rtol=1e-12)
