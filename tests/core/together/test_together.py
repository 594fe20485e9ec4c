"""What users write, run by all machines together, under any order in which messages arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from aiokv.core import effects as ef
from aiokv.errors import AiokvError, RoundTimeoutError, ServerLostError, WorkerLostError

if TYPE_CHECKING:
    from aiokv.types import Key
    from tests.core.together.conftest import Array, Cluster, Script, User

KEYS: dict[Key, tuple[int, ...]] = {"big": (7, 5), "small": (3,), "scalar": (), "empty": (0, 4)}
"""The first is cut into chunks over all servers."""


def filled(value: float, keys: dict[Key, tuple[int, ...]] = KEYS) -> dict[Key, Array]:
    """Return an array for every key."""
    return {key: np.full(shape, value, np.float32) for key, shape in keys.items()}


def assert_all(arrays: dict[Key, Array], value: float) -> None:
    """Compare every element of every array."""
    for key, array in arrays.items():
        np.testing.assert_array_equal(array, np.float32(value), err_msg=str(key))


SEEDS = hs.integers(0, 2**32)
many_orders = settings(max_examples=25)


@many_orders
@given(seed=SEEDS, servers=hs.integers(1, 3))
def test_every_worker_gets_the_same_sum_in_every_step(make_cluster: type[Cluster], seed: int, servers: int) -> None:
    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer("init", filled(user.rank))
        for step in range(1, 4):
            values = filled(user.rank + 1)
            assert (yield user.transfer("pushpull", values)) is None
            assert_all(values, step * (1 + 2 + 3))
        yield user.leave()

    cluster = make_cluster(seed, servers=servers)
    cluster.run(train)
    cluster.settle()
    assert [stop.failed for node in cluster.nodes.values() for stop in node.stops] == [False] * (servers + 1)
    assert not any(store.slots for store in cluster.stores.values())


@many_orders
@given(seed=SEEDS)
def test_sum_has_the_same_bits_in_whatever_order_messages_arrive(make_cluster: type[Cluster], seed: int) -> None:
    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer("init", filled(0))
        values = filled((1e8, 1.0, -1e8)[user.rank])
        yield user.transfer("pushpull", values)
        assert_all(values, 0.0)

    make_cluster(seed).run(train)


@many_orders
@given(seed=SEEDS)
def test_pushes_that_nobody_waits_for_are_read_by_the_next_pull(make_cluster: type[Cluster], seed: int) -> None:
    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer("init", filled(0))
        for step in range(1, 4):
            user.transfer("push", filled(1))
            user.transfer("push", filled(10))
            values = filled(-1)
            assert (yield user.transfer("pull", values)) is None
            assert values["scalar"] >= step * 33

    make_cluster(seed).run(train)


@many_orders
@given(seed=SEEDS)
def test_async_push_is_in_what_its_worker_reads_next(make_cluster: type[Cluster], seed: int) -> None:
    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer("init", filled(0))
        for step in range(1, 5):
            user.transfer("push", filled(1))
            values = filled(-1)
            assert (yield user.transfer("pull", values)) is None
            for array in values.values():
                assert np.all(array >= step)
        yield user.leave()

    cluster = make_cluster(seed, policy="asp")
    cluster.run(train)
    for store in cluster.stores.values():
        for versions in store.chunks.values():
            assert max(versions) == 12
            np.testing.assert_array_equal(versions[12], 12)


@many_orders
@given(seed=SEEDS, steps=hs.integers(0, 4))
def test_others_go_on_when_one_leaves_early(make_cluster: type[Cluster], seed: int, steps: int) -> None:
    def train(user: User, own_steps: int = 5) -> Script:
        yield user.join()
        yield user.transfer("init", filled(0))
        for step in range(1, own_steps + 1):
            values = filled(1)
            assert (yield user.transfer("pushpull", values)) is None
            assert_all(values, 2 * step + min(step, steps))
        assert (yield user.leave()) is None

    cluster = make_cluster(seed)
    cluster.run(train, lambda user: train(user, steps))
    cluster.settle()
    assert cluster.nodes["scheduler"].stops == [ef.Stop("all workers have left")]


@pytest.mark.parametrize("quietly", [False, True], ids=["connections break", "it hangs"])
@many_orders
@given(seed=SEEDS, steps=hs.integers(0, 3))
def test_others_hear_of_it_when_one_dies(make_cluster: type[Cluster], quietly: bool, seed: int, steps: int) -> None:
    rounds: list[AiokvError | None] = []
    barriers: list[AiokvError | None] = []

    def die(user: User) -> Script:
        yield user.join()
        yield user.transfer("init", filled(0))
        for _ in range(steps):
            yield user.transfer("pushpull", filled(1))
        cluster.kill(user.node.name, quietly=quietly)
        yield -1

    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer("init", filled(0))
        error = None
        for _ in range(5):
            error = error or (yield user.transfer("pushpull", filled(1)))
        rounds.append(error)
        barriers.append((yield user.barrier()))
        yield user.leave()

    cluster = make_cluster(seed)
    cluster.run(train, train, train, die)
    cluster.settle()
    assert [type(error) for error in rounds] == [WorkerLostError] * 2
    for error in rounds:
        assert error is not None
        assert error.details["ranks"] == [2]
        assert error.details["round"] == steps + 1
    assert [type(error) for error in barriers] == [WorkerLostError] * 2
    assert [stop.failed for stop in cluster.nodes["scheduler"].stops] == [True]


@many_orders
@given(seed=SEEDS)
def test_others_are_told_who_is_late(make_cluster: type[Cluster], seed: int) -> None:
    errors: list[AiokvError | None] = []

    def idle(user: User) -> Script:
        yield user.join()
        yield user.transfer("init", filled(0))
        late = filled(1)
        yield user.barrier()
        yield user.transfer("pushpull", late)
        assert_all(late, 3)
        yield user.leave()

    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer("init", filled(0))
        errors.append((yield user.transfer("push", filled(1), timeout=1.0)))
        yield user.barrier()
        values = filled(-1)
        yield user.transfer("pull", values)
        assert_all(values, 3)
        yield user.leave()

    make_cluster(seed).run(train, train, idle)
    assert [type(error) for error in errors] == [RoundTimeoutError] * 2
    assert [error.details["ranks"] for error in errors if error] == [[1], [1]]


@many_orders
@given(seed=SEEDS)
def test_cancelled_calls_give_their_memory_back_and_still_count(make_cluster: type[Cluster], seed: int) -> None:
    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer("init", filled(0))
        for step in range(1, 4):
            dropped = user.transfer("pushpull", filled(1))
            if user.cluster.random.random() < 0.5:
                yield user.transfer("pull", filled(-1))
            user.cancel(dropped)
            values = filled(-1)
            assert (yield user.transfer("pull", values)) is None
            assert values["scalar"] >= 3 * step

    make_cluster(seed).run(train)


@many_orders
@given(seed=SEEDS)
def test_lost_server_fails_calls_and_names_itself(make_cluster: type[Cluster], seed: int) -> None:
    errors: list[AiokvError | None] = []

    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer("init", filled(0))
        yield user.barrier()
        if user.rank == 0:
            user.cluster.kill("server-1")
        error = None
        for _ in range(3):
            error = error or (yield user.transfer("pushpull", filled(1)))
        errors.append(error)
        yield user.leave()

    make_cluster(seed).run(train)
    assert [type(error) for error in errors] == [ServerLostError] * 3
    assert [error.details["server"] for error in errors if error] == [1] * 3


@many_orders
@given(seed=SEEDS)
def test_server_holds_at_most_so_many_contributions_of_a_worker(make_cluster: type[Cluster], seed: int) -> None:
    held: list[int] = []

    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer("init", filled(0))
        for _ in range(20 if user.rank == 0 else 0):
            user.transfer("push", filled(1))
        values = filled(-1)
        if user.rank:
            for step in range(1, 21):
                values = filled(1)
                assert (yield user.transfer("pushpull", values)) is None
                assert_all(values, 3 * step)
                held.extend(len(store.slots) for store in user.cluster.stores.values())
        else:
            assert (yield user.transfer("pull", values)) is None
            assert_all(values, 60)
        yield user.leave()

    cluster = make_cluster(seed, servers=1, max_open_pushes=2)
    cluster.run(train)
    # 3 workers, 9 chunks of "big" and one of each other key with elements.
    assert max(held) <= 3 * 2 * (9 + 2)
