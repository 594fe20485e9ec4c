"""Train a small network on handwritten digits: in one process, or on many workers, with the same code.

    python examples/digits.py                                             # this process alone, no network
    aiokv run -s 2 -w 2 -- python examples/digits.py --store dist_sync    # each step waits for all workers
    aiokv run -s 2 -w 2 -- python examples/digits.py --store dist_async   # no worker waits for another

The servers keep the weights and run the optimizer. A worker computes a gradient from its own part of the images, pushes
it and pulls the weights that it led to: see `train_epoch`.

All workers take the same number of steps, each with a full batch. The images that are left over sit the epoch out; they
are drawn anew for every epoch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import aiokv
from aiokv.data import shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.floating[Any]]
    Labels = NDArray[np.int64]
    Weights = dict[str, Floats]

HIDDEN = 256
CLASSES = 10
HELD_OUT = 0.2
GOOD_ENOUGH = 0.95
LEARNING_RATE = 0.1


# --- the images ---


@dataclass(frozen=True, slots=True)
class Digits:
    """Images as rows of 64 pixels between 0 and 1, and the digit that each one shows."""

    images: Floats
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: slice | NDArray[np.int64]) -> Digits:
        return Digits(self.images[index], self.labels[index])


def load(seed: int) -> tuple[Digits, Digits]:
    """Return the images to train on and those held out, the same for every worker with the same seed."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - so that who lacks it is told what to install
    except ImportError:
        sys.exit("digits.py takes its images from scikit-learn, which is missing: pip install 'aiokv[examples]'")
    images, labels = load_digits(return_X_y=True)
    digits = Digits((images / 16).astype(np.float32), labels.astype(np.int64))
    order = np.random.default_rng(seed).permutation(len(digits))
    held_out = round(HELD_OUT * len(digits))
    return digits[order[held_out:]], digits[order[:held_out]]


def batches(digits: Digits, size: int, count: int, rng: np.random.Generator) -> Iterator[Digits]:
    """Draw `count` batches of `size` images, no image twice."""
    order = rng.permutation(len(digits))[: size * count]
    for chosen in order.reshape(count, size):
        yield digits[chosen]


# --- the network: 64 pixels -> 256 ReLU -> 10 digits ---


def new_weights(seed: int) -> Weights:
    """Return random weights, scaled so that every layer starts with signals of about the same size (He et al. 2015)."""
    rng = np.random.default_rng(seed)
    return {
        "w1": (rng.standard_normal((64, HIDDEN)) * np.sqrt(2 / 64)).astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": (rng.standard_normal((HIDDEN, CLASSES)) * np.sqrt(2 / HIDDEN)).astype(np.float32),
        "b2": np.zeros(CLASSES, np.float32),
    }


def forward(weights: Weights, images: Floats) -> tuple[Floats, Floats]:
    """Return the hidden layer and the scores of the ten digits."""
    hidden = np.maximum(images @ weights["w1"] + weights["b1"], 0)
    return hidden, hidden @ weights["w2"] + weights["b2"]


def loss_and_gradients(weights: Weights, batch: Digits) -> tuple[float, Weights]:
    """Return the cross entropy and its gradients, summed over the batch: the optimizer divides by its size."""
    hidden, scores = forward(weights, batch.images)
    scores -= scores.max(axis=1, keepdims=True)
    log_softmax = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    rows = np.arange(len(batch))
    loss = -float(log_softmax[rows, batch.labels].sum())

    to_scores = np.exp(log_softmax)
    to_scores[rows, batch.labels] -= 1
    to_hidden = (to_scores @ weights["w2"].T) * (hidden > 0)
    return loss, {
        "w1": batch.images.T @ to_hidden,
        "b1": to_hidden.sum(axis=0),
        "w2": hidden.T @ to_scores,
        "b2": to_scores.sum(axis=0),
    }


def accuracy(weights: Weights, digits: Digits) -> float:
    """Return the share of images whose digit gets the highest score."""
    _, scores = forward(weights, digits.images)
    return float((scores.argmax(axis=1) == digits.labels).mean())


def fingerprint(weights: Weights) -> str:
    """Return 16 hexadecimal digits that are the same only for the same bits."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].tobytes())
    return digest.hexdigest()[:16]


def use_one_thread() -> None:
    """Let NumPy use one thread: the matrices are small, and the machine may have other workers to run."""
    # It comes with scikit-learn, so `load` has already asked for it. It ships no types.
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # noqa: PLC0415

    threadpool_limits(1)


# --- training ---


@dataclass(frozen=True, slots=True)
class Epoch:
    """What one epoch came to, as one worker saw it."""

    number: int
    loss: float
    """Mean over the epoch's images."""
    accuracy: float
    """On the images held out."""
    step_ms: float
    """Median time of a step."""
    gb_per_s: float
    """Bytes pushed and pulled, in units of 10**9, per second spent in the store."""

    HEADER: ClassVar[str] = "epoch     loss  accuracy  ms/step   GB/s"

    def __str__(self) -> str:
        return f"{self.number:5} {self.loss:8.4f} {self.accuracy:9.4f} {self.step_ms:8.2f} {self.gb_per_s:6.2f}"


@dataclass(frozen=True, slots=True)
class Result:
    """What the training came to. All workers end with the same weights; the times are this worker's own."""

    store: str
    seed: int
    workers: int
    rank: int
    accuracy: float
    weights: str
    """The fingerprint of the weights."""
    step_ms: float
    """Median over the epochs."""
    gb_per_s: float
    """Median over the epochs."""
    epochs: list[Epoch]


def train_epoch(kv: aiokv.KVStore, weights: Weights, work: Iterable[Digits]) -> tuple[float, float, float]:
    """Take one step per batch; return the mean loss, the median ms per step and the GB/s of the store."""
    losses, steps, exchanges = [], [], []
    for batch in work:
        start = time.perf_counter()
        loss, gradients = loss_and_gradients(weights, batch)
        computed = time.perf_counter()
        kv.pushpull(gradients, out=weights)
        done = time.perf_counter()
        losses.append(loss / len(batch))
        steps.append(done - start)
        exchanges.append(done - computed)
    nbytes = 2 * sum(array.nbytes for array in weights.values()) * len(exchanges)
    return float(np.mean(losses)), 1e3 * float(np.median(steps)), 1e-9 * nbytes / sum(exchanges)


def train(
    kv: aiokv.KVStore, options: argparse.Namespace, training: Digits, held_out: Digits, console: Console
) -> Result:
    """Train together with all other workers of the cluster."""
    share = len(training) // kv.num_workers
    if share < options.batch_size:
        sys.exit(f"digits.py: {share} images per worker do not fill a batch: use --batch-size {share} or less")
    mine = training[shard(len(training), kv.rank, kv.num_workers)]
    steps = share // options.batch_size
    weights = new_weights(options.seed)
    kv.init(weights)
    # A sync update takes the mean gradient of all workers' batches. An async one takes a single worker's share of that
    # mean, but there are num_workers times as many of them: the same numbers suit both.
    scale = 1 / (kv.num_workers * options.batch_size)
    kv.set_optimizer("sgd", learning_rate=LEARNING_RATE, momentum=0.9, rescale_grad=scale)

    left_over = len(training) - kv.num_workers * steps * options.batch_size
    console.print(f"{kv.num_workers} x {steps} steps of {options.batch_size} images per epoch")
    console.print(f"{left_over} of {len(training)} images are left over, others in every epoch")
    console.print(Epoch.HEADER)
    rng = np.random.default_rng([options.seed, kv.rank])
    epochs: list[Epoch] = []
    with progress_bar(console) as progress:
        bar = progress.add_task("", total=steps)
        for number in range(1, options.epochs + 1):
            progress.reset(bar, total=steps, description=f"epoch {number}")
            work = progress.track(batches(mine, options.batch_size, steps, rng), total=steps, task_id=bar)
            loss, step_ms, gb_per_s = train_epoch(kv, weights, work)
            epochs.append(Epoch(number, loss, accuracy(weights, held_out), step_ms, gb_per_s))
            console.print(f"{epochs[-1]}  {bar_of(number, options.epochs)}")

    # In async mode the others may still be pushing: the weights are final when everybody is here.
    kv.barrier()
    kv.pull(weights)
    return Result(
        store=options.store,
        seed=options.seed,
        workers=kv.num_workers,
        rank=kv.rank,
        accuracy=accuracy(weights, held_out),
        weights=fingerprint(weights),
        step_ms=median(epoch.step_ms for epoch in epochs),
        gb_per_s=median(epoch.gb_per_s for epoch in epochs),
        epochs=epochs,
    )


def bar_of(done: int, total: int, width: int = 20) -> str:
    """Return a bar that shows in a file or a pipe too, where `progress_bar` can't move."""
    filled = width * done // total
    return f"{'#' * filled}{'.' * (width - filled)} {100 * done // total:3}%"


def progress_bar(console: Console) -> Progress:
    """Return a bar for the steps of one epoch; it shows only in a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


# --- the command line ---


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--store", choices=["local", "dist_sync", "dist_async"], default="local")
    parser.add_argument("--epochs", type=positive, default=20)
    parser.add_argument("--batch-size", type=positive, default=32, help="images per worker and step (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the first weights and the batches")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write the result to a file, or print it and nothing else"
    )
    return parser.parse_args(argv)


def write_json(result: Result, file: str) -> None:
    """Write the result as one line of JSON; to standard output if the file is "-"."""
    line = json.dumps(asdict(result))
    if file == "-":
        print(line)
    else:
        Path(file).write_text(line + "\n", encoding="utf-8")


def main() -> None:
    """Train, report, and exit with 1 if the network has not learned enough."""
    options = arguments()
    training, held_out = load(options.seed)
    use_one_thread()
    with aiokv.create(options.store) as kv:
        # All workers end with the same weights and the same accuracy, so one of them tells.
        console = Console(quiet=kv.rank != 0 or options.json == "-", highlight=False)
        result = train(kv, options, training, held_out, console)
    console.print(f"held-out accuracy {result.accuracy:.4f}, weights {result.weights}")
    if options.json != "-":
        print(f"worker {result.rank}: {result.step_ms:.2f} ms per step, {result.gb_per_s:.2f} GB/s")
    if options.json and result.rank == 0:
        write_json(result, options.json)
    if result.accuracy < GOOD_ENOUGH:
        sys.exit(f"digits.py: held-out accuracy {result.accuracy:.4f} is below {GOOD_ENOUGH}: train for more --epochs")


if __name__ == "__main__":
    main()
