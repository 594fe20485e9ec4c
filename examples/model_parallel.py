"""Train one network that is cut over two workers: each has a layer, and they exchange activations and their gradients.

    python examples/model_parallel.py                                      # starts what it needs
    aiokv run -w 2 -s 1 -- python examples/model_parallel.py

No worker holds the whole network. In each step worker 0 computes its layer and hands the activations on; worker 1
computes the loss and hands back what it changes by with each of them. Each updates its own layer. In the end the losses
are those of one process that has it all.

What is handed on goes through a key of the two workers with the policy "sum": one pushes its values, the other zeros,
and both receive the sum.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

import aiokv

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

WORKERS = 2
SAMPLES, INPUTS, HIDDEN, OUTPUTS = 64, 8, 16, 4
STEPS = 40
RULE: Any = {"learning_rate": 0.1, "momentum": 0.9}
FIRST, SECOND = 0, 1
"""The ranks that have the layers."""


def problem() -> tuple[Floats, Floats]:
    """Return inputs and the outputs to learn."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((SAMPLES, INPUTS))
    return inputs, np.sin(inputs @ rng.standard_normal((INPUTS, OUTPUTS)))


def new_layer(rank: int) -> dict[str, Floats]:
    """Return a layer's first weights."""
    rows, columns = ((INPUTS, HIDDEN), (HIDDEN, OUTPUTS))[rank]
    return {f"layer{rank}": np.random.default_rng(1 + rank).standard_normal((rows, columns)) / np.sqrt(rows)}


class FirstLayer:
    """Inputs -> tanh."""

    def __init__(self) -> None:
        self.params = new_layer(FIRST)
        self.trainer = aiokv.Trainer(self.params, "sgd", RULE, kvstore=None)

    def forward(self, inputs: Floats) -> Floats:
        """Return the activations."""
        self.inputs = inputs
        self.activations = np.tanh(inputs @ self.params["layer0"])
        return self.activations

    def backward(self, gradient: Floats) -> None:
        """Learn from the gradient of the loss by the activations."""
        slope = gradient * (1 - self.activations**2)
        self.trainer.step(SAMPLES, {"layer0": self.inputs.T @ slope})


class SecondLayer:
    """Activations -> squared error."""

    def __init__(self) -> None:
        self.params = new_layer(SECOND)
        self.trainer = aiokv.Trainer(self.params, "sgd", RULE, kvstore=None)

    def learn(self, activations: Floats, outputs: Floats) -> tuple[float, Floats]:
        """Learn; return the mean loss, and the gradient of the summed loss by the activations."""
        error = activations @ self.params["layer1"] - outputs
        gradient = error @ self.params["layer1"].T
        self.trainer.step(SAMPLES, {"layer1": activations.T @ error})
        return float((error**2).sum() / (2 * SAMPLES)), gradient


def train_alone() -> list[float]:
    """Train both layers in one process; return the losses."""
    inputs, outputs = problem()
    first, second = FirstLayer(), SecondLayer()
    losses = []
    for _ in range(STEPS):
        loss, gradient = second.learn(first.forward(inputs), outputs)
        first.backward(gradient)
        losses.append(loss)
    return losses


def train(kv: aiokv.KVStore) -> list[float]:
    """Train the layer of this worker's rank; return the losses, which only the second one knows."""
    nothing = np.zeros((SAMPLES, HIDDEN))
    for key in ("activations", "gradients"):
        kv.init(key, nothing, policy="sum", group=[FIRST, SECOND])
    inputs, outputs = problem()
    losses = []
    if kv.rank == FIRST:
        first = FirstLayer()
        for _ in range(STEPS):
            kv.push("activations", first.forward(inputs))
            first.backward(kv.pushpull("gradients", nothing))
    else:
        second = SecondLayer()
        for _ in range(STEPS):
            loss, gradient = second.learn(kv.pushpull("activations", nothing), outputs)
            kv.push("gradients", gradient)
            losses.append(loss)
    return losses


def main() -> int:
    """Train, compare with one process, and return the exit code."""
    with aiokv.create("dist_sync") as kv:
        losses = train(kv)
        if kv.rank == FIRST:
            return 0
    expected = train_alone()
    print(f"loss of the first step {losses[0]:.4f}, of the last {losses[-1]:.4f}; in one process {expected[-1]:.4f}")
    if not np.allclose(losses, expected, rtol=1e-9):
        print("the losses are not those of one process", file=sys.stderr)
        return 1
    print("the same losses as in one process")
    return 0


if __name__ == "__main__":
    if "AIOKV_SCHEDULER" not in os.environ:
        cluster = [sys.executable, "-m", "aiokv", "run", "-w", str(WORKERS), "-s", "1", "--"]
        sys.exit(subprocess.call([*cluster, sys.executable, __file__]))
    sys.exit(main())
