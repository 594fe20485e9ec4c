"""Workers join and leave while others train: each round has the pushes of those who count in it, and of nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from aiokv.core.worker.session import Session
from aiokv.errors import AiokvError
from aiokv.types import Role
from tests.core.together.conftest import User

if TYPE_CHECKING:
    from aiokv.types import Key
    from tests.core.together.conftest import Array, Cluster, Script

KEYS: dict[Key, tuple[int, ...]] = {"big": (7, 5), "small": (3,), "scalar": ()}
"""The first is cut into chunks over all servers."""

STEPS = 6

SEEDS = hs.integers(0, 2**32)
many_orders = settings(max_examples=30)
some_orders = settings(max_examples=15)


def filled(value: float) -> dict[Key, Array]:
    """Return an array for every key."""
    return {key: np.full(shape, value, np.float32) for key, shape in KEYS.items()}


def gradients(values: dict[Key, Array], step: int, rank: int) -> dict[Key, Array]:
    """Return what a worker pushes: another number for every value that was read."""
    return {
        key: np.asarray(array * np.float32(0.3) + np.float32(step - rank * 0.7), np.float32)
        for key, array in values.items()
    }


class Elastic:
    """Lets workers come to a cluster of two after so many deliveries, and leave after so many steps of theirs.

    Args:
        cluster: where.
        moments: when each of those comes that come later.
        stays: how many steps each of them takes at most.
    """

    def __init__(self, cluster: Cluster, moments: list[int], stays: list[int]) -> None:
        self.cluster = cluster
        self.coming = {2 + number: moment for number, moment in enumerate(moments)}
        self.stays = {2 + number: stay for number, stay in enumerate(stays)}
        self.took: dict[int, range] = {}
        """The steps of each worker."""
        self.told: dict[int, list[list[int]]] = {}
        """Who counts in each of its steps, as it was told before it."""
        self.read: dict[int, dict[Key, Array]] = {}
        self.is_counted = False
        """Push the same number each time, which says by whom it is."""
        self.changes: dict[int, str] = {}
        """Before which steps keys get other policies."""
        self.kills: dict[str, int] = {}
        """Workers that die, after how many deliveries."""
        self._step = cluster.step
        cluster.step = self.step  # type: ignore[method-assign]

    def step(self) -> None:
        """Let one thing happen, or a worker come, when the cluster is complete."""
        scheduler = self.cluster.nodes["scheduler"].machine
        for rank in list(self.coming) if getattr(scheduler, "_epoch", 0) else ():
            self.coming[rank] -= 1
            if self.coming[rank] <= 0:
                del self.coming[rank]
                self.come(rank)
        for name in list(self.kills):
            self.kills[name] -= 1
            if self.kills[name] <= 0 and name in self.cluster.nodes:
                del self.kills[name]
                self.cluster.kill(name)
                self.cluster.scripts.pop(name, None)
                self.cluster.waiting.pop(name, None)
        self._step()

    def come(self, rank: int) -> None:
        """Start a worker."""
        joiner = self.cluster.joiner(Role.WORKER, rank)
        self.cluster.add(joiner.name, Session(joiner, policy=self.cluster.policy))
        self.cluster.scripts[joiner.name] = self.train(User(self.cluster, self.cluster.nodes[joiner.name]))
        self.cluster.advance(joiner.name, None)

    def train(self, user: User) -> Script:
        """Train from the first step in which this worker counts."""
        if (yield user.join()) is not None:
            # All was over before it came.
            return
        assert (yield user.transfer("init", filled(1))) is None
        asked = user.go_on()
        if isinstance((yield asked), AiokvError):
            return
        start = user.result(asked)
        self.took[user.rank] = range(start, min(STEPS, start + self.stays.get(user.rank, STEPS)))
        values = filled(-1)
        assert (yield user.transfer("pull", values)) is None
        for step in self.took[user.rank]:
            for change in [each for each in self.changes if each == step or (step == start and each < step)]:
                assert (yield user.set_policy(self.changes[change])) is None
            members = user.members(step)
            assert (yield members) is None
            self.told.setdefault(user.rank, []).append(user.result(members))
            values = filled(32.0**user.rank) if self.is_counted else gradients(values, step, user.rank)
            assert (yield user.transfer("pushpull", values)) is None
        self.read[user.rank] = values
        assert (yield user.leave()) is None

    def after(self, steps: int) -> dict[Key, Array]:
        """Return the weights after so many steps: w += the sum of the gradients, in the order of the ranks."""
        values = filled(1)
        for step in range(steps):
            parts = [gradients(values, step, rank) for rank in sorted(self.took) if step in self.took[rank]]
            for key in values:
                total = parts[0][key]
                for part in parts[1:]:
                    total = total + part[key]
                values[key] = values[key] + total
        return values

    def check(self) -> None:
        """Compare bits: every worker has read what is made of the pushes of those who counted."""
        for rank, values in self.read.items():
            expected = self.after(self.took[rank].stop)
            for key, array in values.items():
                np.testing.assert_array_equal(array, expected[key], err_msg=f"{key} of rank {rank}")
        assert not any(store.slots for store in self.cluster.stores.values())

    def check_sums(self) -> None:
        """Check that each push is in every element once: they are powers of 32, so that a sum says how many of whom."""
        total = sum(32**rank * len(steps) for rank, steps in self.took.items())
        for store in self.cluster.stores.values():
            for versions in store.chunks.values():
                np.testing.assert_array_equal(versions[max(versions)], 1 + total)


@pytest.mark.parametrize("mode", ["fail", "shrink", "respawn"])
@many_orders
@given(
    seed=SEEDS,
    servers=hs.integers(1, 3),
    moments=hs.lists(hs.integers(1, 300), min_size=1, max_size=2),
    stays=hs.lists(hs.integers(1, STEPS), min_size=2, max_size=2),
)
def test_scenario_65_workers_that_come_and_go_count_in_all_keys_from_one_step_on_and_no_round_is_lost(
    make_cluster: type[Cluster], mode: str, seed: int, servers: int, moments: list[int], stays: list[int]
) -> None:
    cluster = make_cluster(seed, workers=2, servers=servers, max_workers=4, on_worker_loss=mode)
    elastic = Elastic(cluster, moments, stays)
    cluster.run(elastic.train)
    cluster.settle()
    assert elastic.took[0] == elastic.took[1] == range(STEPS)
    elastic.check()


@many_orders
@given(
    seed=SEEDS,
    servers=hs.integers(1, 3),
    policy=hs.sampled_from(["asp", "ssp:1", "pssp:1:1", "sync_switch:0.5:6"]),
    moments=hs.lists(hs.integers(1, 300), min_size=1, max_size=2),
)
def test_without_rounds_each_push_of_who_joins_counts_once_in_every_element(
    make_cluster: type[Cluster], seed: int, servers: int, policy: str, moments: list[int]
) -> None:
    cluster = make_cluster(seed, workers=2, servers=servers, max_workers=4, policy=policy)
    elastic = Elastic(cluster, moments, [STEPS, STEPS])
    elastic.is_counted = True
    cluster.run(elastic.train)
    cluster.settle()
    elastic.check_sums()


@some_orders
@given(
    seed=SEEDS,
    servers=hs.integers(1, 3),
    policy=hs.sampled_from(["k_async:2", "k_batch_async:2", "adasync:1", "round_robin", "k_async:4"]),
    mode=hs.sampled_from(["fail", "shrink"]),
    moments=hs.lists(hs.integers(1, 300), min_size=1, max_size=2),
    stays=hs.lists(hs.integers(1, STEPS), min_size=2, max_size=2),
)
def test_where_one_server_decides_each_push_of_who_joins_counts_once_in_every_element(
    make_cluster: type[Cluster],
    seed: int,
    servers: int,
    policy: str,
    mode: str,
    moments: list[int],
    stays: list[int],
) -> None:
    cluster = make_cluster(seed, workers=2, servers=servers, max_workers=4, policy=policy, on_worker_loss=mode)
    elastic = Elastic(cluster, moments, stays)
    elastic.is_counted = True
    cluster.run(elastic.train)
    cluster.settle()
    elastic.check_sums()


@many_orders
@given(
    seed=SEEDS,
    servers=hs.integers(1, 3),
    policies=hs.permutations(["asp", "bsp", "ssp:1", "k_async:2", "ringmaster:9", "sync_switch:0.5:3"]),
    moments=hs.lists(hs.integers(1, 300), min_size=1, max_size=2),
    stays=hs.lists(hs.integers(1, STEPS), min_size=2, max_size=2),
)
def test_where_keys_change_their_policy_meanwhile_each_push_counts_once_in_every_element(
    make_cluster: type[Cluster], seed: int, servers: int, policies: list[str], moments: list[int], stays: list[int]
) -> None:
    cluster = make_cluster(seed, workers=2, servers=servers, max_workers=4, policy=policies[0])
    elastic = Elastic(cluster, moments, stays)
    elastic.is_counted, elastic.changes = True, {3: policies[1]}
    cluster.run(elastic.train)
    cluster.settle()
    elastic.check_sums()


@some_orders
@given(
    seed=SEEDS,
    servers=hs.integers(1, 3),
    policy=hs.sampled_from(["k_sync:2", "backup:1", "k_batch_sync:2", "quorum:3:0.0:2", "ringmaster:2"]),
    moments=hs.lists(hs.integers(1, 300), min_size=1, max_size=2),
    stays=hs.lists(hs.integers(1, STEPS), min_size=2, max_size=2),
)
def test_where_some_are_dropped_those_of_who_joins_count_in_all_elements_or_in_none(
    make_cluster: type[Cluster], seed: int, servers: int, policy: str, moments: list[int], stays: list[int]
) -> None:
    cluster = make_cluster(seed, workers=2, servers=servers, max_workers=4, policy=policy)
    elastic = Elastic(cluster, moments, stays)
    elastic.is_counted = True
    cluster.run(elastic.train)
    cluster.settle()
    newest = [versions[max(versions)] for store in cluster.stores.values() for versions in store.chunks.values()]
    total = int(newest[0].flat[0])
    for value in newest:
        np.testing.assert_array_equal(value, total)
    for rank, steps in elastic.took.items():
        assert (total - 1) // 32**rank % 32 <= len(steps)


@many_orders
@given(seed=SEEDS, servers=hs.integers(1, 3), moment=hs.integers(1, 300), death=hs.integers(1, 400))
def test_the_others_take_all_their_steps_although_who_joins_dies_at_any_moment(
    make_cluster: type[Cluster], seed: int, servers: int, moment: int, death: int
) -> None:
    cluster = make_cluster(seed, workers=2, servers=servers, max_workers=3, on_worker_loss="shrink")
    elastic = Elastic(cluster, [moment], [STEPS])
    elastic.kills["worker-2"] = moment + death
    cluster.run(elastic.train)
    cluster.settle()
    assert elastic.took[0] == elastic.took[1] == range(STEPS)
    values = elastic.read[0]
    for key, array in elastic.read[1].items():
        np.testing.assert_array_equal(array, values[key], err_msg=str(key))
