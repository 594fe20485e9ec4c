"""Rounds that one server decides, in a cluster that goes on from a checkpoint: they go on where they were."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

from aiokv.core import stimuli as st
from aiokv.types import TensorSpec
from tests.core.together.conftest import Cluster
from tests.core.together.disk import Disk, with_disk
from tests.core.together.test_checkpoints_together import ROUNDS, SHAPES, gradient, values

Make = Callable[..., Any]
Script = Generator[int, Any, None]

ALL_COUNT = ["k_async:2", "k_async:3", "k_batch_async:2", "adasync:1", "round_robin"]
"""Policies under which every contribution is in a round."""
SOME_DROP = ["k_sync:2", "backup:1", "k_batch_sync:2", "quorum:2:0.0:2", "ringmaster:2"]
"""Policies that drop some."""


def begin(user: Any) -> Generator[int, Any, int]:
    """Do what every script does first, and return how many steps its worker has made."""
    assert (yield user.join()) is None
    arrays = {key: np.ones(size, np.float32) for key, size in SHAPES.items()}
    tensors = [(key, TensorSpec(array.shape, "float32")) for key, array in arrays.items()]
    options = st.KeyOptions(digests=(b"ones",) * len(tensors))
    init = user._feed(
        lambda call: st.Transfer(call, st.Operation.INIT, tensors, 10.0, options=options), list(arrays.values())
    )
    assert (yield init) is None
    call = user.go_on()
    assert (yield call) is None
    return int(user.result(call))


def trains(user: Any) -> Script:
    """Push all keys in each of the steps that are left."""
    start = yield from begin(user)
    for clock in range(start + 1, ROUNDS + 1):
        assert (
            yield user.transfer("pushpull", {key: gradient(user.rank, clock, n) for key, n in SHAPES.items()})
        ) is None
    assert (yield user.leave()) is None


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", [*ALL_COUNT, *SOME_DROP])
def test_each_step_counts_once_or_is_dropped_in_all_keys(make_cluster: Make, policy: str, seed: int) -> None:
    disk = Disk()
    options: dict[str, Any] = {"seed": seed, "workers": 3, "policy": policy}
    first = with_disk(make_cluster, disk, servers=2, **options)
    first.run(trains)
    first.settle()
    assert disk.complete
    for clock in disk.complete:
        second = with_disk(make_cluster, disk.of(clock), resume=clock, servers=3, **options)
        second.run(trains)
        second.settle()
        found = values(second)
        assert len({float(value) for each in found.values() for value in each}) == 1, "a round is the same in all keys"
        if policy in ALL_COUNT:
            assert found["tiny"][0] == 2 ** (3 * ROUNDS)


def in_turns(user: Any) -> Script:
    """Push in each step so that one worker, another one in each of them, comes when the round is closed without it.

    What is pushed depends on what was read, and the late one has read the round before.
    """
    start = yield from begin(user)
    arrays = {key: np.empty(size, np.float32) for key, size in SHAPES.items()}
    assert (yield user.transfer("pull", arrays)) is None
    for clock in range(start + 1, ROUNDS + 1):
        is_late = user.rank == clock % 3
        gradients = {key: array / 4 + gradient(user.rank, clock, array.size) for key, array in arrays.items()}
        if is_late:
            assert (yield user.barrier()) is None
        # What is read is written over what is pushed.
        assert (yield user.transfer("pushpull", gradients)) is None
        if not is_late:
            assert (yield user.barrier()) is None
        assert (yield user.barrier()) is None
        arrays = gradients
    assert user.dropped == sum(user.rank == clock % 3 for clock in range(start + 1, ROUNDS + 1)) * len(SHAPES)
    assert (yield user.leave()) is None


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", ["k_sync:2", "backup:1", "quorum:2:0.0:2"])
def test_bits_are_those_of_the_job_that_was_not_cut(policy: str, seed: int) -> None:
    disk = Disk()
    options: dict[str, Any] = {"seed": seed, "workers": 3, "policy": policy}
    first = with_disk(Cluster, disk, servers=2, **options)
    first.run(in_turns)
    first.settle()
    expected = values(first)
    assert disk.complete
    for clock in list(disk.complete):
        second = with_disk(Cluster, disk.of(clock), resume=clock, servers=3, **options)
        second.run(in_turns)
        second.settle()
        for key, value in values(second).items():
            assert (value == expected[key]).all()
