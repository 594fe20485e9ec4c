"""Row-sparse keys, run by all machines together, under any order in which messages arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from aiokv.core.worker import row_parts
from aiokv.errors import AiokvError, RoundTimeoutError, WorkerLostError

if TYPE_CHECKING:
    from tests.core.together.conftest import Array, Cluster, Script, User

SHAPE = (13, 2)
"""208 bytes are hardly more than the 64 from which on a key is cut over all servers."""

SEEDS = hs.integers(0, 2**32)
many_orders = settings(max_examples=50)

PUSHES = hs.lists(
    hs.lists(hs.dictionaries(hs.integers(0, 12), hs.integers(-5, 5), max_size=6), min_size=3, max_size=3),
    min_size=1,
    max_size=4,
)
"""For every round what each of the three workers pushes: rows, and the number in all elements of each."""


def rows_of(numbers: dict[int, int]) -> dict[int, list[float]]:
    return {row: [number, number] for row, number in numbers.items()}


def summed(initial: dict[int, int], pushes: list[list[dict[int, int]]]) -> Array:
    """Add everything up in a dense table."""
    table = np.zeros(SHAPE, np.float32)
    for numbers in (initial, *(numbers for each in pushes for numbers in each)):
        for row, number in numbers.items():
            table[row] += number
    return table


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send at most two rows in a message."""
    monkeypatch.setattr(row_parts, "SENT_BYTES", 2 * (8 + 8))


@pytest.mark.usefixtures("small_messages")
@many_orders
@given(seed=SEEDS, servers=hs.integers(1, 3), pushes=PUSHES, initial=hs.dictionaries(hs.integers(0, 12), hs.just(3)))
def test_every_worker_reads_the_same_sum_after_every_round(
    make_cluster: type[Cluster],
    seed: int,
    servers: int,
    pushes: list[list[dict[int, int]]],
    initial: dict[int, int],
) -> None:
    def train(user: User) -> Script:
        yield user.join()
        assert (yield user.transfer_rows("init", SHAPE, rows_of(initial))) is None
        for step in range(1, len(pushes) + 1):
            assert (yield user.transfer_rows("push", SHAPE, rows_of(pushes[step - 1][user.rank]))) is None
            values = np.full(SHAPE, -1, np.float32)
            assert (yield user.transfer_rows("pull", SHAPE, (range(13), values))) is None
            np.testing.assert_array_equal(values, summed(initial, pushes[:step]))
            yield user.barrier()
        yield user.leave()

    cluster = make_cluster(seed, servers=servers)
    cluster.run(train)
    cluster.settle()
    assert not any(store.slots for store in cluster.stores.values())


@many_orders
@given(seed=SEEDS)
def test_sum_has_the_same_bits_in_whatever_order_messages_arrive(make_cluster: type[Cluster], seed: int) -> None:
    """1e8 + 1 - 1e8 in float32 is 0 in the order of the ranks."""

    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer_rows("init", SHAPE, {})
        yield user.transfer_rows("push", SHAPE, {9: [(1e8, 1.0, -1e8)[user.rank]] * 2})
        values = np.full((1, 2), -1, np.float32)
        assert (yield user.transfer_rows("pull", SHAPE, ([9], values))) is None
        np.testing.assert_array_equal(values, 0)

    make_cluster(seed).run(train)


@many_orders
@given(seed=SEEDS)
def test_pushes_that_nobody_waits_for_are_read_by_the_next_pull(make_cluster: type[Cluster], seed: int) -> None:
    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer_rows("init", SHAPE, {})
        for step in range(1, 4):
            user.transfer_rows("push", SHAPE, {1: [1, 1]})
            user.transfer_rows("push", SHAPE, {12: [1, 1]})
            values = np.full((2, 2), -1, np.float32)
            assert (yield user.transfer_rows("pull", SHAPE, ([1, 12], values))) is None
            assert np.all(values >= 3 * step)

    make_cluster(seed).run(train)


@many_orders
@given(seed=SEEDS)
def test_async_pushes_are_all_in_the_end(make_cluster: type[Cluster], seed: int) -> None:
    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer_rows("init", SHAPE, {})
        for step in range(1, 4):
            user.transfer_rows("push", SHAPE, {user.rank: [1, 1], 12: [1, 1]})
            values = np.full((2, 2), -1, np.float32)
            assert (yield user.transfer_rows("pull", SHAPE, ([user.rank, 12], values))) is None
            np.testing.assert_array_equal(values[0], step)
            assert np.all(values[1] >= step)
        yield user.barrier()
        values = np.full((1, 2), -1, np.float32)
        yield user.transfer_rows("pull", SHAPE, ([12], values))
        np.testing.assert_array_equal(values, 9)

    make_cluster(seed, policy="asp").run(train)


@many_orders
@given(seed=SEEDS, steps=hs.integers(0, 2))
def test_others_hear_of_it_when_one_dies(make_cluster: type[Cluster], seed: int, steps: int) -> None:
    errors: list[AiokvError | None] = []

    def die(user: User) -> Script:
        yield user.join()
        yield user.transfer_rows("init", SHAPE, {})
        for _ in range(steps):
            yield user.transfer_rows("push", SHAPE, {3: [1, 1]})
        # Half of what it pushes last may be on its way.
        user.transfer_rows("push", SHAPE, rows_of(dict.fromkeys(range(13), 1)))
        cluster.kill(user.node.name)
        yield -1

    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer_rows("init", SHAPE, {})
        error = None
        for _ in range(4):
            error = error or (yield user.transfer_rows("push", SHAPE, {3: [1, 1]}))
        errors.append(error)
        yield user.leave()

    cluster = make_cluster(seed)
    cluster.run(train, train, train, die)
    cluster.settle()
    assert [type(error) for error in errors] == [WorkerLostError] * 2


@many_orders
@given(seed=SEEDS)
def test_others_are_told_who_is_late(make_cluster: type[Cluster], seed: int) -> None:
    errors: list[AiokvError | None] = []

    def idle(user: User) -> Script:
        yield user.join()
        yield user.transfer_rows("init", SHAPE, {})
        yield user.barrier()
        assert (yield user.transfer_rows("push", SHAPE, {3: [1, 1]})) is None
        yield user.leave()

    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer_rows("init", SHAPE, {})
        errors.append((yield user.transfer_rows("push", SHAPE, {3: [1, 1]}, timeout=1.0)))
        yield user.barrier()
        values = np.full((1, 2), -1, np.float32)
        assert (yield user.transfer_rows("pull", SHAPE, ([3], values))) is None
        np.testing.assert_array_equal(values, 3)
        yield user.leave()

    make_cluster(seed).run(train, train, idle)
    assert [type(error) for error in errors] == [RoundTimeoutError] * 2
    assert [error.details["ranks"] for error in errors if error] == [[1], [1]]
