"""MXNet's tests/python/unittest/test_kvstore_custom.py: broadcast, one call for push and pull, stores of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiokv

SHAPE = (4, 4)
DEVICES = 4
KEYS = ["b", "c", "d"]


def full(value: float) -> Any:
    return np.full(SHAPE, value, np.float32)


def check(arrays: Any, expected: float) -> None:
    for array in np.reshape(np.asarray(arrays), (-1, *SHAPE)):
        np.testing.assert_array_equal(array, full(expected))


@pytest.fixture(params=["local", "device"])
def store(request: pytest.FixtureRequest) -> aiokv.KVStore:
    return aiokv.create(request.param, device="cpu")


def test_broadcast_to_one_array_and_to_lists(store: aiokv.KVStore) -> None:
    out = full(0)
    store.broadcast("a", full(1), out=out)
    check(out, 1)
    outs = [full(0) for _ in range(DEVICES)]
    store.broadcast("e", full(2), out=outs)
    check(outs, 2)
    nested = [[full(0) for _ in range(DEVICES)] for _ in KEYS]
    store.broadcast(KEYS, [full(3)] * 3, out=nested)
    check(nested, 3)


def test_pushpull_of_several_arrays(store: aiokv.KVStore) -> None:
    store.init("a", full(0))
    store.init(KEYS, [full(0)] * 3)
    outs = [full(0) for _ in range(DEVICES)]
    store.pushpull("a", [full(1)] * DEVICES, out=outs)
    check(outs, 4)
    values = [full(1) for _ in range(DEVICES)]
    store.pushpull("a", values, out=values)
    check(values, 4)
    nested = [[full(0) for _ in range(DEVICES)] for _ in KEYS]
    store.pushpull(KEYS, [[full(2)] * DEVICES] * 3, out=nested)
    check(nested, 8)


def test_without_out_it_returns_one_new_array_where_mxnet_writes_into_those_given(store: aiokv.KVStore) -> None:
    store.init("a", full(0))
    values = [full(1) for _ in range(DEVICES)]
    result = store.pushpull("a", values)
    assert isinstance(result, np.ndarray)
    check(result, 4)
    check(values, 1)


class OwnStore:
    """The store of MXNet's test, which sums and keeps nothing."""

    type = "teststore"

    def broadcast(self, key: Any, value: Any, out: Any) -> None:
        for array in out if isinstance(out, list) else [out]:
            array[...] = value

    def pushpull(self, key: Any, value: Any, out: Any = None) -> None:
        total = sum(value)
        for array in value if out is None else out:
            array[...] = total

    def is_capable(self, name: str) -> bool:
        return False

    def set_optimizer(self, name: str) -> None:
        raise NotImplementedError


@pytest.fixture
def _factories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered stores are the whole process's: forget those of a test."""
    from aiokv import kvstore  # noqa: PLC0415

    monkeypatch.setattr(kvstore, "_factories", dict(kvstore._factories))


@pytest.mark.usefixtures("_factories")
def test_a_store_of_ones_own() -> None:
    aiokv.register_store("TestStore", OwnStore)
    kv: Any = aiokv.create("teststore")
    outs = [full(0), full(0)]
    kv.broadcast("1", full(3), outs)
    check(outs, 3)
    kv.pushpull("1", [full(1), full(1)], outs)
    check(outs, 2)
    kv.pushpull("1", outs)
    check(outs, 4)
    assert not kv.is_capable("optimizer")
    with pytest.raises(NotImplementedError):
        kv.set_optimizer("sgd")
