"""Whatever a tensor's parts, it is updated as a whole: chunks, norms that are gathered, rows, noise."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aiokv.errors import OptimizerError, SpecMismatchError
from aiokv.kernels import Backend, get_backend
from aiokv.optim import LAMB, LANS, LARS, SGD, SGLD, GroupAdaGrad, Optimizer, Step

Array = NDArray[Any]
Bits = Callable[[Array], bytes]
Run = Callable[..., tuple[Array, dict[str, Array]]]

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


def run_in_chunks(backend: Backend, rule: Optimizer, weight: Array, gradients: list[Array], cuts: list[int]) -> Array:
    """Return the weight after updates of its chunks, which lie on as many servers."""
    bounds = [0, *sorted(cuts), weight.size]
    chunks = [weight[start:end].copy() for start, end in itertools.pairwise(bounds)]
    states = [backend.new_state(rule, chunk) for chunk in chunks]
    for count, gradient in enumerate(gradients, 1):
        totals = [gradient[start:end].copy() for start, end in itertools.pairwise(bounds)]
        step = rule.step_for("w", count=count, num_update=count)
        gathered: list[tuple[float, ...]] = []
        for phase in range(rule.norm_phases):
            parts = [
                backend.norms(rule, phase, *arrays, step, gathered)
                for arrays in zip(chunks, totals, states, strict=True)
            ]
            gathered.append(tuple(sum(sums) for sums in zip(*parts, strict=True)))
        for chunk, total, state, start in zip(chunks, totals, states, bounds, strict=False):
            backend.update(rule, chunk, total, state, step, norms=gathered, offset=start)
        chunks = totals
    return np.concatenate(chunks)


@pytest.mark.parametrize("cuts", [[], [1], [30, 30], [7, 50, 64], [0, 16, 32, 64]])
def test_a_tensor_in_chunks_is_updated_as_the_whole(
    backend: Backend, bits: Bits, run: Run, rule: Optimizer, cuts: list[int]
) -> None:
    rng = np.random.default_rng(3)
    weight, *gradients = (rng.normal(size=64).astype(np.float32) for _ in range(4))
    whole, _ = run(backend, rule, weight, gradients)
    got = run_in_chunks(backend, rule, weight, gradients, cuts)
    if rule.norm_phases:
        np.testing.assert_allclose(got, whole, rtol=1e-5)
    else:
        assert bits(got) == bits(whole)


@given(cuts=st.lists(st.integers(0, 200), max_size=4), seed=st.integers(0, 100))
@settings(max_examples=25)
def test_norms_of_chunks_add_up_to_that_of_the_tensor(cuts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight, total = rng.normal(size=200), rng.normal(size=200)
    reference, rule, step = get_backend("reference"), LARS(), Step(1)
    bounds = [0, *sorted(cuts), 200]
    parts = [
        reference.norms(rule, 0, weight[start:end].copy(), total[start:end].copy(), {}, step)
        for start, end in itertools.pairwise(bounds)
    ]
    np.testing.assert_allclose(np.sum(parts, axis=0), [weight @ weight, total @ total], rtol=1e-13)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("size", [0, 1, 100] if SIMULATED else [0, 1, 1023, 1024, 1025, 5000])
def test_squares_are_added_in_float64_in_a_fixed_order(backend: Backend, dtype: str, size: int) -> None:
    """Element i goes to sum number i mod 1024, and those sums are added one after the other."""
    rng = np.random.default_rng(size)
    weight, total = (rng.normal(size=size).astype(dtype) for _ in range(2))
    expected = []
    for array in (weight, total):
        lanes = [0.0] * 1024
        for i, number in enumerate(array.astype(np.float64).tolist()):
            lanes[i % 1024] += number * number
        whole = 0.0
        for lane in lanes:
            whole += lane
        expected.append(whole)
    assert backend.norms(LARS(), 0, weight, total, {}, Step(1)) == tuple(expected)


def test_norms_of_float32_do_not_overflow(backend: Backend) -> None:
    weight = np.full(5, 1e30, np.float32)
    norms = backend.norms(LARS(), 0, weight, weight, {}, Step(1))
    np.testing.assert_allclose(norms, [5e60, 5e60], rtol=1e-6)


@pytest.mark.parametrize("rule", [LARS(momentum=0.9), LAMB(), LANS()], ids=lambda rule: rule.name)
def test_a_weight_or_gradient_of_zeros_leaves_everything_finite(backend: Backend, run: Run, rule: Optimizer) -> None:
    """A trust ratio with a norm of 0 would be 0 or infinite: weights that begin with 0 could never leave it."""
    zeros, ones = np.zeros(4, np.float32), np.ones(4, np.float32)
    begun, _ = run(backend, rule, zeros, [ones])
    assert (begun < 0).all()
    still, _ = run(backend, rule, ones, [zeros])
    np.testing.assert_array_equal(still, ones)


def test_what_norms_need_is_not_changed(backend: Backend, bits: Bits) -> None:
    weight, total = np.ones(3, np.float32), np.full(3, 2, np.float32)
    state = backend.new_state(LANS(), weight)
    before = [bits(array) for array in (weight, total, *state.values())]
    backend.norms(LANS(), 0, weight, total, state, Step(1))
    backend.norms(LANS(), 1, weight, total, state, Step(1), [(12.0,)])
    assert [bits(array) for array in (weight, total, *state.values())] == before


@pytest.mark.parametrize(
    ("rule", "phase", "gathered", "message"),
    [
        (SGD(), 0, [], "optimizer 'sgd' has 0 norm phases, there is no phase 0"),
        (LANS(), 2, [(1.0,), (1.0, 1.0, 1.0)], "'lans' has 2 norm phases, there is no phase 2"),
        (LANS(), -1, [], "there is no phase -1"),
        (LANS(), 1, [], r"'lans' needs sums of squares of 1 phases, \[1\] of them, got \[\]"),
        (LANS(), 1, [(1.0, 2.0)], r"\[1\] of them, got \[2\]"),
        (LAMB(), 0, [(1.0,)], r"of 0 phases, \[\] of them, got \[1\]"),
    ],
)
def test_phases_come_one_after_the_other(
    backend: Backend, rule: Optimizer, phase: int, gathered: list[tuple[float, ...]], message: str
) -> None:
    weight = np.ones(3, np.float32)
    with pytest.raises(OptimizerError, match=message):
        backend.norms(rule, phase, weight, weight.copy(), backend.new_state(rule, weight), Step(1), gathered)


@pytest.mark.parametrize("norms", [[], [(1.0,)], [(1.0, 1.0), (1.0, 1.0)]])
def test_an_update_needs_the_norms_of_all_phases(backend: Backend, norms: list[tuple[float, ...]]) -> None:
    weight, total = np.ones(3, np.float32), np.ones(3, np.float32)
    with pytest.raises(OptimizerError, match=r"'lamb' needs sums of squares of 1 phases, \[2\] of them"):
        backend.update(LAMB(), weight, total, backend.new_state(LAMB(), weight), Step(1), norms=norms)
    assert total.tolist() == [1, 1, 1]


# --- rows ---


def test_rows_that_are_gathered_are_updated_as_among_the_others(backend: Backend, bits: Bits) -> None:
    """A lazy update: the rows of weight and state that got a gradient are gathered, updated and scattered back."""
    rule, rng = GroupAdaGrad(learning_rate=0.1), np.random.default_rng(0)
    table = rng.normal(size=(5, 3)).astype(np.float32)
    history = rng.uniform(1, 2, 5).astype(np.float32)
    gradient = np.zeros((5, 3), np.float32)
    gradient[[1, 4]] = rng.normal(size=(2, 3))
    whole, state = gradient.reshape(-1).copy(), {"history": history.copy()}
    backend.update(rule, table.reshape(-1), whole, state, Step(1, 0.1), row_size=3)
    rows, kept = gradient[[1, 4]].reshape(-1), {"history": history[[1, 4]]}
    backend.update(rule, table[[1, 4]].reshape(-1), rows, kept, Step(1, 0.1), row_size=3)
    assert bits(rows) == bits(whole.reshape(5, 3)[[1, 4]].reshape(-1))
    assert bits(kept["history"]) == bits(state["history"][[1, 4]])
    np.testing.assert_array_equal(whole.reshape(5, 3)[[0, 2, 3]], table[[0, 2, 3]])


@pytest.mark.parametrize("row_size", [0, 3, 5])
def test_parts_of_rows_are_refused(backend: Backend, row_size: int) -> None:
    with pytest.raises(SpecMismatchError, match=f"weight must be whole rows of {row_size} elements; got 4 elements"):
        backend.new_state(GroupAdaGrad(), np.ones(4, np.float32), row_size=row_size)


# --- noise ---


def noisy_step(backend: Backend, rule: SGLD, size: int, *, key: str = "w", count: int = 1, offset: int = 0) -> Array:
    total = np.zeros(size)
    step = rule.step_for(key, count=count, num_update=count)
    backend.update(rule, np.zeros(size), total, {}, step, offset=offset)
    return total


def test_noise_has_the_variance_of_the_learning_rate() -> None:
    noise = noisy_step(get_backend("reference"), SGLD(learning_rate=0.04), 100_000)
    assert abs(noise.mean()) < 0.004
    assert abs(noise.std() - 0.2) < 0.004
    assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 0.02


def test_noise_is_drawn_by_seed_key_count_and_place(backend: Backend) -> None:
    noise = noisy_step(backend, SGLD(), 9000)
    np.testing.assert_array_equal(noisy_step(backend, SGLD(), 5000, offset=4000), noise[4000:])
    np.testing.assert_array_equal(noisy_step(backend, SGLD(), 9000), noise)
    others = [
        noisy_step(backend, SGLD(seed=1), 9000),
        noisy_step(backend, SGLD(), 9000, key="v"),
        noisy_step(backend, SGLD(), 9000, count=2),
    ]
    assert not any(np.isin(other, noise).any() for other in others)
