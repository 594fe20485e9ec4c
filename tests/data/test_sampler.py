"""Batches of indices: as many for every worker, every index once, and nothing lost when workers come and go."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiokv.data import ShardedSampler
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

Last = Literal["pad", "drop", "short"]
Batch = list[int]

sizes = st.integers(0, 120)
workers = st.integers(1, 6)
batch_sizes = st.integers(1, 7)
lasts = st.sampled_from(["pad", "drop", "short"])


def samplers(n: int, num_workers: int, batch_size: int, **options: Any) -> list[ShardedSampler]:
    return [ShardedSampler(n, rank, num_workers, batch_size=batch_size, **options) for rank in range(num_workers)]


def batches(sampler: ShardedSampler) -> list[Batch]:
    return [batch.tolist() for batch in sampler]


def finish(sampler: ShardedSampler, count: int) -> list[Batch]:
    """Take and record the next batches."""
    taken = batches(sampler)[:count]
    sampler.record_batch(count)
    return taken


def flat(nested: Sequence[Sequence[Batch]]) -> list[int]:
    return [index for worker in nested for batch in worker for index in batch]


# --- one epoch ---


def test_eight_examples_per_worker_are_four_batches_of_two() -> None:
    both = samplers(16, 2, 2)
    assert [len(sampler) for sampler in both] == [4, 4]
    assert [[len(batch) for batch in sampler] for sampler in both] == [[2] * 4] * 2
    assert sorted(flat([batches(sampler) for sampler in both])) == list(range(16))


def test_in_order_each_step_takes_the_next_indices() -> None:
    first, second = samplers(12, 2, 3, shuffle=False)
    assert batches(first) == [[0, 1, 2], [6, 7, 8]]
    assert batches(second) == [[3, 4, 5], [9, 10, 11]]


def test_a_remainder_is_padded_from_the_beginning() -> None:
    first, second = samplers(5, 2, 2, shuffle=False)
    assert batches(first) == [[0, 1], [4, 0]]
    assert batches(second) == [[2, 3], [1, 2]]


def test_padding_goes_round_where_there_is_little() -> None:
    assert [batches(sampler) for sampler in samplers(2, 2, 3, shuffle=False)] == [[[0, 1, 0]], [[1, 0, 1]]]


def test_a_remainder_can_be_dropped() -> None:
    assert [batches(sampler) for sampler in samplers(5, 2, 2, shuffle=False, last="drop")] == [[[0, 1]], [[2, 3]]]


def test_a_remainder_can_be_spread() -> None:
    # 6 and 7 are the remainder of the first; in the second there is one index for two workers.
    spread = samplers(8, 2, 3, shuffle=False, last="short")
    assert [batches(sampler) for sampler in spread] == [[[0, 1, 2], [6]], [[3, 4, 5], [7]]]
    spread = samplers(7, 2, 3, shuffle=False, last="short")
    assert [batches(sampler) for sampler in spread] == [[[0, 1, 2], [6]], [[3, 4, 5], [0]]]


@pytest.mark.parametrize("last", ["pad", "drop", "short"])
def test_no_examples_are_no_batches(last: Last) -> None:
    assert batches(ShardedSampler(0, 0, 2, batch_size=2, last=last)) == []


@given(n=sizes, num_workers=workers, batch_size=batch_sizes, last=lasts, seed=st.integers(0, 9))
def test_all_workers_together_see_every_index_once_in_equally_many_batches(
    n: int, num_workers: int, batch_size: int, last: Last, seed: int
) -> None:
    group = samplers(n, num_workers, batch_size, last=last, seed=seed)
    dealt = [batches(sampler) for sampler in group]
    assert {len(worker) for worker in dealt} == {len(sampler) for sampler in group}
    counts = Counter(flat(dealt))
    step = num_workers * batch_size
    assert set(counts) <= set(range(n))
    match last:
        case "drop":
            assert all(count == 1 for count in counts.values())
            assert len(counts) == n - n % step
        case "pad":
            assert len(counts) == n
            assert counts.total() == n + -n % step
            assert {len(batch) for worker in dealt for batch in worker} <= {batch_size}
        case "short":
            assert len(counts) == n
            assert counts.total() == n + (max(0, num_workers - n % step) if n % step else 0)
            assert all(batch for worker in dealt for batch in worker)


def test_epochs_differ_and_come_again() -> None:
    sampler = ShardedSampler(100, 1, 2, batch_size=5, seed=3)
    first = batches(sampler)
    sampler.set_epoch(1)
    second = batches(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert batches(sampler) == first
    assert batches(ShardedSampler(100, 1, 2, batch_size=5, seed=4)) != first


def test_torch_loads_by_it() -> None:
    data = torch.arange(10) * 10
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(data), batch_sampler=ShardedSampler(10, 1, 2, batch_size=5, shuffle=False)
    )
    assert [batch.tolist() for (batch,) in loader] == [[50, 60, 70, 80, 90]]


# --- progress ---


def test_progress_grows_by_what_is_recorded_and_a_new_epoch_begins_at_nothing() -> None:
    sampler = ShardedSampler(16, 0, 2, batch_size=2)
    for number, _ in enumerate(sampler, 1):
        sampler.record_batch()
        assert sampler.position == number
    assert batches(sampler) == []
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.position, len(batches(sampler))) == (1, 0, 4)


def test_setting_the_epoch_that_is_under_way_keeps_its_progress() -> None:
    sampler = ShardedSampler(16, 0, 2, batch_size=2)
    sampler.record_batch(3)
    sampler.set_epoch(0)
    assert len(batches(sampler)) == 1


def test_what_is_not_recorded_comes_again() -> None:
    sampler = ShardedSampler(16, 0, 2, batch_size=2)
    assert batches(sampler) == batches(sampler)


@given(n=sizes, num_workers=workers, batch_size=batch_sizes, last=lasts, data=st.data())
def test_a_state_continues_an_epoch_anywhere_as_if_it_had_not_stopped(
    n: int, num_workers: int, batch_size: int, last: Last, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, num_workers - 1))
    whole = ShardedSampler(n, rank, num_workers, batch_size=batch_size, last=last)
    whole.set_epoch(2)
    uninterrupted = batches(whole)
    stop = data.draw(st.integers(0, len(uninterrupted)))
    # The state is rank 0's, as a checkpoint's often is.
    writer = ShardedSampler(n, 0, num_workers, batch_size=batch_size, last=last)
    writer.set_epoch(2)
    writer.record_batch(stop)
    saved = json.dumps(writer.state())

    resumed = ShardedSampler(n, rank, num_workers, batch_size=batch_size, last=last)
    resumed.restore(json.loads(saved))
    assert resumed.epoch == 2
    assert uninterrupted[:stop] + batches(resumed) == uninterrupted


def test_progress_after_the_state_was_taken_is_lost() -> None:
    sampler = ShardedSampler(16, 1, 2, batch_size=2)
    everything = batches(sampler)
    sampler.record_batch()
    saved = sampler.state()
    sampler.record_batch(2)
    sampler.restore(saved)
    assert batches(sampler) == everything[1:]


def test_a_state_can_hold_a_different_progress_for_each_worker() -> None:
    both = samplers(16, 2, 2)
    everything = [batches(sampler) for sampler in both]
    saved = both[0].state(done=[1, 3])
    for sampler in both:
        sampler.restore(saved)
    assert [batches(sampler) for sampler in both] == [everything[0][1:], everything[1][3:]]


# --- other workers ---


def test_what_is_left_of_the_epoch_is_dealt_over_the_survivor() -> None:
    first, second = samplers(12, 2, 2, shuffle=False)
    assert finish(first, 2) == [[0, 1], [4, 5]]
    assert finish(second, 1) == [[2, 3]]
    # Worker 1 got [6, 7] too, but died before it recorded it.
    first.re_deal(0, 1, done=[2, 1])
    assert (first.rank, first.num_workers, first.position, len(first)) == (0, 1, 0, 3)
    assert batches(first) == [[6, 7], [8, 9], [10, 11]]
    first.set_epoch(1)
    assert len(first) == 6


def test_after_a_step_of_synchronous_training_nobody_needs_to_be_asked() -> None:
    first, _, third = samplers(12, 3, 2, shuffle=False)
    for sampler in (first, third):
        sampler.record_batch()
    first.re_deal(0, 2)
    third.re_deal(1, 2)
    assert (batches(first), batches(third)) == ([[6, 7], [10, 11]], [[8, 9], [6, 7]])


def test_a_checkpoint_is_restored_by_another_number_of_workers() -> None:
    saved = samplers(12, 3, 2, shuffle=False)[1].state(done=[1, 2, 0])
    first, second = samplers(12, 2, 2, shuffle=False)
    for sampler in (first, second):
        sampler.restore(saved)
    # [0, 1], [2, 3] and [8, 9] are finished.
    assert (batches(first), batches(second)) == ([[4, 5], [10, 11]], [[6, 7], [4, 5]])


def test_a_new_batch_size_keeps_the_step_as_large_as_before() -> None:
    first, second = samplers(16, 2, 2, shuffle=False)
    first.record_batch()
    first.re_deal(0, 1, batch_size=4)
    assert batches(first) == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    second.restore(second.state())
    assert len(batches(second)) == 4


@given(n=sizes, last=lasts, batch_size=batch_sizes, data=st.data())
def test_however_often_workers_change_no_index_is_lost_and_only_padding_comes_twice(
    n: int, last: Last, batch_size: int, data: st.DataObject
) -> None:
    group = samplers(n, data.draw(workers), batch_size, last=last)
    finished: list[int] = []
    padding = 0
    for remaining in range(data.draw(st.integers(0, 4)), -1, -1):
        num_workers, size = len(group), n - len(set(finished))
        assert len({len(sampler) for sampler in group}) == 1
        lengths = st.just(len(group[0])) if remaining == 0 else st.integers(0, len(group[0]))
        done = [data.draw(lengths) for _ in group]
        hands = [batches(sampler) for sampler in group]
        padding += max(0, len(flat(hands)) - size)
        finished += flat([hand[:count] for hand, count in zip(hands, done, strict=True)])
        if remaining == 0:
            break
        # One goes on, perhaps under another rank; the others join by its state.
        survivor = group[data.draw(st.integers(0, num_workers - 1))]
        num_workers = data.draw(workers)
        survivor.re_deal(data.draw(st.integers(0, num_workers - 1)), num_workers, done=done)
        state = json.loads(json.dumps(survivor.state()))
        group = samplers(n, num_workers, batch_size, last=last)
        for sampler in group:
            sampler.restore(state)
        assert batches(survivor) == batches(group[survivor.rank])
    counts = Counter(finished)
    if last == "drop":
        assert len(counts) > n - len(group) * batch_size
        assert all(count == 1 for count in counts.values())
    else:
        assert set(counts) == set(range(n))
        assert counts.total() - n <= padding


def test_batches_of_the_old_deal_do_not_go_on() -> None:
    sampler = ShardedSampler(16, 0, 2, batch_size=2)
    iterator = iter(sampler)
    next(iterator)
    sampler.re_deal(0, 1)
    with pytest.raises(ConfigError, match="the batches were dealt anew meanwhile: iterate over the sampler again"):
        next(iterator)


# --- mistakes ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": -1}, "n=-1 is too small: expected 0 or more"),
        ({"batch_size": 0}, "batch_size=0 is too small: expected 1 or more"),
        ({"seed": -1}, "seed=-1 is too small: expected 0 or more"),
        ({"last": "wrap"}, "unknown last='wrap': expected 'pad', 'drop' or 'short'"),
        ({"rank": 2}, "rank 2 is not one of 2 workers"),
    ],
)
def test_impossible_samplers_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardedSampler(**{"n": 10, "rank": 0, "num_workers": 2, "batch_size": 2} | change)


def test_more_batches_than_there_are_cannot_be_finished() -> None:
    sampler = ShardedSampler(16, 1, 2, batch_size=2)
    sampler.record_batch(3)
    with pytest.raises(ConfigError, match="cannot finish 2 more batches: rank 1 has 1 left of 4 in epoch 0"):
        sampler.record_batch(2)


def test_a_negative_epoch_is_refused() -> None:
    with pytest.raises(ConfigError, match="epoch -1 is too small"):
        ShardedSampler(16, 1, 2, batch_size=2).set_epoch(-1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 1, "num_workers": 1}, "rank 1 is not one of 1 workers"),
        ({"rank": 0, "num_workers": 1, "batch_size": 0}, "batch_size=0 is too small"),
        ({"rank": 0, "num_workers": 1, "done": [1]}, "finished batches of 1 workers: expected those of 2"),
        ({"rank": 0, "num_workers": 1, "done": [1, 5]}, "rank 1 cannot have finished 5 batches: expected 0 to 4"),
    ],
)
def test_a_deal_that_cannot_be_changes_nothing(arguments: dict[str, Any], message: str) -> None:
    sampler = ShardedSampler(16, 1, 2, batch_size=2)
    sampler.record_batch()
    before = batches(sampler)
    with pytest.raises(ConfigError, match=message):
        sampler.re_deal(**arguments)
    assert (sampler.rank, sampler.num_workers, batches(sampler)) == (1, 2, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 17}, "the state has n=17, this sampler has n=16"),
        ({"seed": 1}, "the state has seed=1, this sampler has seed=0"),
        ({"shuffle": False}, "the state has shuffle=False, this sampler has shuffle=True"),
        ({"version": 2}, "this is no state of a sampler"),
        ({"deals": []}, "this is no state of a sampler"),
        ({"order": 1}, "epoch 0 has another order here than in the state: use the same release of NumPy"),
        (
            {"deals": [{"deal": {"num_workers": 2, "batch_size": 2, "last": "pad"}, "done": [4, 5]}]},
            "rank 1 cannot have finished 5 batches: expected 0 to 4",
        ),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    sampler = ShardedSampler(16, 1, 2, batch_size=2)
    before = batches(sampler)
    with pytest.raises(ConfigError, match=message):
        sampler.restore(sampler.state(done=[2, 2]) | change)
    assert batches(sampler) == before


def test_batches_belong_to_the_caller() -> None:
    sampler = ShardedSampler(4, 0, 1, batch_size=2, shuffle=False)
    for batch in sampler:
        assert batch.dtype == np.int64
        batch[:] = -1
    assert batches(sampler) == [[0, 1], [2, 3]]
