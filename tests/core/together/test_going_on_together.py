"""Workers that are lost at any moment, and processes that take their places: the weights are those without that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from aiokv.core.scheduler.cluster_plan import ClusterPlan
from aiokv.core.scheduler.membership import Membership
from aiokv.core.worker.session import Session
from aiokv.types import Role
from tests.core.together.conftest import User

if TYPE_CHECKING:
    from aiokv.types import Key
    from tests.core.together.conftest import Array, Cluster, Script

KEYS: dict[Key, tuple[int, ...]] = {"big": (7, 5), "small": (3,), "scalar": (), "other": (2,)}
STEPS = 4
SEEDS = hs.integers(0, 2**32)


def filled(value: float) -> dict[Key, Array]:
    """Return an array for every key."""
    return {key: np.full(shape, value, np.float32) for key, shape in KEYS.items()}


def gradients(values: dict[Key, Array], step: int, rank: int) -> dict[Key, Array]:
    """Return what a worker pushes: another number for every value that was read."""
    return {
        key: np.asarray(array * np.float32(0.3) + np.float32(step - rank * 0.7), np.float32)
        for key, array in values.items()
    }


class Killer:
    """Lets one worker die after some deliveries, and another process take its place.

    Args:
        cluster: where.
        rank: of the worker.
        moment: after how many deliveries it dies.
        quietly: its connections stay open, as when its machine hangs.
        alone: keys are pushed one by one.
    """

    def __init__(self, cluster: Cluster, *, rank: int, moment: int, quietly: bool, alone: bool) -> None:
        self.cluster = cluster
        self.name = f"worker-{rank}"
        self.moment = moment
        self.quietly = quietly
        self.alone = alone
        self.mortal: dict[str, None] = {}
        """Workers that have joined and do not leave yet."""
        self.read: dict[int, dict[Key, Array]] = {}
        plan = ClusterPlan(2, 2, 0.5, 2.0, 16, 64, on_worker_loss="respawn", respawn_timeout=30.0)
        cluster.nodes["scheduler"].machine = Membership(plan, incarnation=1, started=0.0)
        self._step = cluster.step
        cluster.step = self.step  # type: ignore[method-assign]

    def step(self) -> None:
        """Let one thing happen, or the worker die."""
        self.moment -= 1
        name, cluster = self.name, self.cluster
        if self.moment <= 0 and name in self.mortal:
            del self.mortal[name]
            self.name = "nobody"
            cluster.kill(name, quietly=self.quietly)
            cluster.waiting.pop(name, None)
            cluster.add(name, Session(cluster.joiner(Role.WORKER, int(name[-1])), policy="bsp"))
            cluster.scripts[name] = self.train(User(cluster, cluster.nodes[name]))
            cluster.advance(name, None)
        self._step()

    def train(self, user: User) -> Script:
        """Train a few steps, from the first one that is not complete."""
        assert (yield user.join()) is None
        self.mortal[user.node.name] = None
        assert (yield user.transfer("init", filled(1))) is None
        asked = user.go_on()
        assert (yield asked) is None
        values = filled(-1)
        assert (yield user.transfer("pull", values)) is None
        for step in range(user.result(asked), STEPS):
            pushed = gradients(values, step, user.rank)
            if self.alone:
                calls = [user.transfer("pushpull", {key: array}) for key, array in pushed.items()]
            else:
                calls = [user.transfer("pushpull", pushed)]
            for call in calls:
                assert (yield call) is None
            values = pushed
        self.mortal.pop(user.node.name, None)
        self.read[user.rank] = values
        assert (yield user.leave()) is None


def undisturbed() -> dict[Key, Array]:
    """Return the weights after all steps: w += the sum of the gradients, in the order of the ranks."""
    values = filled(1)
    for step in range(STEPS):
        first, second = (gradients(values, step, rank) for rank in range(2))
        values = {key: values[key] + (first[key] + second[key]) for key in values}
    return values


@pytest.mark.parametrize("quietly", [False, True], ids=["connections break", "it hangs"])
@settings(max_examples=30)
@given(seed=SEEDS, rank=hs.integers(0, 1), moment=hs.integers(1, 160), alone=hs.booleans())
def test_weights_are_those_of_a_run_in_which_nobody_dies(
    make_cluster: type[Cluster], quietly: bool, seed: int, rank: int, moment: int, alone: bool
) -> None:
    cluster = make_cluster(seed, workers=2, max_open_pushes=16)
    killer = Killer(cluster, rank=rank, moment=moment, quietly=quietly, alone=alone)
    cluster.run(killer.train)
    cluster.settle()
    expected = undisturbed()
    for values in killer.read.values():
        for key, array in values.items():
            np.testing.assert_array_equal(array, expected[key], err_msg=str(key))
    assert len(killer.read) == 2
    assert not any(store.slots for store in cluster.stores.values())
