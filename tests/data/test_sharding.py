"""Splitting data over workers: nothing is lost, nothing is seen twice, nobody has more than one example extra."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.data import shard
from aiokv.errors import ConfigError

sizes = st.integers(0, 1000)
counts = st.integers(1, 40)


def test_three_workers_share_ten_examples() -> None:
    assert [shard(10, rank, 3) for rank in range(3)] == [slice(0, 3), slice(3, 6), slice(6, 10)]


def test_one_worker_gets_everything() -> None:
    assert shard(7, 0, 1) == slice(0, 7)


@given(size=sizes, num_workers=counts)
def test_every_example_belongs_to_exactly_one_worker(size: int, num_workers: int) -> None:
    examples = np.arange(size)
    parts = [examples[shard(size, rank, num_workers)] for rank in range(num_workers)]
    assert np.concatenate(parts).tolist() == examples.tolist()


@given(size=sizes, num_workers=counts)
def test_the_shortest_part_is_the_floor_and_the_longest_one_more(size: int, num_workers: int) -> None:
    lengths = [len(range(size)[shard(size, rank, num_workers)]) for rank in range(num_workers)]
    assert min(lengths) == size // num_workers
    assert max(lengths) <= min(lengths) + 1


def test_more_workers_than_examples_leaves_some_without() -> None:
    lengths = [len(range(2)[shard(2, rank, 5)]) for rank in range(5)]
    assert sorted(lengths) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("rank", [-1, 2, 7])
def test_a_rank_outside_the_cluster_is_named(rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"rank {rank} is not one of 2 workers: expected 0 <= rank < 2"):
        shard(10, rank, 2)


def test_no_workers_cannot_share() -> None:
    with pytest.raises(ConfigError, match="cannot split data over 0 workers: expected 1 or more"):
        shard(10, 0, 0)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot split -1 examples: expected 0 or more"):
        shard(-1, 0, 1)


def test_even_shards_drop_what_is_too_much() -> None:
    assert [shard(10, rank, 3, even=True) for rank in range(3)] == [slice(0, 3), slice(3, 6), slice(6, 9)]


def test_even_shards_padded_share_an_example() -> None:
    assert [shard(10, rank, 3, even=True, last="pad") for rank in range(3)] == [slice(0, 4), slice(3, 7), slice(6, 10)]


def test_even_shards_of_fewer_examples_than_workers() -> None:
    assert [len(range(2)[shard(2, rank, 5, even=True)]) for rank in range(5)] == [0] * 5
    assert [len(range(2)[shard(2, rank, 5, even=True, last="pad")]) for rank in range(5)] == [1] * 5


@given(size=sizes, num_workers=counts)
def test_even_shards_have_equal_lengths_and_dropping_loses_less_than_one_each(size: int, num_workers: int) -> None:
    shards = [range(size)[shard(size, rank, num_workers, even=True)] for rank in range(num_workers)]
    assert {len(examples) for examples in shards} == {size // num_workers}
    assert len({example for examples in shards for example in examples}) > size - num_workers


@given(size=sizes, num_workers=counts)
def test_padded_shards_have_equal_lengths_and_lose_nothing(size: int, num_workers: int) -> None:
    shards = [range(size)[shard(size, rank, num_workers, even=True, last="pad")] for rank in range(num_workers)]
    assert {len(examples) for examples in shards} == {-(-size // num_workers)}
    assert {example for examples in shards for example in examples} == set(range(size))


def test_an_unknown_way_to_be_even_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown last='short': expected 'drop' or 'pad'"):
        shard(10, 0, 2, even=True, last="short")  # type: ignore[arg-type]
