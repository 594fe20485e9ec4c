"""The job of a chaos run shows when an update is missing, or made twice, or out of order."""

from __future__ import annotations

import numpy as np

from aiokv.chaos.job import digest, first_weights, gradients
from aiokv.chaos.report import Report, count_contributions

WORKERS = 3


def train(steps: list[list[int]]) -> str:
    """Return the digest after steps to each of which the ranks in a list contribute, in that order."""
    weights = first_weights(1)
    for step, ranks in enumerate(steps):
        parts = [gradients(weights, 1, rank, step) for rank in ranks]
        for key, value in weights.items():
            total = parts[0][key].copy()
            for part in parts[1:]:
                total += part[key]
            weights[key] = value - np.float32(0.05) * total
    return digest(weights)


def test_bits_show_what_was_left_out_or_made_twice_or_in_another_order() -> None:
    whole = [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    ends = {train(steps) for steps in (
        whole,
        [[0, 1, 2], [0, 2], [0, 1, 2]],
        [[0, 1, 2], [0, 1, 1, 2], [0, 1, 2]],
        [[0, 1, 2], [1, 2, 0], [0, 1, 2]],
        [[0, 1, 2], [0, 1, 2]],
    )}  # fmt: skip
    assert len(ends) == 5
    assert train(whole) == train(whole)


def test_contributions_that_are_missing_from_the_updates_are_lost() -> None:
    report = Report(seed=1, workers=3, servers=2, steps=10)
    count_contributions(report, 49, {"0": {"dropped": {"late": 2}, "duplicates": 4}, "1": {"dropped": {"stale": 1}}})
    assert (report.applied, report.lost, report.duplicate, report.late) == (147, 3, 4, 3)
