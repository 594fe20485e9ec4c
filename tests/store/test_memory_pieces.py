"""Chunks in which several keys lie, and values before the current one that somebody may refer to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.core import effects as ef
from aiokv.core.stimuli import Normed
from aiokv.kernels import get_backend
from aiokv.optim import DCASGD, LARS, SGD, Adam, Assign, GroupAdaGrad, LearningRule, Optimizer, OwnRule
from aiokv.store.memory import ParameterStore
from aiokv.storing import perform
from aiokv.types import Piece

if TYPE_CHECKING:
    from aiokv.optim import Step
    from aiokv.types import Key

PIECES = [Piece("a", 0, 6, 3), Piece("b", 0, 2, 1)]


@pytest.fixture
def store() -> ParameterStore:
    return ParameterStore(get_backend("reference"))


def landed(store: ParameterStore, values: Any, dtype: Any = np.float32) -> int:
    array = np.array(values, dtype)
    slot, view = store.land(array.nbytes)
    view[:] = array.tobytes()
    return slot


def read(store: ParameterStore, key: str, start: int, version: int, dtype: Any = np.float32) -> Any:
    value = store.acquire(key, start, version)
    array = value.buffer.view(dtype).copy()
    store.release(value)
    return array


def values(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(8).astype(np.float16)


class Named(OwnRule, tag="named", frozen=True, kw_only=True):
    """A rule of a user's own with another rate for one key."""

    def step_for(self, key: Key, *, count: int, num_update: int) -> Step:
        step = super().step_for(key, count=count, num_update=num_update)
        return type(step)(count, 4.0 if key == "a" else 1.0)

    def compute(self, weight: Any, gradient: Any, state: dict[str, Any], step: Step) -> Any:
        return weight - np.float32(step.learning_rate) * gradient


@pytest.mark.parametrize(
    "rule",
    [
        GroupAdaGrad(),
        GroupAdaGrad(multi_precision=True),
        Adam(multi_precision=True, lr_mult={"a": 3.0}),
        SGD(momentum=0.9, wd=0.5, wd_mult={"b": 0.0}),
        Named(),
    ],
    ids=str,
)
def test_keys_in_one_chunk_are_updated_as_if_each_were_alone(store: ParameterStore, rule: LearningRule) -> None:
    """Also when the chunk is divided in between."""
    store.install("a", -1, "float16", 8, landed(store, values(0), np.float16), PIECES)
    for piece, part in zip(PIECES, (slice(0, 6), slice(6, 8)), strict=True):
        slot = landed(store, values(0)[part], np.float16)
        store.install(f"{piece.key}'", 0, "float16", piece.size, slot, [piece])
    for version in (1, 2, 3):
        total = values(version)
        if version == 3:
            store.divide("a", -1, [("a", 6), ("b", 2)])
        for key, part in (("a", slice(0, 6)), ("b", slice(6, 8))):
            store.apply(f"{key}'", 0, version, landed(store, total[part], np.float16), rule, version, 2)
            if version == 3:
                store.apply(key, 0, version, landed(store, total[part], np.float16), rule, version, 2)
        if version < 3:
            store.apply("a", -1, version, landed(store, total, np.float16), rule, version, 2)
    for key in ("a", "b"):
        np.testing.assert_array_equal(read(store, key, 0, 3, np.float16), read(store, f"{key}'", 0, 3, np.float16))


def test_norms_are_of_the_divided_sum_which_is_divided_once(store: ParameterStore) -> None:
    """By hand: w = 2, g = 6 / 3, so |w| = |g|: 2 - 0.5 * 1 * 2 = 1."""
    rule = LARS(momentum=0.0, learning_rate=0.5, eta=1.0, epsilon=1e-12)
    store.install("w", 0, "float32", 4, landed(store, [2] * 4))
    slot = landed(store, [6] * 4)
    norms = perform(store, ef.Norms("w", 0, 1, slot, 0, [], 1, rule, 3))
    assert norms == Normed("w", 0, 1, 0, [(16.0, 16.0)])
    store.apply("w", 0, 1, slot, rule, 1, 3, [norms.sums])
    np.testing.assert_allclose(read(store, "w", 0, 1), [1] * 4, rtol=1e-6)


def test_norms_of_nothing_are_zero(store: ParameterStore) -> None:
    store.install("w", 0, "float32", 0, None)
    assert store.norms("w", 0, None, LARS(), 0, 1, 1, []) == [(0.0, 0.0)]


def test_norms_that_can_not_be_computed_are_an_error(store: ParameterStore, caplog: pytest.LogCaptureFixture) -> None:
    store.install("w", 0, "float32", 1, landed(store, [1]))
    slot = landed(store, [1])
    normed = perform(store, ef.Norms("w", 0, 1, slot, 5, [], 1, LARS(), 1))
    assert isinstance(normed, Normed)
    assert "key 'w', round 1: the update could not be made" in str(normed.error)
    assert "there is no phase 5" in caplog.text
    assert perform(store, ef.Skip("w", 0, 1, slot)) is None
    assert read(store, "w", 0, 1).tolist() == [1]
    assert store.open_slots == 0


@pytest.fixture
def delayed(store: ParameterStore) -> ParameterStore:
    """A chunk of two keys at version 3, whose versions 0 and 2 are kept."""
    rule: Optimizer = DCASGD(learning_rate=0.5, lamda=1.0)
    store.install("a", -1, "float32", 2, landed(store, [1, 1]), [Piece("a", 0, 1), Piece("b", 0, 1)])
    for version in (1, 2, 3):
        store.apply("a", -1, version, landed(store, [1, 2]), rule, version, 1, read=version - 1)
    perform(store, ef.Retire("a", -1, [1]))
    return store


def test_contribution_is_compensated_for_what_was_changed_since_a_version(delayed: ParameterStore) -> None:
    """The value is -0.5 and -2 where it was 1 and 1: 3 + 1 * 9 * (w - 1)."""
    slot = landed(delayed, [3, 3])
    assert perform(delayed, ef.Compensate(slot, "float32", "a", -1, 0, 1.0)) is None
    delayed.apply("a", -1, 4, slot, Assign(), 4, 1)
    assert read(delayed, "a", -1, 4).tolist() == [3 + 9 * -1.5, 3 + 9 * -3.0]


@pytest.mark.parametrize("divided", [False, True])
def test_update_looks_at_the_value_that_was_read(delayed: ParameterStore, divided: bool) -> None:
    """By hand: 1, 0.5, 0, -0.5 and 1, 0, -1, -2; then w - 0.5 * (1 + 1 * (w - 1)) = w / 2."""
    rule = DCASGD(learning_rate=0.5, lamda=1.0)
    if divided:
        delayed.divide("a", -1, [("a", 1), ("b", 1)])
        for key in ("a", "b"):
            delayed.apply(key, 0, 4, landed(delayed, [1]), rule, 4, 1, read=0)
        got = [float(read(delayed, key, 0, 4)[0]) for key in ("a", "b")]
    else:
        delayed.apply("a", -1, 4, landed(delayed, [1, 1]), rule, 4, 1, read=0)
        got = read(delayed, "a", -1, 4).tolist()
    assert got == [-0.25, -1.0]


def test_memory_of_earlier_values_is_used_again(delayed: ParameterStore) -> None:
    before = delayed._pool.idle_bytes
    perform(delayed, ef.Retire("a", -1, [0]))
    assert delayed._pool.idle_bytes == before + 8
    delayed.forget("a", -1)
    assert delayed._pool.idle_bytes == before + 24
