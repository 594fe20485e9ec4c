"""However long each server writes, one checkpoint after the other is completed while training goes on."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.core.together.conftest import Cluster
from tests.core.together.disk import Disk, with_disk

ROUNDS = 48
ON_THE_WAY = 16
"""So many rounds at most go by while messages between the scheduler and the others are on their way."""


def trains(user: Any) -> Any:
    """Take all rounds; each adds one to every element for each worker."""
    assert (yield user.join()) is None
    assert (yield user.transfer("init", {"large": np.zeros(40, np.float32), "small": np.zeros(3, np.float32)})) is None
    for _ in range(ROUNDS):
        ones = {"large": np.ones(40, np.float32), "small": np.ones(3, np.float32)}
        assert (yield user.transfer("pushpull", ones)) is None
    assert (yield user.leave()) is None


@settings(max_examples=6)
@example(seed=0, every=1, rounds=[2, 2])
@given(seed=st.integers(0, 2**32), every=st.integers(1, 6), rounds=st.lists(st.integers(0, 12), min_size=2, max_size=2))
def test_checkpoints_go_on_being_completed(seed: int, every: int, rounds: list[int]) -> None:
    """Each one is of the same round in all keys of all servers."""
    disk = Disk(**{f"server-{index}": count for index, count in enumerate(rounds)})
    cluster = with_disk(Cluster, disk, seed=seed, every=every, workers=2, servers=2)
    cluster.run(trains)
    cluster.settle()
    for clock, saved in disk.complete.items():
        assert clock % every == 0
        for state, value in saved:
            assert dict(state.counts) == {0: clock, 1: clock}
            assert (value == np.float32(2 * clock)).all()
    clocks = [0, *disk.complete, ROUNDS]
    longest = max(later - earlier for earlier, later in itertools.pairwise(clocks))
    assert longest <= max(rounds) + every + ON_THE_WAY
