"""Rules that need norms of whole tensors, whose chunks lie on several servers, under any order of messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from aiokv.core.server.coordinator import Coordinator
from aiokv.errors import AiokvError, ServerLostError

if TYPE_CHECKING:
    from aiokv.types import Key
    from tests.core.together.conftest import Array, Cluster, Script, User

SHAPES: dict[Key, tuple[int, ...]] = {"big": (7, 5), "other": (20,), "small": (3,), "tiny": (2,), "none": (0,)}
"""Chunks have 16 bytes here: the first two lie on all servers, the last ones are bundled where they share a server."""

SEEDS = hs.integers(0, 2**32)
many_orders = settings(max_examples=60)


def filled(value: float) -> dict[Key, Array]:
    """Return an array for every key."""
    return {key: np.full(shape, value, np.float32) for key, shape in SHAPES.items()}


@many_orders
@given(seed=SEEDS, servers=hs.integers(1, 3), rule=hs.sampled_from(["lamb", "lans"]))
def test_every_chunk_sees_the_norm_of_its_whole_tensor(
    make_cluster: type[Cluster], seed: int, servers: int, rule: str
) -> None:
    """In this rig w becomes w + sum * |w|^2, once for each phase; these are whole numbers, so they are exact."""

    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer("init", filled(1))
        yield user.optimizer(rule)
        for step in range(2):
            values = filled(user.rank)
            assert (yield user.transfer("pushpull", values)) is None
            for key, array in values.items():
                np.testing.assert_array_equal(array, np.full(SHAPES[key], expected[step][key]), err_msg=str(key))
        yield user.leave()

    phases = {"lamb": 1, "lans": 2}[rule]
    weights = dict.fromkeys(SHAPES, 1.0)
    expected = []
    for _ in range(2):
        weights = {key: w + 3 * phases * w**2 * np.prod(SHAPES[key]) for key, w in weights.items()}
        expected.append(weights)
    cluster = make_cluster(seed, servers=servers)
    cluster.run(train)
    cluster.settle()
    assert [stop.failed for node in cluster.nodes.values() for stop in node.stops] == [False] * (servers + 1)
    assert not any(store.slots for store in cluster.stores.values())


@many_orders
@given(seed=SEEDS)
def test_sums_are_added_in_the_order_of_the_chunks(make_cluster: type[Cluster], seed: int) -> None:
    """In float64, (2^54 + 1) + 1 = 2^54, but (1 + 1) + 2^54 is 2^54 + 2."""
    initial = np.zeros(18, np.float32)
    # Six chunks of three elements, two on each server.
    initial[[0, 6, 12]] = 2.0**27, 1, 1

    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer("init", {"w": initial.copy()})
        yield user.optimizer("lamb")
        assert (yield user.transfer("push", {"w": np.zeros(18, np.float32)})) is None

    cluster = make_cluster(seed, servers=3, workers=2)
    cluster.run(train)
    totals = [each for store in cluster.stores.values() for each in store.totals["w", 1]]
    assert totals == [[[(2.0**54, 2.0**54)]]] * 6


@pytest.mark.parametrize("quietly", [False, True], ids=["connections break", "it hangs"])
@many_orders
@given(seed=SEEDS, steps=hs.integers(0, 2))
def test_server_that_dies_fails_the_calls_and_the_others_stop_in_good_order(
    make_cluster: type[Cluster], quietly: bool, seed: int, steps: int
) -> None:
    errors: list[AiokvError | None] = []

    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer("init", filled(1))
        yield user.optimizer("lans")
        for _ in range(steps):
            yield user.transfer("pushpull", filled(0))
        call = user.transfer("pushpull", filled(0))
        if user.rank == 0:
            for _ in range(cluster.random.randrange(40)):
                if any(cluster.ready.values()):
                    cluster.step()
            cluster.kill("server-1", quietly=quietly)
        error = yield call
        for _ in range(2):
            error = error or (yield user.transfer("pushpull", filled(0)))
        errors.append(error)

    cluster = make_cluster(seed, servers=3, breaks=0)
    cluster.run(train)
    cluster.settle()
    assert [type(error) for error in errors] == [ServerLostError] * 3
    assert [error.details["server"] for error in errors if error] == [1] * 3
    for name in ("server-0", "server-2"):
        machine = cluster.nodes[name].machine
        assert isinstance(machine, Coordinator)
        assert quietly or not any(chunk.gathering for chunk in machine._catalog.chunks.values()), "no silent wait"
