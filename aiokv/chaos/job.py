"""What every worker of a chaos run trains: `python -m aiokv.chaos.job JOB`, with the `JobPlan` as JSON.

Every gradient depends on the weights that it is computed from, on the rank and on the step, and on nothing else. So an
update that is missing, made twice, or made in another order changes the weights that the job ends with.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

import aiokv

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Weights = dict[str, NDArray[np.float32]]

SHAPES = {"embedding": (400, 300), "hidden": (300, 120), "scale": (64, 40), "bias": (120,), "offset": (7,)}
"""One tensor for each way in which keys are placed: cut over all servers, whole on one of them, and in a bundle."""

LEARNING_RATE = 0.05
MOMENTUM = 0.9


class JobPlan(msgspec.Struct, frozen=True):
    """What is trained.

    Attributes:
        seed: of the first weights and of all gradients.
        steps: how many steps are made; 0: as many as `stop_file` says when it is there.
        pause: seconds that each step computes.
        stop_file: path of a file that says how many steps are made.
    """

    seed: int
    steps: int
    pause: float
    stop_file: str = ""


def first_weights(seed: int) -> Weights:
    """Return the weights before the first step, the same for all ranks."""
    draw = np.random.default_rng(seed)
    return {key: draw.standard_normal(shape, np.float32) for key, shape in SHAPES.items()}


def gradients(weights: Weights, seed: int, rank: int, step: int) -> Weights:
    """Return a rank's gradients of a step: towards a point that is drawn for it."""
    draw = np.random.default_rng((seed, rank, step))
    return {key: value - draw.standard_normal(value.shape, np.float32) for key, value in weights.items()}


def digest(weights: Mapping[str, NDArray[Any]]) -> str:
    """Return a hash of all bits of the weights."""
    told = hashlib.sha256()
    for key in sorted(weights):
        told.update(np.ascontiguousarray(weights[key]).tobytes())
    return told.hexdigest()


def train(plan: JobPlan) -> None:
    """Train on, from wherever this rank is, to the end; say so at each step."""
    stop_file = Path(plan.stop_file) if plan.stop_file else None
    with aiokv.create("dist_sync") as kv:
        weights = first_weights(plan.seed)
        kv.set_optimizer("sgd", learning_rate=LEARNING_RATE, momentum=MOMENTUM, rescale_grad=1 / kv.num_workers)
        kv.init(weights)
        step = kv.resume_step()
        _say(event="begin", rank=kv.rank, step=step)
        kv.pull(weights)
        steps = plan.steps
        while not steps or step < steps:
            time.sleep(plan.pause)
            kv.pushpull(gradients(weights, plan.seed, kv.rank, step), out=weights)
            step += 1
            _say(event="step", rank=kv.rank, step=step)
            if not steps and stop_file is not None and stop_file.exists():
                steps = int(stop_file.read_text())
        kv.barrier("trained")
        tallies = kv.tallies() if kv.rank == 0 else {}
        _say(
            event="end",
            rank=kv.rank,
            step=step,
            digest=digest(weights),
            updates=sum(kv.update_counts().values()),
            tallies=msgspec.to_builtins(tallies, str_keys=True),
        )


def _say(**facts: Any) -> None:
    # In one piece: whoever reads must not see half a line when this process is killed.
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    train(msgspec.json.decode(sys.argv[1], type=JobPlan))
