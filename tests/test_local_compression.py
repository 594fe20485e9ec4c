"""Compression without a network: `local` does what a cluster does. (MXNet refuses it there.)"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import CodecError, NotFiniteError, SpecMismatchError


def full(shape: tuple[int, ...], value: float, dtype: str = "float32") -> Any:
    return np.full(shape, value, dtype)


@pytest.fixture
def kv() -> aiokv.KVStore:
    """A store with keys "w" and "v", which adds what is pushed."""
    store = aiokv.create("local")
    store.init({"w": full((2, 3), 0), "v": full((4,), 0)})
    store.set_optimizer("accumulate")
    return store


def pushed(kv: aiokv.KVStore, value: float, key: str = "w", shape: tuple[int, ...] = (2, 3)) -> float:
    return float(kv.pushpull(key, full(shape, value)).flat[0])


def test_scenario_46_in_one_process(kv: aiokv.KVStore) -> None:
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    assert [pushed(kv, value) for value in (0.4, 0.1, 0.2, 0.3)] == [0, 0.5, 0.5, 1.0]
    with pytest.raises(NotFiniteError):
        pushed(kv, np.nan)
    pushed(kv, 0.25)
    kv.set_gradient_compression(None)
    assert [pushed(kv, value) for value in (0, 1)] == [1.25, 2.25]


def test_keys_that_are_pushed_together_are_what_they_are_alone(kv: aiokv.KVStore) -> None:
    kv.set_gradient_compression("2bit", threshold=0.5)
    for value, total in [(0.4, 0), (0.1, 0.5)]:
        kv.push({"w": full((2, 3), value), "v": full((4,), value)})
        assert [array.flat[0] for array in kv.pull({"v": None, "w": None})] == [total, total]
    assert pushed(kv, 0.5, "v", (4,)) == 1.0


def test_another_codec_begins_with_what_the_first_has_left(kv: aiokv.KVStore) -> None:
    kv.set_gradient_compression("2bit", threshold=0.5)
    pushed(kv, 0.25)
    kv.set_gradient_compression("2bit", threshold=0.125)
    assert pushed(kv, 0) == 0.125
    kv.set_gradient_compression("fp16", error_feedback=False)
    assert pushed(kv, 0) == 0.25


def test_what_is_left_survives_a_gradient_that_is_refused(kv: aiokv.KVStore) -> None:
    kv.set_gradient_compression("2bit", threshold=0.5)
    pushed(kv, 0.25)
    kv.set_gradient_compression("fp16", error_feedback=False)
    with pytest.raises(NotFiniteError):
        pushed(kv, np.inf)
    assert pushed(kv, 0) == 0.25


def test_compressed_values_and_nan(kv: aiokv.KVStore) -> None:
    kv.set_gradient_compression(None, pull_compression="bf16")
    assert pushed(kv, 1.0) == 1.0
    with pytest.raises(NotFiniteError):
        pushed(kv, np.nan)
    with pytest.raises(CodecError, match="another codec than 1bit"):
        kv.set_gradient_compression(None, pull_compression="1bit")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_a_residual_is_more_precise_than_the_key(dtype: str) -> None:
    """A key of float16 can't hold 1 + 2**-12, what is left of it can."""
    kv = aiokv.create("local")
    kv.init("w", np.zeros(2, dtype))
    kv.set_gradient_compression("2bit", threshold=1.0)
    kv.push("w", np.full(2, 1, dtype))
    kv.push("w", np.full(2, 2**-12, dtype))
    state: Any = kv.compression_state()
    assert state["w"]["residual"][0] == 2**-12


def test_a_deleted_key_leaves_nothing(kv: aiokv.KVStore) -> None:
    kv.set_gradient_compression("2bit", threshold=0.5)
    pushed(kv, 0.25)
    kv.delete("w")
    kv.init("w", full((5,), 0))
    assert pushed(kv, 0.25, shape=(5,)) == 0
    assert kv.compression_state()["w"]["residual"].size == 5


def test_a_plain_push_that_is_refused_keeps_what_was_left(kv: aiokv.KVStore) -> None:
    kv.set_gradient_compression("2bit", threshold=0.5)
    with pytest.raises(aiokv.AiokvError, match="'u'"):
        kv.push("u", full((2,), 0.25))
    kv.set_gradient_compression(None)
    with pytest.raises(aiokv.AiokvError, match="'u'"):
        kv.push("u", full((2,), 0.5))
    kv.init("u", full((2,), 0))
    assert pushed(kv, 1, "u", (2,)) == 1.75


def test_without_error_feedback_a_refused_push_leaves_nothing(kv: aiokv.KVStore) -> None:
    kv.set_gradient_compression("bf16", error_feedback=False)
    with pytest.raises(aiokv.AiokvError, match="'u'"):
        kv.push("u", full((2,), 0.25))
    kv.init("u", full((2,), 0))
    assert pushed(kv, 1, "u", (2,)) == 1


def test_state_of_every_kind_can_be_restored(kv: aiokv.KVStore) -> None:
    kv.set_gradient_compression("2bit", threshold=0.5)
    pushed(kv, 0.25)
    kv.set_gradient_compression("bf16", error_feedback=False)
    kv.push("v", full((4,), 0.25))
    state = kv.compression_state()
    state["u"] = {"dtype": "float32", "residual": full((2,), 0.5)}
    other = aiokv.create("local")
    other.init({"w": full((2, 3), 0), "v": full((4,), 0), "u": full((2,), 0)})
    other.restore_compression_state(state)
    assert pushed(other, 1) == 1.25
    assert pushed(other, 1, "v", (4,)) == 1
    assert pushed(other, 1, "u", (2,)) == 1.5


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"dtype": "int8", "residual": np.zeros(2)}, SpecMismatchError),
        ({"dtype": "float32", "residual": [0.0]}, SpecMismatchError),
        ({"dtype": "float32", "residual": np.zeros((2, 2), "f4")}, SpecMismatchError),
        ({"dtype": "float32", "residual": np.zeros(2, "f4"), "codec": "zip"}, CodecError),
        ({"dtype": "float32", "residual": np.zeros(2, "f4"), "codec": "fp16", "step": -1}, SpecMismatchError),
    ],
)
def test_what_is_no_state_is_refused(kv: aiokv.KVStore, state: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        kv.restore_compression_state({"w": state})
    assert kv.compression_state() == {}
