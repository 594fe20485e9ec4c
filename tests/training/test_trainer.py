"""The trainer: the numbers of its steps, on this process and on clusters, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import (
    ClosedError,
    ConfigError,
    DataError,
    KeyUseError,
    SpecMismatchError,
    UnknownKeyError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

torch: Any = pytest.importorskip("torch")

RATE_1: Any = {"learning_rate": 1.0}


def full(value: float, *shape: int) -> Any:
    return np.full(shape or (10, 1), value, "float32")


@contextlib.contextmanager
def running_cluster(workers: int, servers: int) -> Iterator[str]:
    """Run scheduler and servers in a thread; yields the scheduler's address."""
    started: threading.Event = threading.Event()
    found: list[Any] = []

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            node: Any = aiokv.Scheduler(num_workers=workers, num_servers=servers, bind_port=0)
            scheduler = await stack.enter_async_context(node)
            for _ in range(servers):
                await stack.enter_async_context(aiokv.Server(scheduler=scheduler.address, backend="reference"))
            found.extend([scheduler.address, asyncio.get_running_loop(), asyncio.Event()])
            started.set()
            await found[2].wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert started.wait(20)
        yield found[0]
    finally:
        found[1].call_soon_threadsafe(found[2].set)
        thread.join()


def on_cluster(
    work: Callable[[aiokv.KVStore], Any], workers: int, *, servers: int = 1, policy: str = "bsp"
) -> list[Any]:
    """Let every worker of a cluster do some work, each in a thread; return the results by rank."""

    def one(rank: int) -> Any:
        with aiokv.blocking.connect(address, name=f"worker-{rank}", policy=policy, call_timeout=20.0) as kv:
            return work(kv)

    with running_cluster(workers, servers) as address, ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, range(workers)))


# --- steps on a cluster ---


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_step_of_seven_workers(update_on_kvstore: bool) -> None:
    """MXNet's nightly test: ones of (10, 1), gradients r + 1, rate 1: 1 - n (n + 1) / 2."""

    def work(kv: aiokv.KVStore) -> Any:
        params = {"w": full(1)}
        trainer = aiokv.Trainer(params, "sgd", RATE_1, kvstore=kv, update_on_kvstore=update_on_kvstore)
        assert trainer.update_on_kvstore is update_on_kvstore
        trainer.step(1, {"w": full(kv.rank + 1)})
        return params["w"]

    for weight in on_cluster(work, 7):
        np.testing.assert_array_equal(weight, full(-27))


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_workers_with_batches_of_their_own_sizes_end_with_the_same_bits(update_on_kvstore: bool) -> None:
    """Each mean counts once: -(6 / 3 + 10 / 5), then -(7 / 7 + 8 / 2); rank 0's first batch size is the unit."""

    def work(kv: aiokv.KVStore) -> Any:
        params = {"w": full(0), "b": full(0, 2)}
        trainer = aiokv.Trainer(params, "sgd", RATE_1, kvstore=kv, update_on_kvstore=update_on_kvstore)
        for batch_size, value in [(3, 6), (7, 7)] if kv.rank == 0 else [(5, 10), (2, 8)]:
            trainer.step(batch_size, {"w": full(value), "b": full(value, 2)})
        return params["w"].tobytes(), params["w"][0, 0]

    first, second = on_cluster(work, 2)
    assert first[0] == second[0]
    assert first[1] == pytest.approx(-9, rel=1e-6)


def test_scenario_19_new_learning_rate_reaches_the_servers() -> None:
    """Scenario 19: rate 1, then .5; with two workers that push 1."""

    def work(kv: aiokv.KVStore) -> list[float]:
        params = {"w": full(0, 1)}
        trainer = aiokv.Trainer(params, "sgd", RATE_1, kvstore=kv)
        seen = []
        for rate in (1.0, 1.0, 0.5):
            if rate != trainer.learning_rate:
                trainer.set_learning_rate(rate)
            trainer.step(1, {"w": full(1, 1)})
            seen.append(float(params["w"][0]))
        return seen

    assert on_cluster(work, 2) == [[-2.0, -4.0, -5.0]] * 2


def test_scenario_50_all_begin_with_the_values_of_rank_0_whatever_the_order_of_their_dicts() -> None:

    def work(kv: aiokv.KVStore) -> list[float]:
        names = ["a", "b"] if kv.rank == 0 else ["b", "a"]
        params = {name: full(10 * kv.rank + ord(name), 3) for name in names}
        trainer = aiokv.Trainer(params, "sgd", RATE_1, kvstore=kv)
        trainer.step(1, {name: full(1 if name == "a" else 2, 3) for name in reversed(names)})
        return [float(params[name][0]) for name in "ab"]

    assert on_cluster(work, 2) == [[ord("a") - 2.0, ord("b") - 4.0]] * 2


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_scenario_57_overflow_of_one_worker_is_a_step_that_no_worker_makes(update_on_kvstore: bool) -> None:
    """Scenario 57, and MXNet's overflow that was noticed only after it was merged."""

    def work(kv: aiokv.KVStore) -> Any:
        params = {"w": full(0, 2)}
        trainer = aiokv.Trainer(
            params, "sgd", RATE_1, kvstore=kv, update_on_kvstore=update_on_kvstore, loss_scale="dynamic"
        )
        made, scales = [], []
        for bad in (None, 1, None):
            gradient = full(trainer.loss_scale, 2)
            if bad == kv.rank:
                gradient[1] = np.nan
            made.append(trainer.step(1, {"w": gradient}))
            scales.append(trainer.loss_scale)
        return made, scales, params["w"].tolist()

    expected = [True, False, True], [65536.0, 32768.0, 32768.0], [-4.0, -4.0]
    assert on_cluster(work, 2) == [expected, expected]


def test_async_worker_with_an_overflow_leaves_only_its_own_step_out() -> None:
    def work(kv: aiokv.KVStore) -> Any:
        params = {"w": full(0, 2)}
        trainer = aiokv.Trainer(params, "sgd", RATE_1, kvstore=kv, loss_scale=4.0)
        made = trainer.step(1, {"w": full(np.inf if kv.rank else 4, 2)})
        kv.barrier()
        return made, trainer.counters["step_left_out"], kv.pull("w").tolist()

    assert on_cluster(work, 2, policy="asp") == [(True, 0, [-1.0, -1.0]), (False, 1, [-1.0, -1.0])]


def test_servers_reduce_to_the_median() -> None:
    """Of -1, -2 and -100 with rate 1."""

    def work(kv: aiokv.KVStore) -> Any:
        params = {"w": full(0, 2)}
        trainer = aiokv.Trainer(params, "sgd", RATE_1, kvstore=kv, reduction="median")
        trainer.step(1, {"w": full((1, 100, 2)[kv.rank], 2)})
        return params["w"].tolist()

    assert on_cluster(work, 3) == [[-2.0, -2.0]] * 3


def test_servers_multiply_by_the_staleness() -> None:
    """One worker's gradient of 1 is one update old, its next one is new, the other's one of 6 is two old."""

    def work(kv: aiokv.KVStore) -> Any:
        params = {"w": full(0, 2)}
        trainer = aiokv.Trainer(params, "sgd", RATE_1, kvstore=kv, staleness_rate="1/(1+tau)")
        for rank, gradients in [(0, [0]), (1, [0]), (0, [1, 1]), (1, [6])]:
            if kv.rank == rank:
                for value in gradients:
                    trainer.step(1, {"w": full(value, 2)})
            kv.barrier()
        return params["w"].tolist()

    assert on_cluster(work, 2, policy="asp")[1] == [-1 / 2 - 1 - 6 / 3] * 2


# --- steps in this process ---


@pytest.fixture(params=["alone", "servers", "workers"])
def local(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The places of an update, without a network."""
    options: dict[str, dict[str, Any]] = {
        "alone": {"kvstore": None},
        "servers": {"kvstore": "local", "update_on_kvstore": True},
        "workers": {"kvstore": aiokv.LocalStore(), "update_on_kvstore": False},
    }
    return options[request.param]


def test_scenario_20_another_batch_size_scales_and_is_no_error(local: dict[str, Any]) -> None:
    """Scenario 20: step(10) with 10, step(20) with 20, rate 1."""
    params = {"w": full(0, 1)}
    seen = []
    with aiokv.Trainer(params, "sgd", RATE_1, **local) as trainer:
        for size in (10, 20):
            trainer.step(size, {"w": full(size, 1)})
            seen.append(float(params["w"][0]))
    assert seen == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, [0.949, 0.852151, 0.789134749]),
        ("adam", {}, [0.9990000006324551, 0.9980000010797804, 0.9974843478915586]),
    ],
)
def test_rules_give_the_same_numbers_everywhere(
    name: str, params: dict[str, Any], expected: list[float], local: dict[str, Any]
) -> None:
    """Golden traces of MXNet's rules."""
    weights = {"w": np.ones(3)}
    trainer = aiokv.Trainer(weights, name, params, **local)
    seen = []
    for gradient in (0.5, 0.5, -0.25):
        trainer.step(1, {"w": np.full(3, gradient)})
        seen.append(weights["w"][0])
    np.testing.assert_allclose(seen, expected, rtol=1e-12, atol=0)


def test_steps_that_are_added_up_make_one_update_over_all_their_samples(local: dict[str, Any]) -> None:
    params = {"w": full(0, 2)}
    trainer = aiokv.Trainer(params, "sgd", RATE_1, grad_accumulation=3, **local)
    gradient = full(0, 2)
    made = []
    for size in (1, 2, 3, 1, 2, 3):
        gradient[:] = size
        made.append(trainer.step(size, {"w": gradient}))
    assert made == [False, False, True] * 2
    np.testing.assert_array_equal(params["w"], full(-2, 2))


def test_schedule_is_that_of_updates(local: dict[str, Any]) -> None:
    """MXNet's unit test: Factor(2, .1), ten steps; after step i, even, the rate is .1 ** (i / 2)."""
    schedule = {"name": "factor", "step": 2, "factor": 0.1}
    trainer = aiokv.Trainer({"w": full(0, 1)}, "sgd", {**RATE_1, "schedule": schedule}, **local)
    rates = []
    for _ in range(10):
        trainer.step(1, {"w": full(1, 1)})
        rates.append(trainer.learning_rate)
    np.testing.assert_allclose(rates[::2], [0.1**i for i in range(5)], rtol=1e-12)


def test_rule_that_needs_the_norm_of_whole_tensors_has_it() -> None:
    """LARS: rate times eta |w| / (|g| + epsilon), with |w| = 2 and |g| = 4 over the whole matrix."""
    params = {"w": full(1, 2, 2)}
    trainer = aiokv.Trainer(params, "lars", {"learning_rate": 1.0, "eta": 0.5}, kvstore=None)
    trainer.step(1, {"w": full(2, 2, 2)})
    np.testing.assert_allclose(params["w"], full(1 - 0.25 * 2, 2, 2), rtol=1e-5)


def test_global_norm_is_limited_over_all_parameters(local: dict[str, Any]) -> None:
    """The mean gradient is (3, 4), with norm 5; at most 1: (.6, .8). One of norm .5 stays."""
    params = {"a": full(0, 1), "b": full(0, 1)}
    trainer = aiokv.Trainer(params, "sgd", RATE_1, clip_norm=1.0, **local)
    trainer.step(2, {"a": full(6, 1), "b": full(8, 1)})
    np.testing.assert_allclose([params["a"][0], params["b"][0]], [-0.6, -0.8], rtol=1e-6)
    trainer.step(2, {"a": full(0.6, 1), "b": full(0.8, 1)})
    np.testing.assert_allclose([params["a"][0], params["b"][0]], [-0.9, -1.2], rtol=1e-6)


def test_gradients_that_are_not_numbers_make_no_step(local: dict[str, Any]) -> None:
    params = {"w": full(1, 2)}
    trainer = aiokv.Trainer(params, "adam", clip_norm=1.0, **local)
    assert not trainer.step(1, {"w": full(np.nan, 2)})
    assert not trainer.step(1, {"w": full(np.inf, 2)})
    np.testing.assert_array_equal(params["w"], full(1, 2))


def test_sum_that_overflows_only_in_the_gradients_own_precision_is_noticed() -> None:
    params = {"w": np.zeros(2, np.float16)}
    trainer = aiokv.Trainer(params, "sgd", RATE_1, kvstore=aiokv.LocalStore(), loss_scale=1.0, grad_accumulation=2)
    for _ in range(2):
        assert not trainer.step(1, {"w": np.full(2, 40000, np.float16)})
    np.testing.assert_array_equal(params["w"], [0, 0])


def test_dynamic_loss_scale_grows_after_2000_good_steps() -> None:
    trainer = aiokv.Trainer({"w": full(0, 1)}, "sgd", kvstore=None, loss_scale="dynamic", backend="reference")
    gradients = {"w": full(0, 1)}
    for _ in range(1999):
        trainer.step(1, gradients)
    assert trainer.loss_scale == 2.0**16
    trainer.step(1, gradients)
    assert trainer.loss_scale == 2.0**17


# --- several devices ---


def test_two_devices() -> None:
    """MXNet's unit test: gradients of 1, rate 1, momentum .5: -2; then at half the rate -4."""
    params = {"x": [full(0, 10), full(0, 10)]}
    trainer = aiokv.Trainer(params, "sgd", {**RATE_1, "momentum": 0.5}, kvstore="local")
    gradients = {"x": [full(1, 10), full(1, 10)]}
    trainer.step(1, gradients)
    for replica in params["x"]:
        np.testing.assert_array_equal(replica, full(-2, 10))
    trainer.set_learning_rate(0.5)
    trainer.step(1, gradients)
    for replica in params["x"]:
        np.testing.assert_array_equal(replica, full(-4, 10))
    with pytest.raises(ConfigError, match=r"update\(\) is for .* here the servers make them"):
        trainer.update(1, gradients)
    with pytest.raises(ConfigError, match=r"allreduce_grads\(\) is for"):
        trainer.allreduce_grads(gradients)


def test_scenario_83_gradients_of_devices_are_one_update_of_adam() -> None:
    """Scenario 83: t is 1 after one step, so the step is the learning rate."""
    params = {"x": full(0, 2)}
    trainer = aiokv.Trainer(params, "adam", {"learning_rate": 0.25}, kvstore=aiokv.LocalStore())
    trainer.step(1, {"x": [full(1, 2), full(2, 2)]})
    np.testing.assert_allclose(params["x"], full(-0.25, 2), rtol=1e-6)


def test_summing_and_updating_one_after_the_other() -> None:
    """MXNet's unit test: the gradients of two devices differ, are equal after the exchange, and x is -1."""
    params = {"x": [full(0, 10), full(0, 10)]}
    trainer = aiokv.Trainer(params, "sgd", RATE_1, kvstore="local", update_on_kvstore=False)
    gradients = {"x": [full(0.25, 10), full(0.75, 10)]}
    trainer.allreduce_grads(gradients)
    for gradient in gradients["x"]:
        np.testing.assert_array_equal(gradient, full(1, 10))
    assert trainer.update(1, gradients)
    for replica in params["x"]:
        np.testing.assert_array_equal(replica, full(-1, 10))


# --- PyTorch ---


def test_tensors_of_pytorch_are_trained_where_they_lie(local: dict[str, Any]) -> None:
    """A linear model: the gradient of sum(w x) is x."""
    model = torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    place = model.weight.data_ptr()
    trainer = aiokv.Trainer(dict(model.named_parameters()), "sgd", RATE_1, **local)
    model(torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])).sum().backward()
    gradient = model.weight.grad.clone()
    trainer.step(2)
    assert model.weight.data_ptr() == place
    assert model.weight.tolist() == [[-1.0, -2.0, -3.0]]
    assert torch.equal(model.weight.grad, gradient), "gradients are only read"


def test_many_steps_are_those_of_pytorchs_own_optimizer(local: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    ours = torch.nn.Parameter(torch.randn(4, 5, generator=generator))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    trainer = aiokv.Trainer({"w": ours}, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, **local)
    for _ in range(20):
        ours.grad = torch.randn(4, 5, generator=generator)
        theirs.grad = ours.grad.clone()
        trainer.step(1)
        optimizer.step()
    np.testing.assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_parameter_with_two_names_is_updated_once() -> None:
    shared = torch.nn.Parameter(torch.zeros(2))
    trainer = aiokv.Trainer({"b": shared, "a": shared}, "sgd", RATE_1, kvstore=None)
    shared.grad = torch.ones(2)
    trainer.step(1)
    assert shared.tolist() == [-1.0, -1.0]


def test_gradients_of_replicas_in_pytorch() -> None:
    replicas = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    trainer = aiokv.Trainer({"w": replicas}, "sgd", RATE_1, kvstore="local")
    replicas[0].grad = torch.ones(2)
    with pytest.raises(KeyUseError, match="no gradient of 'w'"):
        trainer.step(1)
    replicas[1].grad = torch.full((2,), 2.0)
    trainer.step(1)
    assert [replica.tolist() for replica in replicas] == [[-3.0, -3.0]] * 2


# --- states ---


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_training_goes_on_from_a_file_as_if_it_had_not_stopped(rule: str, tmp_path: Path) -> None:
    params = {"learning_rate": 0.1} | ({"momentum": 0.9} if rule == "sgd" else {})
    file = str(tmp_path / "states.safetensors")
    weights = {"w": full(1, 3)}
    first = aiokv.Trainer(weights, rule, params, kvstore=None)
    first.step(1, {"w": full(1, 3)})
    first.set_learning_rate(0.05)
    first.save_states(file)
    copies = {"w": weights["w"].copy()}
    second = aiokv.Trainer(copies, rule, params, kvstore=None)
    second.load_states(file)
    assert second.learning_rate == 0.05
    for trainer in (first, second):
        trainer.step(1, {"w": full(-2, 3)})
    np.testing.assert_array_equal(copies["w"], weights["w"])


def test_states_of_a_rule_without_a_rate_can_be_kept_too(tmp_path: Path) -> None:
    file = str(tmp_path / "states.safetensors")
    weights = {"w": full(1, 3)}
    trainer = aiokv.Trainer(weights, "accumulate", kvstore=None)
    trainer.step(1, {"w": full(1, 3)})
    trainer.save_states(file)
    trainer.load_states(file)
    trainer.step(1, {"w": full(1, 3)})
    np.testing.assert_array_equal(weights["w"], full(3, 3))


def test_states_of_something_else_are_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "states.safetensors")
    trainer = aiokv.Trainer({"w": full(1, 3)}, "sgd", {"momentum": 0.9}, kvstore=None)
    trainer.step(1, {"w": full(1, 3)})
    trainer.save_states(file)
    for params, rule, error, complaint in [
        ({"w": full(1, 3)}, "adam", DataError, "of optimizer 'sgd', not of 'adam'"),
        ({"w": full(1, 4)}, "sgd", DataError, "the state of 'w' must be"),
        ({"v": full(1, 3)}, "sgd", UnknownKeyError, "'w', which is no parameter"),
    ]:
        other = aiokv.Trainer(params, rule, {"momentum": 0.9} if rule == "sgd" else {}, kvstore=None)
        with pytest.raises(error, match=complaint):
            other.load_states(file)
    with pytest.raises(DataError, match="none: can't be read"):
        trainer.load_states(str(tmp_path / "none"))


# --- what is refused ---


@pytest.mark.parametrize(
    ("gradients", "error", "complaint"),
    [
        (None, KeyUseError, r"no gradient of 'v', 'w': pass them to step\(\)"),
        ({"w": full(1)}, KeyUseError, "no gradient of 'v': give one for every parameter"),
        ({"w": full(1), "v": full(1), "u": full(1)}, KeyUseError, "gradient of 'u', which is no parameter"),
        ({"w": full(1), "v": full(1, 2)}, SpecMismatchError, r"'v' must be float32\[10, 1\], got float32\[2\]"),
    ],
)
def test_gradients_that_do_not_fit(gradients: Any, error: type[Exception], complaint: str) -> None:
    params = {"v": full(1), "w": full(1)}
    trainer = aiokv.Trainer(params, "sgd", kvstore=None)
    with pytest.raises(error, match=complaint):
        trainer.step(1, gradients)
    np.testing.assert_array_equal(params["w"], full(1))


def test_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size must be more than 0, got 0"):
        aiokv.Trainer({"w": full(1)}, kvstore=None).step(0, {"w": full(1)})


def test_store_that_the_trainer_has_made_is_closed_with_it() -> None:
    trainer = aiokv.Trainer({"w": full(0)}, kvstore="local", update_on_kvstore=True)
    trainer.close()
    trainer.close()
    with pytest.raises(ClosedError):
        trainer.step(1, {"w": full(1)})
    with aiokv.LocalStore() as kv:
        aiokv.Trainer({"w": full(0)}, kvstore=kv).close()
        kv.pull("w")


def test_updates_of_the_trainers_own_notice_an_overflow_too() -> None:
    params = {"w": full(0, 1)}
    trainer = aiokv.Trainer(params, "accumulate", kvstore=None, loss_scale="dynamic")
    assert not trainer.update(1, {"w": full(np.inf, 1)})
    assert trainer.loss_scale == 32768
    assert trainer.update(1, {"w": full(32768, 1)})
    assert params["w"][0] == 1.0


# --- compression ---


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_gradients_are_compressed_on_their_way_and_what_was_not_said_follows(update_on_kvstore: bool) -> None:
    """2bit with threshold .5 (scenario 46): .4, .1, .2, .3 are said as 0, .5, 0, .5."""

    def work(kv: aiokv.KVStore) -> Any:
        weights = {"w": full(0.0)}
        trainer = aiokv.Trainer(
            weights,
            "sgd",
            RATE_1,
            kvstore=kv,
            update_on_kvstore=update_on_kvstore,
            compression_params={"type": "2bit", "threshold": 0.5},
            loss_scale=1.0,
        )
        seen = []
        for gradient in (0.4, 0.1, 0.2, 0.3):
            assert trainer.step(1, {"w": full(gradient)}), "the flag of an overflow is not compressed"
            seen.append(float(weights["w"][0, 0]))
        return seen

    assert on_cluster(work, 2) == [[0.0, -1.0, -1.0, -2.0]] * 2
