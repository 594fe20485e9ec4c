"""Stores by name, and the store without a network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import (
    AlreadyInitializedError,
    ClosedError,
    ConfigError,
    KeyUseError,
    SpecMismatchError,
    UnknownKeyError,
)


def full(shape: tuple[int, ...], value: float) -> Any:
    return np.full(shape, value, "float32")


def test_an_unknown_store_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown store 'dist_snyc'; known: local, dist, dist_sync, dist_async"):
        aiokv.create("dist_snyc")


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
