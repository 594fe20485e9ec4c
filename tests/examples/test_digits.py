"""The digits example: its network is right, it learns in every mode, and sync training repeats itself bit by bit."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rich.console import Console

from examples import digits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from subprocess import CompletedProcess

    Weights = dict[str, digits.Floats]

SEEDS = range(5)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """As in the script."""
    digits.use_one_thread()


# --- a cluster in memory ---


class MemoryCluster:
    """What servers do, in a fixed order: sync sums in the order of ranks, async takes the workers in turns."""

    def __init__(self, num_workers: int, *, sync: bool) -> None:
        self.num_workers = num_workers
        self.sync = sync
        self.weights: Weights = {}
        self.momenta: Weights = {}
        self.rule: dict[str, float] = {}
        self.pushed: dict[int, Weights] = {}
        self.turn = 0
        self.turned = threading.Condition()
        self.closed = threading.Barrier(num_workers, action=self.close_round, timeout=20)
        self.met = threading.Barrier(num_workers, timeout=20)

    def update(self, gradients: Weights) -> None:
        """Take one step of gradient descent with momentum."""
        for name, gradient in gradients.items():
            step = self.rule["learning_rate"] * self.rule["rescale_grad"] * gradient
            self.momenta[name] = (self.rule["momentum"] * self.momenta[name] - step).astype(np.float32)
            self.weights[name] = self.weights[name] + self.momenta[name]

    def close_round(self) -> None:
        """Update with the sum of what all workers pushed."""
        ranks = range(self.num_workers)
        self.update({name: reduce(np.add, [self.pushed[rank][name] for rank in ranks]) for name in self.weights})


class MemoryStore:
    """One worker's view of a `MemoryCluster`: the part of the store's interface that the example uses."""

    def __init__(self, cluster: MemoryCluster, rank: int) -> None:
        self.cluster = cluster
        self.rank = rank
        self.num_workers = cluster.num_workers

    def init(self, values: Weights) -> None:
        if self.rank == 0:
            self.cluster.weights = {name: value.copy() for name, value in values.items()}
            self.cluster.momenta = {name: np.zeros_like(value) for name, value in values.items()}
        self.cluster.met.wait()

    def set_optimizer(self, name: str, **params: float) -> None:
        assert name == "sgd"
        self.cluster.rule = params

    def pushpull(self, gradients: Weights, *, out: Weights) -> None:
        cluster = self.cluster
        if cluster.sync:
            cluster.pushed[self.rank] = gradients
            cluster.closed.wait()
            self.pull(out)
            return
        with cluster.turned:
            assert cluster.turned.wait_for(lambda: cluster.turn == self.rank, timeout=20)
            cluster.update(gradients)
            self.pull(out)
            cluster.turn = (cluster.turn + 1) % self.num_workers
            cluster.turned.notify_all()

    def pull(self, out: Weights) -> None:
        for name, array in out.items():
            array[...] = self.cluster.weights[name]

    def barrier(self) -> None:
        self.cluster.met.wait()


def train(num_workers: int, seed: int, *, sync: bool = True, epochs: int | None = None) -> list[digits.Result]:
    """Train in memory with the example's own settings; return every worker's result."""
    argv = ["--seed", str(seed), *(["--epochs", str(epochs)] if epochs else [])]
    options = digits.arguments(argv)
    training, held_out = digits.load(seed)
    cluster = MemoryCluster(num_workers, sync=sync)

    def work(rank: int) -> digits.Result:
        store: Any = MemoryStore(cluster, rank)
        return digits.train(store, options, training, held_out, Console(quiet=True))

    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(work, range(num_workers)))


# --- the network ---


def random_batch(count: int) -> digits.Digits:
    rng = np.random.default_rng(1)
    return digits.Digits(rng.random((count, 64)), rng.integers(0, digits.CLASSES, count))


def exact(weights: Weights) -> Weights:
    return {name: value.astype(np.float64) for name, value in weights.items()}


def test_knowing_nothing_costs_the_logarithm_of_ten_per_image() -> None:
    weights = {name: np.zeros_like(value) for name, value in digits.new_weights(0).items()}
    loss, _ = digits.loss_and_gradients(weights, random_batch(7))
    assert loss == pytest.approx(7 * np.log(10))


@pytest.mark.parametrize("name", ["w1", "b1", "w2", "b2"])
def test_the_gradient_is_the_slope_of_the_loss(name: str) -> None:
    batch = random_batch(5)
    weights = exact(digits.new_weights(2))
    rng = np.random.default_rng(3)
    _, gradients = digits.loss_and_gradients(weights, batch)
    for _ in range(20):
        place = tuple(rng.integers(weights[name].shape))
        value = weights[name][place]
        losses = []
        for nudge in (1e-6, -1e-6):
            weights[name][place] = value + nudge
            losses.append(digits.loss_and_gradients(weights, batch)[0])
        weights[name][place] = value
        assert gradients[name][place] == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-4, abs=1e-7)


def test_gradients_have_the_shape_and_type_of_their_weights() -> None:
    weights = digits.new_weights(0)
    training, _ = digits.load(0)
    _, gradients = digits.loss_and_gradients(weights, training[:3])
    assert {name: (g.shape, g.dtype) for name, g in gradients.items()} == {
        name: (w.shape, w.dtype) for name, w in weights.items()
    }


def test_large_scores_do_not_overflow() -> None:
    weights = {name: value * 1e4 for name, value in exact(digits.new_weights(0)).items()}
    loss, gradients = digits.loss_and_gradients(weights, random_batch(4))
    assert np.isfinite(loss)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())


def test_one_changed_bit_changes_the_fingerprint() -> None:
    weights = digits.new_weights(0)
    before = digits.fingerprint(weights)
    weights["b2"][9] = np.nextafter(weights["b2"][9], np.float32(1))
    assert digits.fingerprint(weights) != before


# --- the images ---


def sorted_rows(*parts: digits.Digits) -> list[list[float]]:
    return sorted(np.concatenate([part.images for part in parts]).tolist())


def test_every_image_is_either_trained_on_or_held_out() -> None:
    training, held_out = digits.load(0)
    assert (len(training), len(held_out)) == (1438, 359)
    # The same images in another split: nothing is lost and nothing counted twice.
    assert sorted_rows(training, held_out) == sorted_rows(*digits.load(1))


def test_workers_with_the_same_seed_hold_out_the_same_images() -> None:
    first, second = digits.load(4)[1], digits.load(4)[1]
    assert first.images.tolist() == second.images.tolist()
    assert first.labels.tolist() == second.labels.tolist()


def test_an_epoch_sees_no_image_twice() -> None:
    numbered = digits.Digits(np.zeros((100, 64)), np.arange(100))
    seen = np.concatenate([batch.labels for batch in digits.batches(numbered, 30, 3, np.random.default_rng(0))])
    assert len(seen) == len(set(seen.tolist())) == 90


def test_another_epoch_leaves_other_images_over() -> None:
    numbered = digits.Digits(np.zeros((100, 64)), np.arange(100))
    rng = np.random.default_rng(0)
    epochs = [
        {int(label) for batch in digits.batches(numbered, 30, 3, rng) for label in batch.labels} for _ in range(2)
    ]
    assert epochs[0] != epochs[1]


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match=r"pip install 'aiokv\[examples\]'"):
        digits.load(0)


# --- training, in memory ---


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("num_workers", "sync"), [(1, True), (2, True), (2, False), (4, True), (4, False)])
def test_it_learns_whatever_the_seed(num_workers: int, sync: bool, seed: int) -> None:
    results = train(num_workers, seed, sync=sync)
    assert min(result.accuracy for result in results) >= digits.GOOD_ENOUGH


@pytest.mark.parametrize("sync", [True, False])
def test_all_workers_end_with_the_same_weights(sync: bool) -> None:
    first, second = train(2, 0, sync=sync, epochs=2)
    assert first.weights == second.weights


def test_the_same_seed_gives_the_same_weights_in_sync() -> None:
    assert train(2, 7, epochs=3)[0].weights == train(2, 7, epochs=3)[0].weights


def test_another_seed_gives_other_weights() -> None:
    assert train(2, 7, epochs=1)[0].weights != train(2, 8, epochs=1)[0].weights


def test_the_loss_falls() -> None:
    epochs = train(2, 0, epochs=5)[0].epochs
    assert [epoch.number for epoch in epochs] == [1, 2, 3, 4, 5]
    assert epochs[-1].loss < epochs[0].loss / 2


def test_a_batch_that_no_worker_can_fill_is_refused() -> None:
    training, held_out = digits.load(0)
    store: Any = MemoryStore(MemoryCluster(2, sync=True), 0)
    with pytest.raises(SystemExit, match="719 images per worker do not fill a batch: use --batch-size 719 or less"):
        digits.train(store, digits.arguments(["--batch-size", "720"]), training, held_out, Console(quiet=True))


@pytest.mark.parametrize("option", ["--epochs", "--batch-size"])
def test_counts_below_one_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        digits.arguments([option, "0"])
    assert f"argument {option}: expected 1 or more, got 0" in capsys.readouterr().err


# --- the script ---


def test_it_runs_alone(run_example: Callable[..., CompletedProcess[str]]) -> None:
    done = run_example("digits.py")
    assert done.returncode == 0, done.stderr
    assert "held-out accuracy 0.9" in done.stdout


def test_where_no_bar_can_move_every_epoch_is_one_line(run_example: Callable[..., CompletedProcess[str]]) -> None:
    done = run_example("digits.py", "--epochs", "3")
    lines = [line.split() for line in done.stdout.splitlines()]
    rows = [(line[0], line[-1]) for line in lines if line and line[0].isdigit() and line[-1].endswith("%")]
    assert rows == [("1", "33%"), ("2", "66%"), ("3", "100%")]
    assert "\x1b" not in done.stdout


def test_too_little_training_ends_with_1_and_says_what_to_do(
    run_example: Callable[..., CompletedProcess[str]],
) -> None:
    done = run_example("digits.py", "--epochs", "1", "--batch-size", "500")
    assert done.returncode == 1
    assert "is below 0.95: train for more --epochs" in done.stderr


def test_json_is_all_that_it_prints(run_example: Callable[..., CompletedProcess[str]]) -> None:
    done = run_example("digits.py", "--json")
    result = json.loads(done.stdout)
    assert (result["store"], result["workers"], len(result["epochs"])) == ("local", 1, 20)
    assert result["accuracy"] >= digits.GOOD_ENOUGH


def train_on_cluster(
    store: str, file: Path, run_example_on_cluster: Callable[..., CompletedProcess[str]]
) -> dict[str, Any]:
    """Train with two workers; return what rank 0 says, when it has learned enough."""
    done = run_example_on_cluster("digits.py", "--store", store, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert (result["store"], result["workers"]) == (store, 2)
    assert result["accuracy"] >= digits.GOOD_ENOUGH
    return result


def test_it_learns_on_a_cluster_asynchronously(
    tmp_path: Path, run_example_on_cluster: Callable[..., CompletedProcess[str]]
) -> None:
    train_on_cluster("dist_async", tmp_path / "result.json", run_example_on_cluster)


def test_sync_training_on_a_cluster_learns_and_repeats_itself_bit_by_bit(
    tmp_path: Path, run_example_on_cluster: Callable[..., CompletedProcess[str]]
) -> None:
    results = [
        train_on_cluster("dist_sync", tmp_path / name, run_example_on_cluster) for name in ("first.json", "second.json")
    ]
    assert results[0]["weights"] == results[1]["weights"]
