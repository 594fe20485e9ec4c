"""Stores by name, and the store without a network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiokv
from aiokv import kernels, kvstore
from aiokv.errors import (
    AiokvError,
    AlreadyInitializedError,
    ClosedError,
    ConfigError,
    KeyUseError,
    MissingExtraError,
    OptimizerError,
    RoundTimeoutError,
    SpecMismatchError,
    StoreNameError,
    UnknownKeyError,
)


def full(shape: tuple[int, ...], value: float) -> Any:
    return np.full(shape, value, "float32")


def test_an_unknown_store_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown store 'dist_snyc'; known: local, dist, dist_sync, dist_async, device, "
    ):
        aiokv.create("dist_snyc")


@pytest.mark.parametrize("name", [3, None, b"local"])
def test_the_name_of_a_store_is_a_text(name: Any) -> None:
    with pytest.raises(StoreNameError, match="the name of a store is a text, got"):
        aiokv.create(name)
    assert issubclass(StoreNameError, TypeError)


@pytest.mark.parametrize("name", ["LOCAL", "Device", "device"])
def test_case_does_not_matter(name: str) -> None:
    assert aiokv.create(name, device="cpu").type == name.lower()


@pytest.mark.parametrize("name", list(kvstore.ON_DEVICE))
@pytest.mark.parametrize("error", [MissingExtraError("no package"), ConfigError("no driver")])
def test_without_a_gpu_the_device_stores_say_what_to_do(
    name: str, error: AiokvError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: str) -> None:
        raise error

    monkeypatch.setattr(kernels, "backend_for", refuse)
    with pytest.raises(type(error), match=rf"'{name}' .*{error.message}.*aiokv\[cuda\].*device=\"cpu\""):
        aiokv.create(name)


def test_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown device 'tpu'; known: cpu, cuda"):
        aiokv.create("local", device="tpu")


def test_a_store_of_ones_own_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore, "_factories", dict(kvstore._factories))

    @aiokv.register_store("Mine")
    class Mine(aiokv.LocalStore):
        type = "mine"

    assert isinstance(aiokv.create("MINE", backend="reference"), Mine)
    with pytest.raises(ConfigError, match=r"unknown store 'nope'; known: .*device, .*mine"):
        aiokv.create("nope")
    for taken in ("mine", "LOCAL"):
        with pytest.raises(ConfigError, match=f"there is a store '{taken.lower()}' already"):
            aiokv.register_store(taken, Mine)
    aiokv.register_store("local", Mine, replace=True)
    assert isinstance(aiokv.create(), Mine)
    with pytest.raises(StoreNameError):
        aiokv.register_store(3, Mine)  # type: ignore[arg-type]


def test_what_a_store_can_do() -> None:
    kv = aiokv.create("local")
    assert kv.is_capable("optimizer")
    with pytest.raises(ConfigError, match="unknown capability 'fly'; known: optimizer"):
        kv.is_capable("fly")


def add(key: Any, received: Any, stored: Any) -> None:
    stored += received


def test_an_updater_sees_shapes_and_makes_what_pushpull_returns() -> None:
    kv = aiokv.create("local")
    kv.init({"a": full((2, 3), 1), "n": np.zeros(2, "int32")})

    def updater(key: Any, received: Any, stored: Any) -> None:
        assert received.shape == stored.shape
        stored *= 10
        stored += received
        received[...] = 0

    kv.set_updater(updater)
    pushed = full((2, 3), 2)
    np.testing.assert_array_equal(kv.pushpull("a", pushed), full((2, 3), 12))
    np.testing.assert_array_equal(pushed, full((2, 3), 2))
    np.testing.assert_array_equal(kv.pushpull("n", np.ones(2, "int32")), [1, 1])


def test_an_updater_that_fails_changes_nothing() -> None:
    kv = aiokv.create("local")
    kv.init("w", full((2,), 1))

    def updater(key: Any, received: Any, stored: Any) -> None:
        stored += 1
        raise ValueError(key)

    kv.set_updater(updater)
    with pytest.raises(ValueError, match="w"):
        kv.push("w", full((2,), 1))
    np.testing.assert_array_equal(kv.pull("w"), full((2,), 1))


def test_a_store_has_a_rule_or_an_updater() -> None:
    first, second = aiokv.create("local"), aiokv.create("local")
    first.set_updater(add)
    with pytest.raises(OptimizerError, match="an updater already"):
        first.set_optimizer("sgd")
    second.set_optimizer("sgd")
    with pytest.raises(OptimizerError, match="a rule already"):
        second.set_updater(add)
    first.init_rows("rows", (4, 2))
    with pytest.raises(OptimizerError, match="whole arrays"):
        first.push("rows", aiokv.RowSparse.empty((4, 2), "float32"))


def test_a_store_on_a_cluster_takes_no_updater() -> None:
    kv = aiokv.blocking.connect("127.0.0.1:1")
    with pytest.raises(OptimizerError, match=r"a function can't travel .*aiokv\.optim\.own"):
        kv.set_updater(add)


def test_local_is_one_worker() -> None:
    with aiokv.LocalStore() as kv:
        assert (kv.type, kv.rank, kv.num_workers) == ("local", 0, 1)
        kv.barrier()


def test_local_assigns_what_is_pushed() -> None:
    """MXNet's unit test: init, push 4, pull 4; single keys and dicts of them."""
    kv = aiokv.create("local")
    kv.init({"b": full((4, 4), 1), "c": full((4, 4), 1)})
    kv.push({"b": full((4, 4), 4), "c": full((4, 4), 4)})
    for value in kv.pull({"b": None, "c": None}):
        np.testing.assert_array_equal(value, full((4, 4), 4))
    out = full((4, 4), 0)
    assert kv.pull("b", out) is out
    np.testing.assert_array_equal(out, full((4, 4), 4))


def test_local_updates_with_a_rule() -> None:
    """Golden trace of MXNet's rule: w0 = 1, gradients .5, .5, -.25, lr .1, momentum .9, wd .01."""
    kv = aiokv.create("local")
    kv.init(3, np.ones(2))
    kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9, wd=0.01)
    seen = [kv.pushpull(3, np.full(2, gradient))[0] for gradient in (0.5, 0.5, -0.25)]
    np.testing.assert_allclose(seen, [0.949, 0.852151, 0.789134749], rtol=1e-12)


@pytest.mark.parametrize("policy", ["asp", "ssp:1", "k_sync:2", "bsp"])
def test_local_goes_over_to_any_policy(policy: str) -> None:
    with aiokv.create("local") as kv:
        kv.set_optimizer("accumulate")
        kv.init("w", full((2,), 1))
        kv.push("w", full((2,), 1))
        kv.set_policy(policy)
        np.testing.assert_array_equal(kv.pushpull("w", full((2,), 1)), full((2,), 3))


def test_local_takes_the_loss_for_policies_that_go_by_it() -> None:
    with aiokv.create("local") as kv:
        kv.init("w", full((2,), 1), policy="adasync:1")
        for loss in (4.0, 1.0):
            kv.report_loss(loss)
            kv.push("w", full((2,), 1))
        np.testing.assert_array_equal(kv.pull("w"), full((2,), 1))


def test_local_has_the_errors_of_a_cluster() -> None:
    kv = aiokv.create("local")
    kv.init("w", full((2, 3), 1))
    with pytest.raises(SpecMismatchError, match=r"'w' has float32\[2, 3\], got float32\[6\]"):
        kv.push("w", full((6,), 1))
    with pytest.raises(UnknownKeyError, match="'v' is not initialized"):
        kv.pull("v", out=full((2, 3), 0))
    with pytest.raises(AlreadyInitializedError, match="'w'"):
        kv.init("w", full((2, 3), 2))
    with pytest.raises(KeyUseError, match="never mix"):
        kv.push(1, full((2, 3), 1))
    np.testing.assert_array_equal(kv.pull("w"), full((2, 3), 1))
    kv.close()
    with pytest.raises(ClosedError):
        kv.pull("w")


def test_local_does_not_share_memory_with_its_caller() -> None:
    kv = aiokv.create("local")
    value = full((3,), 1)
    kv.init("w", value)
    value[:] = 2
    pulled = kv.pull("w")
    np.testing.assert_array_equal(pulled, full((3,), 1))
    pulled[:] = 3
    np.testing.assert_array_equal(kv.pull("w"), full((3,), 1))


@pytest.mark.parametrize("shape", [(), (0, 5), (1,)])
def test_local_keeps_shapes(shape: tuple[int, ...]) -> None:
    kv = aiokv.create("local")
    kv.init("w", full(shape, 1))
    assert kv.pushpull("w", full(shape, 2)).shape == shape


def test_a_worker_alone_waits_for_what_is_there_or_in_vain() -> None:
    kv = aiokv.create("local")
    kv.init("w", np.zeros(2, np.float32))
    kv.push("w", np.ones(2, np.float32))
    assert kv.wait_for_round("w") == 1, "it has not read since"
    kv.pull("w")
    with pytest.raises(RoundTimeoutError, match="round 2: nobody has closed it"):
        kv.wait_for_round("w")
    assert kv.wait_for_round("w", 0) == 1
    assert kv.torn_reads == 0
