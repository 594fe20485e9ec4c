"""Networks that are cut over workers: the losses are those of one process, and a wrong one is noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from examples import hybrid_parallel, model_parallel

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import CompletedProcess


@pytest.mark.parametrize("name", ["model_parallel.py", "hybrid_parallel.py"])
def test_it_starts_what_it_needs_and_has_the_losses_of_one_process(
    name: str, run_example: Callable[..., CompletedProcess[str]]
) -> None:
    done = run_example(name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same losses as in one process" in done.stdout


def test_it_runs_on_a_cluster_that_is_there(run_example_on_cluster: Callable[..., CompletedProcess[str]]) -> None:
    done = run_example_on_cluster("model_parallel.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same losses as in one process" in done.stdout


def test_both_learn_the_same() -> None:
    losses = model_parallel.train_alone()
    assert losses[-1] < losses[0] / 2
    np.testing.assert_allclose(np.array(hybrid_parallel.train_alone()) / hybrid_parallel.SAMPLES, losses, rtol=1e-12)


def test_gradient_of_the_inputs_is_the_slope_of_the_loss() -> None:
    """By finite differences, at the first stage's activations."""
    stage = hybrid_parallel.Stage(1, lambda gradient: gradient)
    rng = np.random.default_rng(5)
    inputs, outputs = (
        rng.standard_normal((3, hybrid_parallel.HIDDEN)),
        rng.standard_normal((3, hybrid_parallel.OUTPUTS)),
    )

    def loss(moved: Any) -> float:
        return float(((moved @ weight - outputs) ** 2).sum() / 2)

    weight = stage.weight.copy()
    gradient = stage.backward(stage.forward(inputs) - outputs)
    nudge = np.zeros_like(inputs)
    nudge[1, 2] = 1e-6
    assert gradient[1, 2] == pytest.approx((loss(inputs + nudge) - loss(inputs - nudge)) / 2e-6, rel=1e-6)


@pytest.mark.parametrize("example", [model_parallel, hybrid_parallel])
def test_other_losses_end_with_1(example: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    class Store(aiokv.LocalStore):
        rank = 1

        def init(self, *args: Any, **options: Any) -> None:
            super().init(args[0], args[1])

    monkeypatch.setattr(example.aiokv, "create", lambda name: Store())
    monkeypatch.setattr(example, "train", lambda kv: [0.0] * example.STEPS)
    assert example.main() == 1
    assert "the losses are not those of one process" in capsys.readouterr().err
