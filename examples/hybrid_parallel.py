"""Train a network in two stages on two halves of the data at once: four workers, each with one stage and one half.

    python examples/hybrid_parallel.py                                     # starts what it needs
    aiokv run -w 4 -s 1 -- python examples/hybrid_parallel.py

              stage 0      stage 1
    half 0    worker 0 --> worker 1      activations and their gradients: keys of one half's two workers
    half 1    worker 2 --> worker 3
                 |            |
                 sums of gradients: keys of one stage's two workers

All keys have the policy "sum": what a worker receives is the sum of what the workers of the key's group have pushed.
Workers with the same stage make the same update with it. In the end the losses are those of one process with all the
data.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import aiokv

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

STAGES, HALVES = 2, 2
SAMPLES, INPUTS, HIDDEN, OUTPUTS = 64, 8, 16, 4
STEPS = 40
RULE: Any = {"learning_rate": 0.1, "momentum": 0.9}


def problem() -> tuple[Floats, Floats]:
    """Return inputs and the outputs to learn."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((SAMPLES, INPUTS))
    return inputs, np.sin(inputs @ rng.standard_normal((INPUTS, OUTPUTS)))


class Stage:
    """One layer of the network; the first one ends in tanh.

    Args:
        number: 0 or 1.
        reduce: adds its gradient to that of the other worker with this stage.
    """

    def __init__(self, number: int, reduce: Callable[[Floats], Floats]) -> None:
        shape = ((INPUTS, HIDDEN), (HIDDEN, OUTPUTS))[number]
        rng = np.random.default_rng(1 + number)
        self.weight: Floats = rng.standard_normal(shape) / np.sqrt(shape[0])
        self.number = number
        self._reduce = reduce
        self._trainer = aiokv.Trainer({"weight": self.weight}, "sgd", RULE, kvstore=None)

    def forward(self, inputs: Floats) -> Floats:
        """Return the layer's outputs."""
        self._inputs = inputs
        self._outputs = inputs @ self.weight
        if self.number == 0:
            self._outputs = np.tanh(self._outputs)
        return self._outputs

    def backward(self, gradient: Floats) -> Floats:
        """Learn from the gradient of the loss by the outputs; return that by the inputs."""
        if self.number == 0:
            gradient = gradient * (1 - self._outputs**2)
        to_inputs = gradient @ self.weight.T
        self._trainer.step(SAMPLES, {"weight": self._reduce(self._inputs.T @ gradient)})
        return to_inputs


def train_alone() -> list[float]:
    """Train both stages with all the data in one process; return the summed losses."""
    inputs, outputs = problem()
    first, second = (Stage(number, lambda gradient: gradient) for number in range(STAGES))
    losses = []
    for _ in range(STEPS):
        error = second.forward(first.forward(inputs)) - outputs
        first.backward(second.backward(error))
        losses.append(float((error**2).sum() / 2))
    return losses


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands."""

    stage: int
    half: int

    @classmethod
    def of(cls, rank: int) -> Place:
        """Return the place of a rank."""
        return cls(rank % STAGES, rank // STAGES)

    @property
    def pipeline(self) -> list[int]:
        """The ranks with the same half of the data."""
        return [self.half * STAGES + stage for stage in range(STAGES)]

    @property
    def replicas(self) -> list[int]:
        """The ranks with the same stage."""
        return [half * STAGES + self.stage for half in range(HALVES)]


def train(kv: aiokv.KVStore) -> list[float]:
    """Train this worker's stage on its half; return the losses of the half, which only the last stage knows."""
    place = Place.of(kv.rank)
    rows = slice(place.half * SAMPLES // HALVES, (place.half + 1) * SAMPLES // HALVES)
    inputs, outputs = (array[rows] for array in problem())
    nothing = np.zeros((len(inputs), HIDDEN))
    forth, back, weights = f"activations{place.half}", f"gradients{place.half}", f"stage{place.stage}"
    stage = Stage(place.stage, lambda gradient: kv.pushpull(weights, gradient))
    kv.init({forth: nothing, back: nothing}, policy="sum", group=place.pipeline)
    kv.init(weights, np.zeros_like(stage.weight), policy="sum", group=place.replicas)
    losses = []
    for _ in range(STEPS):
        if place.stage == 0:
            kv.push(forth, stage.forward(inputs))
            stage.backward(kv.pushpull(back, nothing))
        else:
            error = stage.forward(kv.pushpull(forth, nothing)) - outputs
            kv.push(back, stage.backward(error))
            losses.append(float((error**2).sum() / 2))
    return losses


def main() -> int:
    """Train, compare with one process, and return the exit code."""
    with aiokv.create("dist_sync") as kv:
        place = Place.of(kv.rank)
        losses = np.array(train(kv))
        if place.stage != STAGES - 1:
            return 0
        kv.init("losses", np.zeros(STEPS), policy="sum", group=place.replicas)
        losses = kv.pushpull("losses", losses)
    expected = train_alone()
    if not np.allclose(losses, expected, rtol=1e-9):
        print("the losses are not those of one process", file=sys.stderr)
        return 1
    if place.half == 0:
        print(f"mean loss of the first step {losses[0] / SAMPLES:.4f}, of the last {losses[-1] / SAMPLES:.4f}")
        print("the same losses as in one process")
    return 0


if __name__ == "__main__":
    if "AIOKV_SCHEDULER" not in os.environ:
        cluster = [sys.executable, "-m", "aiokv", "run", "-w", str(STAGES * HALVES), "-s", "1", "--"]
        sys.exit(subprocess.call([*cluster, sys.executable, __file__]))
    sys.exit(main())
