"""Values of one call are of one round, whatever the order in which messages arrive at workers and servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as hs

if TYPE_CHECKING:
    from aiokv.types import Key
    from tests.core.together.conftest import Array, Cluster, Script, User

KEYS: dict[Key, tuple[int, ...]] = {"big": (7, 5), "small": (3,), "scalar": ()}
"""The first is cut into chunks over all servers."""

POLICIES = ["backup:1", "k_sync:2", "k_batch_sync:2", "k_async:2", "k_batch_async:2", "ringmaster:2", "k_batch_async:3"]

SEEDS = hs.integers(0, 2**32)
many_orders = settings(max_examples=30)


def arrays(value: float) -> dict[Key, Array]:
    """Return an array for every key."""
    return {key: np.full(shape, value, np.float32) for key, shape in KEYS.items()}


def numbers(values: dict[Key, Array]) -> set[float]:
    """Return what is in any element."""
    return {float(number) for array in values.values() for number in np.unique(array)}


@many_orders
@given(seed=SEEDS, servers=hs.integers(2, 3), policy=hs.sampled_from(POLICIES))
def test_every_element_of_a_read_has_the_same_contributions(
    make_cluster: type[Cluster], seed: int, servers: int, policy: str
) -> None:
    def train(user: User) -> Script:
        yield user.join()
        yield user.transfer("init", arrays(0))
        for step in range(5):
            values = arrays(32.0**user.rank)
            if step % 2:
                yield user.transfer("push", arrays(32.0**user.rank))
                assert (yield user.transfer("pull", values)) is None
            else:
                assert (yield user.transfer("pushpull", values)) is None
            # Contributions are powers of 32, so sums say whose are in them.
            assert len(numbers(values)) == 1
        yield user.leave()

    cluster = make_cluster(seed, servers=servers, policy=policy)
    cluster.run(train)
    cluster.settle()
