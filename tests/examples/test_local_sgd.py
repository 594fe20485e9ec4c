"""The example of local SGD: it learns by every rule, and its workers end with the same weights."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from examples import local_sgd

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import CompletedProcess

LINE = re.compile(r"worker \d: (\d+) steps, (\d+) exchanges, accuracy ([\d.]+), weights (\w{16})")


@pytest.mark.parametrize(("rule", "every", "exchanges"), [("local-sgd", 20, 45), ("diloco", 50, 18), ("easgd", 20, 45)])
def test_both_workers_learn_the_same(
    rule: str, every: int, exchanges: int, run_example: Callable[..., CompletedProcess[str]]
) -> None:
    """1438 images are 44 steps of 2 x 16 in each of 20 epochs, and one that is filled up."""
    done = run_example("local_sgd.py", "--rule", rule, "--every", str(every))
    # With 1 where it has not learned enough.
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [match.groups() for match in LINE.finditer(done.stdout)]
    assert [(int(steps), int(times)) for steps, times, *_ in lines] == [(45 * 20, exchanges)] * 2
    assert lines[0] == lines[1]


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    rng = np.random.default_rng(0)
    w, images = 0.1 * rng.standard_normal((65, 10)), rng.random((5, 65))
    labels = rng.integers(0, 10, 5)

    def loss(moved: local_sgd.Floats) -> float:
        scores = images @ moved
        return float((np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(5), labels]).sum())

    nudge = np.zeros_like(w)
    nudge[7, 3] = 1e-6
    slope = (loss(w + nudge) - loss(w - nudge)) / 2e-6
    assert local_sgd.gradient(w, images, labels)[7, 3] == pytest.approx(slope, rel=1e-5)
