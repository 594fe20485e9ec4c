"""Train on handwritten digits with workers that talk to each other only now and then.

    python examples/local_sgd.py                                                  # starts what it needs
    aiokv run -w 2 -s 1 -- python examples/local_sgd.py --rule diloco --every 50

Each worker has its own part of the images and makes its steps alone, with an optimizer of its own. Every so many steps
they come together: as the mean of all (local-sgd), by a step of the servers along what the workers have moved by
(diloco), or by a pull towards a center that all share (easgd).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

import aiokv
from aiokv.data import ShardedSampler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.floating[Any]]

HELD_OUT = 359
EPOCHS = 20
BATCH_SIZE = 16
GOOD_ENOUGH = 0.93
DILOCO: Any = {"outer_optimizer": "nag", "outer_params": {"learning_rate": 0.7, "momentum": 0.9}}


def load() -> tuple[Floats, NDArray[np.int64]]:
    """Return images as rows of 64 pixels between 0 and 1 and a constant, and the digit that each one shows."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - so that who lacks it is told what to install
    except ImportError:
        sys.exit("local_sgd.py takes its images from scikit-learn, which is missing: pip install 'aiokv[examples]'")
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    rows = np.column_stack([images / 16, np.ones(len(labels))]).astype(np.float32)
    return rows[order], labels[order].astype(np.int64)


def gradient(w: Floats, images: Floats, labels: NDArray[np.int64]) -> Floats:
    """Return the gradient of the summed cross entropy of a softmax regression."""
    scores = images @ w
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    chances[np.arange(len(labels)), labels] -= 1
    summed: Floats = images.T @ chances
    return summed


def make_rule(name: str, kv: aiokv.KVStore, params: dict[str, Floats], every: int) -> Any:
    """Return what brings the workers together."""
    if name == "easgd":
        return aiokv.ElasticAveraging(kv, params, every=every)
    return aiokv.LocalSGD(kv, params, every=every, **(DILOCO if name == "diloco" else {}))


def train(kv: aiokv.KVStore, name: str, every: int) -> tuple[Floats, int, int]:
    """Train with all other workers; return the weights, the steps of this worker and how many exchanges they took."""
    images, labels = load()
    images, labels = images[HELD_OUT:], labels[HELD_OUT:]
    w = np.zeros((65, 10), np.float32)
    rule = make_rule(name, kv, {"w": w}, every)
    trainer = aiokv.Trainer({"w": w}, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=None)
    sampler = ShardedSampler(len(labels), rank=kv.rank, num_workers=kv.num_workers, batch_size=BATCH_SIZE, seed=1)
    steps = exchanges = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in sampler:
            trainer.step(len(batch), {"w": gradient(w, images[batch], labels[batch])})
            exchanges += rule.step()
            steps += 1
            sampler.record_batch()
    if name == "easgd":
        # The others may still be moving the center.
        kv.barrier()
        return rule.center()["w"], steps, exchanges
    rule.finish()
    return w, steps, exchanges


def main() -> int:
    """Train, say what it came to, and return the exit code."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with few exchanges.")
    parser.add_argument("--rule", choices=["local-sgd", "diloco", "easgd"], default="local-sgd")
    parser.add_argument("--every", type=int, default=20, help="steps between two exchanges (default: 20)")
    options = parser.parse_args()
    if "AIOKV_SCHEDULER" not in os.environ:
        cluster = [sys.executable, "-m", "aiokv", "run", "-w", "2", "-s", "1", "--"]
        return subprocess.call([*cluster, sys.executable, *sys.argv])
    with aiokv.create("dist_sync") as kv:
        w, steps, exchanges = train(kv, options.rule, options.every)
        images, labels = load()
        scores = images[:HELD_OUT] @ w
        accuracy = float((scores.argmax(axis=1) == labels[:HELD_OUT]).mean())
        fingerprint = hashlib.sha256(w.tobytes()).hexdigest()[:16]
        print(f"worker {kv.rank}: {steps} steps, {exchanges} exchanges, accuracy {accuracy:.4f}, weights {fingerprint}")
    return 0 if accuracy >= GOOD_ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
