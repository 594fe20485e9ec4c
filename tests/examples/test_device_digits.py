"""The digits example on devices: on a cluster it gets the bits that it gets in the host's memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from examples import device_digits

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import CompletedProcess


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba's simulator in the place of a card."""
    pytest.importorskip("numba_cuda")
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")


@pytest.mark.usefixtures("simulated")
@pytest.mark.timeout(120)
def test_sums_on_devices_lead_to_the_bits_of_sums_in_the_hosts_memory(
    run_example_on_cluster: Callable[..., CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the workers, and those of servers whose keys are on devices."""
    results = []
    for store, device in (("dist_sync_device", "cuda"), ("dist_sync", "cpu")):
        monkeypatch.setenv("AIOKV_DEVICE", device)
        done = run_example_on_cluster("device_digits.py", "--store", store)
        # With 1 where it has not learned enough.
        assert done.returncode == 0, done.stdout + done.stderr
        line = next(line for line in done.stdout.splitlines() if "{" in line)
        results.append(json.loads(line[line.index("{") :]))
    assert [result.pop("store") for result in results] == ["dist_sync_device", "dist_sync"]
    assert results[0] == results[1]
    assert (results[0]["workers"], results[0]["devices"]) == (2, 2)


@pytest.mark.usefixtures("simulated")
def test_it_runs_alone(run_example: Callable[..., CompletedProcess[str]]) -> None:
    done = run_example(
        "device_digits.py", "--store", "device", "--devices", "cuda:0", "--epochs", "1", "--batch-size", "128"
    )
    assert (done.returncode, json.loads(done.stdout)["devices"]) == (1, 1), done.stderr
    assert "is below 0.93: train for more --epochs" in done.stderr


def test_the_gradients_are_the_slopes_of_the_loss() -> None:
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {
        name: 0.1 * rng.standard_normal(value.shape) for name, value in device_digits.new_weights(0).items()
    }
    images, labels = rng.random((5, 64)), rng.integers(0, 10, 5)

    def loss(moved: dict[str, Any]) -> float:
        _, scores = device_digits.forward(np, moved, images)
        return float((np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(5), labels]).sum())

    found = device_digits.gradients(np, weights, images, labels)
    for name, place in (("w1", (7, 3)), ("b1", (3,)), ("w2", (3, 9)), ("b2", (0,))):
        up, down = ({**weights, name: weights[name].copy()} for _ in range(2))
        up[name][place] += 1e-6
        down[name][place] -= 1e-6
        assert found[name][place] == pytest.approx((loss(up) - loss(down)) / 2e-6, rel=1e-5), name
