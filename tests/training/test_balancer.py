"""Balanced batches with one worker and no network; `tests/net/test_worker_rules.py` has several."""

from __future__ import annotations

import pytest

import aiokv
from aiokv.errors import ConfigError


def test_alone_a_worker_has_the_whole_batch_whatever_its_speed() -> None:
    balancer = aiokv.BatchBalancer(aiokv.create("local"), 100, every=2)
    assert [balancer.step(seconds) for seconds in (1.0, 5.0, 0.1, 3.0)] == [False, True, False, True]
    assert (balancer.batch_size, balancer.batch_sizes, balancer.total, balancer.weight) == (100, [100], 100, 1.0)


def test_callers_can_not_change_the_sizes() -> None:
    balancer = aiokv.BatchBalancer(aiokv.create("local"), 100)
    balancer.batch_sizes[0] = 7
    assert balancer.batch_size == 100


def test_what_can_not_be_balanced() -> None:
    kv = aiokv.create("local")
    with pytest.raises(ConfigError, match="every must be at least 1, got 0"):
        aiokv.BatchBalancer(kv, 100, every=0)
    with pytest.raises(ConfigError, match="a batch of 7 is too small for 1 workers with at least 8 samples each"):
        aiokv.BatchBalancer(kv, 7, least=8)
    with pytest.raises(ConfigError, match="weight must be more than 0"):
        aiokv.BatchBalancer(kv, 7, weight=0.0)
    with pytest.raises(ConfigError, match="seconds must be more than 0"):
        aiokv.BatchBalancer(kv, 7).step(0.0)
