"""Each check accepts what servers that work would send, and finds what is wrong with anything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.bench.checks import make_check
from aiokv.bench.pattern import BLOCK, PERIOD, Floats, Gradient

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 2 * BLOCK + 1234
"""More than two blocks, and no multiple of anything."""
WORKERS = 3
LEARNING_RATE, MOMENTUM = 0.001, 0.9


def gradient(rank: int, round_: int, size: int = SIZE) -> Floats:
    """Return a gradient of its own."""
    made = Gradient(rank, WORKERS, size)
    made.fill(round_)
    return made.flat


def total(round_: int, size: int = SIZE) -> Floats:
    """Return the sum of all gradients, added one by one."""
    result = np.zeros(size, np.float32)
    for rank in range(WORKERS):
        result += gradient(rank, round_, size)
    return result


def sync(optimizer: str | None = None, size: int = SIZE) -> Callable[[Floats, int], str]:
    return make_check(1, WORKERS, size, policy="bsp", optimizer=optimizer)


def asynchronous(optimizer: str | None = None) -> Callable[[Floats, int], str]:
    return make_check(1, WORKERS, SIZE, policy="asp", optimizer=optimizer)


# --- gradients ---


def test_gradients_are_whole_numbers_that_any_order_adds_up_exactly() -> None:
    values = gradient(2, 63)
    assert (values == np.floor(values)).all()
    assert values.max() * WORKERS < 2**24


def test_gradients_of_other_ranks_and_rounds_differ_everywhere() -> None:
    first = gradient(0, 0)
    for rank, round_ in [(1, 0), (2, 0), (0, 1), (1, 1), (0, 2)]:
        assert (gradient(rank, round_) != first).all()


@pytest.mark.parametrize("chunk", [1024, 16384, 65536, 131072, 262144])
def test_no_chunk_looks_like_the_next(chunk: int) -> None:
    values = gradient(0, 0, 2 * chunk)
    assert (values[:chunk] != values[chunk:]).any()


# --- sync, sums ---


@pytest.mark.parametrize("size", [1, 256, PERIOD, BLOCK, SIZE])
def test_sum_of_all_workers_is_right_in_every_round(size: int) -> None:
    check = sync(size=size)
    assert [check(total(round_, size), round_) for round_ in range(70)] == [""] * 70


def test_one_wrong_element_is_found_and_named() -> None:
    values = total(5)
    values[BLOCK + 7] += 1
    # 65543 % 8191 = 15, three times; and the terms of round 5 are 15, 16 and 17.
    expected = "round 5: element 65543 is 94, expected 93, the sum of all workers"
    assert sync()(values, 5) == expected


@pytest.mark.parametrize(
    "values",
    [
        total(0) - gradient(2, 0),
        total(0) - gradient(2, 0) + gradient(1, 0),
        total(0) + gradient(0, 0),
        total(1),
        np.zeros(SIZE, np.float32),
        np.full(SIZE, np.nan, np.float32),
    ],
    ids=["one is missing", "one counted twice, one not", "one too many", "another round", "zeros", "nan"],
)
def test_anything_but_the_sum_is_wrong(values: Floats) -> None:
    assert sync()(values, 0) != ""


def test_chunks_in_the_wrong_places_are_wrong() -> None:
    values = total(0)
    assert "element 0 is" in sync()(np.concatenate([values[16384:32768], values[:16384], values[32768:]]), 0)


# --- sync, optimizers ---


def sgd_rounds(count: int) -> list[Floats]:
    """Return the weights after each round, computed as a server would, in float32."""
    weights, momentum = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    results = []
    for round_ in range(count):
        momentum = np.float32(MOMENTUM) * momentum - np.float32(LEARNING_RATE) * total(round_)
        weights = weights + momentum
        results.append(weights)
    return results


def test_sgd_with_momentum_is_right_within_rounding() -> None:
    check = sync("sgd")
    assert [check(weights, round_) for round_, weights in enumerate(sgd_rounds(20))] == [""] * 20


def test_sgd_without_its_momentum_is_wrong() -> None:
    check = sync("sgd")
    first = np.float32(-LEARNING_RATE) * total(0)
    assert check(first, 0) == ""
    assert "expected" in check(first - np.float32(LEARNING_RATE) * total(1), 1)


def test_element_that_is_not_finite_is_wrong_with_sgd() -> None:
    [values] = sgd_rounds(1)
    values[9] = np.inf
    assert "element 9 is inf, expected -0.03 to within 0.0001 of it" in sync("sgd")(values, 0)


def test_another_rule_may_do_what_it_likes_if_it_does_so_everywhere() -> None:
    check = sync("adam")
    values = np.sqrt(total(0))
    assert check(values, 0) == ""
    values[BLOCK:] = 0
    assert check(values, 1) != ""


def test_nothing_but_nan_is_wrong_with_another_rule() -> None:
    assert sync("adam")(np.full(SIZE, np.nan, np.float32), 0) != ""


# --- async ---


def test_own_gradient_or_another_worker_s_of_any_round_is_right_chunk_by_chunk() -> None:
    values = gradient(1, 4)
    values[:16384] = gradient(0, 9)[:16384]
    values[50000:] = gradient(2, 1)[50000:]
    assert asynchronous()(values, 4) == ""


def test_own_older_gradient_is_wrong() -> None:
    values = gradient(1, 4)
    values[50000:] = gradient(1, 3)[50000:]
    assert "element 50000 is" in asynchronous()(values, 4)


@pytest.mark.parametrize("wrong", [np.float32(-1), np.float32(0.5), np.float32(np.nan), np.float32(np.inf)])
def test_what_nobody_pushed_is_wrong(wrong: np.float32) -> None:
    values = gradient(1, 4)
    values[77] = wrong
    assert "element 77 is" in asynchronous()(values, 4)


def test_sum_in_place_of_one_gradient_is_wrong() -> None:
    assert asynchronous()(total(4), 4) != ""


def test_async_optimizer_must_stay_finite() -> None:
    values = np.ones(SIZE, np.float32)
    assert asynchronous("sgd")(values, 0) == ""
    values[-1] = np.nan
    assert asynchronous("sgd")(values, 0) == f"round 0: element {SIZE - 1} is nan, expected a finite number"


@pytest.mark.parametrize(
    ("policy", "optimizer", "same"),
    [("bsp", None, True), ("bsp", "adam", True), ("asp", None, False), ("asp", "sgd", False)],
)
def test_workers_receive_the_same_only_in_sync(policy: str, optimizer: str | None, same: bool) -> None:
    assert make_check(0, 2, 1, policy=policy, optimizer=optimizer).same_on_all is same
