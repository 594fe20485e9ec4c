"""MXNet's tests/python/unittest/test_kvstore.py and tests/nightly/test_kvstore.py, in this process and over TCP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import AlreadyInitializedError, KeyUseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.net.conftest import ClusterInAThread

SHAPE = (4, 4)
DEVICES = 4
INTS: tuple[Any, list[Any]] = (3, [5, 7, 11])
TEXTS: tuple[Any, list[Any]] = ("a", ["b", "c", "d"])


def full(value: float, shape: tuple[int, ...] = SHAPE) -> Any:
    return np.full(shape, value, np.float32)


def check(arrays: Any, expected: float) -> None:
    """Compare an array, or every array of nested lists, with one number."""
    if isinstance(arrays, list):
        for array in arrays:
            check(array, expected)
    else:
        np.testing.assert_array_equal(arrays, np.full(arrays.shape, expected))


@pytest.fixture(params=["local", "device", "dist_sync", "dist_device_sync"])
def store(request: pytest.FixtureRequest, cluster_in_a_thread: ClusterInAThread) -> Iterator[aiokv.KVStore]:
    """A store of each kind, with one worker; lists are summed on the CPU."""
    if not request.param.startswith("dist"):
        yield aiokv.create(request.param, device="cpu")
        return
    with (
        cluster_in_a_thread(1, 2) as address,
        aiokv.create(request.param, device="cpu", scheduler=address) as kv,
    ):
        yield kv


@pytest.fixture(params=[INTS, TEXTS], ids=["ints", "texts"])
def keys(request: pytest.FixtureRequest) -> tuple[Any, list[Any]]:
    """One key and three more of the same kind."""
    found: tuple[Any, list[Any]] = request.param
    return found


@pytest.fixture
def init(store: aiokv.KVStore, keys: tuple[Any, list[Any]]) -> aiokv.KVStore:
    """The store with zeros under all keys."""
    one, several = keys
    store.init(one, full(0))
    store.init(several, [full(0)] * len(several))
    return store


def test_a_single_key(init: aiokv.KVStore, keys: tuple[Any, list[Any]]) -> None:
    init.push(keys[0], full(1))
    out = full(0)
    init.pull(keys[0], out=out)
    check(out, 1)


def test_init_of_another_value(store: aiokv.KVStore) -> None:
    store.init("4", full(4))
    check(store.pull("4", full(0)), 4)
    with pytest.raises(AlreadyInitializedError, match="'4'"):
        store.init("4", full(5))


def test_a_list_of_keys(init: aiokv.KVStore, keys: tuple[Any, list[Any]]) -> None:
    several = keys[1]
    init.push(several, [full(4)] * 3)
    outs = [full(0) for _ in several]
    init.pull(several, out=outs)
    check(outs, 4)


def test_arrays_of_several_devices_are_summed(init: aiokv.KVStore, keys: tuple[Any, list[Any]]) -> None:
    one, several = keys
    outs = [full(0) for _ in range(DEVICES)]
    init.push(one, [full(1)] * DEVICES)
    init.pull(one, out=outs)
    check(outs, DEVICES)
    nested = [[full(0) for _ in range(DEVICES)] for _ in several]
    init.push(several, [[full(2)] * DEVICES] * 3)
    init.pull(several, out=nested)
    check(nested, 2 * DEVICES)


def test_a_key_that_is_initialised_after_a_push_of_another(init: aiokv.KVStore, keys: tuple[Any, list[Any]]) -> None:
    init.push(keys[0], full(1))
    late: Any = 100 if isinstance(keys[0], int) else "late"
    init.init(late, full(0))
    check(init.pull(late, full(9)), 0)


def test_keys_of_the_other_kind_are_refused(init: aiokv.KVStore, keys: tuple[Any, list[Any]]) -> None:
    other: Any = "3" if isinstance(keys[0], int) else 3
    single: list[Callable[[], Any]] = [
        lambda: init.init(other, full(0)),
        lambda: init.push(other, full(0)),
        lambda: init.pull(other, full(0)),
        lambda: init.pushpull(other, full(0)),
    ]
    listed: list[Callable[[], Any]] = [
        lambda: init.init([other], [full(0)]),
        lambda: init.push([keys[0], other], [full(0)] * 2),
        lambda: init.pull([other], [full(0)]),
    ]
    for call in single + listed:
        with pytest.raises(KeyUseError, match="never mix"):
            call()


@pytest.mark.parametrize("name", ["local", "device"])
def test_an_updater_is_given_keys_as_they_are(name: str, keys: tuple[Any, list[Any]]) -> None:
    one, several = keys
    kv = aiokv.create(name, device="cpu")
    kv.init(one, full(0))
    kv.init(several, [full(0)] * 3)
    seen: list[Any] = []

    def add(key: Any, received: Any, stored: Any) -> None:
        seen.append(key)
        stored += received

    kv.set_updater(add)
    kv.push(one, [full(1)] * DEVICES)
    outs = [full(0) for _ in range(DEVICES)]
    kv.pull(one, out=outs)
    check(outs, 4)
    for _ in range(4):
        kv.push(several, [[full(1)] * DEVICES] * 3)
    check(kv.pull(several), 16)
    assert seen == [one, *several * 4]


def test_names_are_those_that_were_asked_for() -> None:
    for name in ("local", "device"):
        assert aiokv.create(name, device="cpu").type == name


@pytest.mark.parametrize("as_list", [False, True], ids=["key by key", "one list"])
def test_ten_random_rounds(store: aiokv.KVStore, as_list: bool) -> None:
    """The nightly test: w += 0.1 * sum over four devices; the relative error, in the 1-norm, stays below 1e-6."""
    shapes = {"3": (4, 4), "5": (100, 100), "7": (2000, 2000)}
    rng = np.random.default_rng(7)
    names = list(shapes)
    expected = {key: np.zeros(shape) for key, shape in shapes.items()}
    store.set_optimizer("accumulate", rescale_grad=0.1)
    store.init(names, [np.zeros(shape, np.float32) for shape in shapes.values()])
    for _ in range(10):
        given = [[rng.uniform(-1, 1, shape).astype(np.float32) for _ in range(DEVICES)] for shape in shapes.values()]
        for key, arrays in zip(names, given, strict=True):
            expected[key] += 0.1 * np.sum(arrays, axis=0, dtype=np.float64)
        if as_list:
            store.push(names, given)
            values = store.pull(names)
        else:
            for key, arrays in zip(names, given, strict=True):
                store.push(key, arrays)
            values = [store.pull(key) for key in names]
        for key, value in zip(names, values, strict=True):
            assert np.abs(value - expected[key]).sum() / np.abs(expected[key]).sum() < 1e-6
