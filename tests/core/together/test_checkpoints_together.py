"""Checkpoints of a whole cluster, in any order of events: a cut through all pushes, from which another one goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiokv.core import stimuli as st
from aiokv.types import TensorSpec
from aiokv.wire import messages as m
from tests.core.together.disk import Disk, cut, with_disk

Make = Callable[..., Any]
SHAPES: dict[Any, int] = {"large": 40, "small": 3, "tiny": 2, "other": 5}
ROUNDS = 7
SIZES = {"large": 40, "old": 40, "new": 50}


def gradient(rank: int, clock: int, size: int) -> Any:
    """Return a contribution from which can be seen whose it is."""
    return np.full(size, np.float32(2.0 ** (rank * ROUNDS + clock - 1)))


def trains(*begins: int) -> Callable[[Any], Any]:
    """Return what a worker does: all rounds after one, which may be each rank's own.

    Pushes of a round are under way together.
    """

    def script(user: Any) -> Any:
        error = yield user.join()
        assert error is None
        rank = user.rank
        begin = begins[rank] if len(begins) > 1 else begins[0]
        arrays = {key: np.ones(size, np.float32) for key, size in SHAPES.items()}
        tensors = [(key, TensorSpec(array.shape, "float32")) for key, array in arrays.items()]
        options = st.KeyOptions(digests=(b"ones",) * len(tensors))
        error = yield user._feed(
            lambda call: st.Transfer(call, st.Operation.INIT, tensors, 10.0, options=options), list(arrays.values())
        )
        assert error is None
        directory = user.node.machine._directory
        directory.counts.clock = begin
        for key in SHAPES:
            known = directory._known[key]
            (known.bundle or known).pushed = begin
        for clock in range(begin + 1, ROUNDS + 1):
            gradients = {key: gradient(rank, clock, size) for key, size in SHAPES.items()}
            large = {"large": gradients.pop("large")}
            for call in [user.transfer("pushpull", some) for some in (large, gradients)]:
                error = yield call
                assert error is None
        error = yield user.leave()
        assert error is None

    return script


def values(cluster: Any) -> dict[Any, Any]:
    """Return the newest values of all keys."""
    found: dict[Any, dict[int, Any]] = {}
    for store in cluster.stores.values():
        for (key, start), versions in store.chunks.items():
            for piece, value in zip(store.pieces[key, start], cut(store, key, start, max(versions)), strict=True):
                found.setdefault(piece.key, {})[max(start, 0)] = value
    return {key: np.concatenate([parts[start] for start in sorted(parts)]) for key, parts in found.items()}


@pytest.mark.parametrize("seed", range(12))
def test_sync_checkpoint_has_all_of_a_round_and_another_cluster_goes_on_with_the_same_bits(
    make_cluster: Make, seed: int
) -> None:
    disk = Disk()
    first = with_disk(make_cluster, disk, seed=seed, workers=2, servers=3)
    first.run(trains(0))
    first.settle()
    assert disk.complete, "the slowest of all orders completes one"
    for clock, saved in disk.complete.items():
        expected = 1.0 + sum(gradient(rank, each, 1)[0] for rank in range(2) for each in range(1, clock + 1))
        for state, value in saved:
            assert dict(state.counts) == {0: clock, 1: clock}
            assert (value == np.float32(expected)).all()
    clock = max(disk.complete)
    second = with_disk(make_cluster, disk, resume=clock, seed=seed, workers=2, servers=2)
    second.run(trains(clock))
    second.settle()
    assert values(second).keys() == SHAPES.keys()
    for key, value in values(first).items():
        assert (values(second)[key] == value).all()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("policy", ["asp", "ssp:1", "k_sync:2"])
def test_other_checkpoints_have_each_push_once_or_not_at_all(make_cluster: Make, policy: str, seed: int) -> None:
    disk = Disk()
    cluster = with_disk(make_cluster, disk, seed=seed, workers=3, servers=2, policy=policy)
    cluster.run(trains(0))
    cluster.settle()
    assert disk.complete
    for saved in disk.complete.values():
        if policy == "k_sync:2":
            assert len({(state.version, state.counts) for state, _ in saved}) == 1, "rounds are those of all keys"
        for state, value in saved:
            # The pushes of each rank up to its count, and no others; some may have been dropped.
            bits = int(value[0]) - 1
            for rank in range(3):
                count = dict(state.counts).get(rank, 0)
                mask = sum(1 << (rank * ROUNDS + clock) for clock in range(count))
                own = bits & (((1 << ROUNDS) - 1) << (rank * ROUNDS))
                assert own & ~mask == 0, "a push that it does not count is in the value"
                if policy != "k_sync:2":
                    assert own == mask, "a push that it counts is not in the value"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("policy", ["asp", "ssp:1", "k_sync:2"])
def test_other_clusters_go_on_so_that_each_push_counts_once(make_cluster: Make, policy: str, seed: int) -> None:
    disk = Disk()
    first = with_disk(make_cluster, disk, seed=seed, workers=3, servers=2, policy=policy)
    first.run(trains(0))
    first.settle()
    clock = min(disk.complete)
    counts = [dict(state.counts) for state, _ in disk.complete[clock]]
    # Chunks that have more of a rank's pushes than others recognise those that come again.
    begins = [min(each.get(rank, 0) for each in counts) for rank in range(3)]
    second = with_disk(make_cluster, disk, resume=clock, seed=seed, workers=3, servers=2, policy=policy)
    second.run(trains(*begins))
    second.settle()
    whole = 2 ** (3 * ROUNDS)
    for value in values(second).values():
        assert (value == value[0]).all()
        assert value[0] == whole if policy != "k_sync:2" else 1 < value[0] <= whole


@pytest.mark.parametrize("seed", range(6))
def test_server_that_dies_leaves_no_checkpoint_that_is_only_partly_there(make_cluster: Make, seed: int) -> None:
    disk = Disk()
    cluster = with_disk(make_cluster, disk, seed=seed, workers=2, servers=2)

    def dies(user: Any) -> Any:
        yield user.join()
        yield user.transfer("init", {key: np.ones(size, np.float32) for key, size in SHAPES.items()})
        for clock in range(1, ROUNDS + 1):
            if clock == 4:
                cluster.kill("server-1")
            error = yield user.transfer("pushpull", {key: gradient(0, clock, size) for key, size in SHAPES.items()})
            if error is not None:
                return

    cluster.run(dies)
    for saved in disk.complete.values():
        assert {state.key for state, _ in saved} == SHAPES.keys()


@pytest.mark.parametrize("seed", range(12))
def test_keys_that_are_made_or_deleted_behind_the_round_are_in_it_as_they_were_then(
    make_cluster: Make, seed: int
) -> None:
    """Whatever each server had heard by then: the second one hears last that all are past the round."""
    disk = Disk()
    cluster = with_disk(make_cluster, disk, every=4, seed=seed, workers=2, servers=3)
    deliver = cluster.deliver

    def deliver_late(node: Any, stimulus: Any, payload: Any) -> None:
        is_rest = isinstance(stimulus, st.Received) and isinstance(stimulus.message, m.CheckpointRest)
        if is_rest and node.name == "server-1" and "old" in node.machine._catalog:
            cluster.ready[node.name, stimulus.peer].appendleft((node, stimulus, payload))
        else:
            deliver(node, stimulus, payload)

    cluster.deliver = deliver_late

    def script(user: Any) -> Any:
        assert (yield user.join()) is None
        keys = ["large", "old"]
        assert (yield user.transfer("init", {key: np.zeros(40, np.float32) for key in keys})) is None
        for step in range(ROUNDS):
            if step == 4:
                keys = ["large"]
            if step == 5:
                assert (yield user.barrier()) is None
                assert (yield user._feed(lambda call: st.DeleteKeys(call, ["old"], 5.0))) is None
                assert (yield user.barrier()) is None
                keys = ["large", "new"]
                assert (yield user.transfer("init", {"new": np.ones(50, np.float32)})) is None
            assert (yield user.transfer("pushpull", {key: gradient(0, 1, SIZES[key]) for key in keys})) is None
        assert (yield user.leave()) is None

    cluster.run(script)
    cluster.settle()
    found = [(state.key, state.stop - state.start, value) for state, value in disk.complete[4]]
    assert {key: sum(size for each, size, _ in found if each == key) for key, _, _ in found} == {"large": 40, "old": 40}
    assert all((value == 8.0).all() for _, _, value in found)
