"""Small keys that go together in one message, and workers that do not use them in the same way."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as hs

from aiokv.core.server.coordinator import Coordinator

if TYPE_CHECKING:
    from aiokv.types import Key
    from tests.core.together.conftest import Array, Cluster, Script, User

SHAPES: dict[Key, tuple[int, ...]] = {"none": (0,)}
SHAPES |= {f"k{i}": ((), (1,), (2,), (1, 1))[i % 4] for i in range(9)}
"""Chunks have 16 bytes here, so a server has these in bundles of up to four numbers."""

SEEDS = hs.integers(0, 2**32)
many_orders = settings(max_examples=50)


def filled(value: float, keys: list[Key]) -> dict[Key, Array]:
    """Return an array for every key."""
    return {key: np.full(SHAPES[key], value, np.float32) for key in keys}


def numbers(arrays: dict[Key, Array]) -> set[float]:
    """Return the numbers that occur in the arrays."""
    return {float(value) for array in arrays.values() for value in array.flat}


def parts_of(keys: list[Key], chance: random.Random) -> list[list[Key]]:
    """Return the keys in any order and any grouping."""
    keys = chance.sample(keys, len(keys))
    cuts = sorted({0, len(keys), *(chance.randrange(len(keys)) for _ in range(chance.randrange(4)))})
    return [keys[low:high] for low, high in itertools.pairwise(cuts)]


@many_orders
@given(seed=SEEDS, servers=hs.integers(1, 2), alike=hs.booleans(), policy=hs.sampled_from(["bsp", "asp"]))
def test_however_workers_group_keys_every_push_counts_once(
    make_cluster: type[Cluster], seed: int, servers: int, alike: bool, policy: str
) -> None:
    def train(user: User) -> Script:
        chance = random.Random(f"{seed}:{user.rank}")
        keys = list(SHAPES)
        yield user.join()
        for group in [keys] if alike or chance.random() < 0.5 else parts_of(keys, chance):
            assert (yield user.transfer("init", filled(0, group))) is None
        for step in range(1, 5):
            pushed: dict[Key, Array] = {}
            calls = []
            # At first all go together, so that there are bundles with open rounds to be divided.
            for group in parts_of(keys, chance) if step > 1 + user.rank % 2 else [keys]:
                values = filled(user.rank + 1, group)
                pushed |= values
                calls.append(user.transfer(chance.choice(["push", "pushpull"]), values))
            for call in calls:
                assert (yield call) is None
            pulled = filled(-1, chance.sample(keys, len(keys)))
            assert (yield user.transfer("pull", pulled)) is None
            if policy == "bsp":
                # Nobody is more than a round ahead.
                assert numbers(pulled) <= {6.0 * step, 6.0 * step + 6}
        assert (yield user.barrier()) is None
        final = filled(-1, keys)
        assert (yield user.transfer("pull", final)) is None
        assert numbers(final) == {24.0}

    cluster = make_cluster(seed, servers=servers, policy=policy)
    cluster.run(train)
    assert not any(store.slots for store in cluster.stores.values())


@many_orders
@given(seed=SEEDS)
def test_keys_that_all_workers_use_together_are_one_chunk(make_cluster: type[Cluster], seed: int) -> None:
    def train(user: User) -> Script:
        keys = list(SHAPES)
        yield user.join()
        yield user.transfer("init", filled(0, keys))
        for step in range(1, 4):
            values = filled(user.rank + 1, keys)
            assert (yield user.transfer("pushpull", values)) is None
            assert numbers(values) == {6.0 * step}

    cluster = make_cluster(seed, servers=1)
    cluster.run(train)
    machine = cluster.nodes["server-0"].machine
    assert isinstance(machine, Coordinator)
    assert sorted(start for _, start in machine._catalog.chunks) == [-1, -1, -1, 0]


@many_orders
@given(seed=SEEDS)
def test_a_bundle_that_is_divided_keeps_the_bits_of_sums_in_rank_order(make_cluster: type[Cluster], seed: int) -> None:
    """In float32, (1e8 + 1) - 1e8 = 0 in rank order; other orders give 1."""

    def train(user: User) -> Script:
        keys: list[Key] = ["k0", "k1", "k4"]
        yield user.join()
        yield user.transfer("init", filled(0, keys))
        value = (1e8, 1.0, -1e8)[user.rank]
        groups: list[list[Key]] = [keys] if user.rank != seed % 3 else [["k4"], ["k0", "k1"]]
        sums = [filled(value, group) for group in groups]
        for call in [user.transfer("pushpull", values) for values in sums]:
            assert (yield call) is None
        assert all(float(array.flat[0]) == 0.0 for values in sums for array in values.values())

    make_cluster(seed, servers=1).run(train)


@many_orders
@given(seed=SEEDS)
def test_who_waits_for_a_bundle_that_is_divided_hears_of_a_loss(make_cluster: type[Cluster], seed: int) -> None:
    def train(user: User) -> Script:
        keys: list[Key] = ["k0", "k1", "k4"]
        yield user.join()
        yield user.transfer("init", filled(0, keys))
        if user.rank == 2:
            user.cluster.kill(user.node.name)
            return
        groups: list[list[Key]] = [keys] if user.rank else [["k1"], ["k0", "k4"]]
        for call in [user.transfer("push", filled(1, group)) for group in groups]:
            error = yield call
            assert error is not None
            assert error.details["ranks"] == [2]

    make_cluster(seed, servers=1).run(train)
