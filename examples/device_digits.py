"""Train on handwritten digits with weights, batches and gradients on CUDA devices, several for each worker.

    NUMBA_ENABLE_CUDASIM=1 aiokv run -s 2 -w 2 -- python examples/device_digits.py     # without a card
    aiokv run -s 2 -w 2 -- python examples/device_digits.py --devices cuda:0 cuda:1    # with cards, needs CuPy

A worker puts a part of each batch on each of its devices, and hands the store a list with the gradients of all of
them: the store sums them on a device, one copy leaves for the servers, and the new weights are copied to every device.
With `--store dist_sync` the arrays are copied to the host's memory first, and are summed there, to the same bits.

On a card CuPy computes. Numba's simulator has arrays on a device, and kernels, but nothing that multiplies matrices:
there NumPy computes on copies. The network is small, since each thread of the simulated device is one of Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import aiokv
from aiokv.data import ShardedSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

HIDDEN = 32
CLASSES = 10
LEARNING_RATE = 0.1
GOOD_ENOUGH = 0.93

ON_DEVICE = {"device", "dist_sync_device"}
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


# --- where arrays lie, and who computes ---


class Card:
    """CuPy: it computes where its arrays lie."""

    def __init__(self) -> None:
        try:
            import cupy  # noqa: PLC0415 - only a machine with a card has it
        except ImportError:
            sys.exit("device_digits.py computes with CuPy: pip install cupy-cuda13x, or set NUMBA_ENABLE_CUDASIM=1")
        self.numpy: Any = cupy

    def array(self, loaded: Any) -> Any:
        """Return an array of this library over memory that is on a device."""
        with self.numpy.cuda.Device(loaded.gpu_data.context.device.id):
            return self.numpy.asarray(loaded)

    def compute(self, function: Any, *arrays: Any) -> Any:
        """Call a function where the first array lies."""
        with self.device_of(arrays[0]):
            return function(self.numpy, *arrays)

    def device_of(self, array: Any) -> Any:
        """Return the device of an array, or of one of a dict."""
        return next(iter(array.values())).device if isinstance(array, dict) else array.device

    def to_host(self, array: Any) -> Any:
        """Return a copy in the host's memory."""
        return array.get()

    def fill(self, array: Any, values: Any) -> None:
        """Copy values of the host to an array."""
        array.set(values)


class Simulator:
    """Numba's simulator: NumPy computes on copies."""

    def __init__(self) -> None:
        from numba import cuda  # noqa: PLC0415 - where there is a card, CuPy is enough

        self._cuda: Any = cuda

    def array(self, loaded: Any) -> Any:
        """Return the array itself."""
        return loaded

    def compute(self, function: Any, *arrays: Any) -> Any:
        """Call a function with copies, and return copies of its results on the device."""
        found = function(np, *[each(array, self.to_host) for array in arrays])
        return each(found, self._cuda.to_device)

    def to_host(self, array: Any) -> Any:
        """Return a copy in the host's memory."""
        return array.copy_to_host()

    def fill(self, array: Any, values: Any) -> None:
        """Copy values of the host to an array."""
        array.copy_to_device(values)


def each(arrays: Any, function: Any) -> Any:
    """Return what a function makes of an array, or of each of a dict."""
    return {name: function(array) for name, array in arrays.items()} if isinstance(arrays, dict) else function(arrays)


# --- the network: 64 pixels -> 32 ReLU -> 10 digits ---


def new_weights(seed: int) -> dict[str, Any]:
    """Return random weights, scaled so that every layer starts with signals of about the same size (He et al. 2015)."""
    rng = np.random.default_rng(seed)
    return {
        "w1": (rng.standard_normal((64, HIDDEN)) * np.sqrt(2 / 64)).astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": (rng.standard_normal((HIDDEN, CLASSES)) * np.sqrt(2 / HIDDEN)).astype(np.float32),
        "b2": np.zeros(CLASSES, np.float32),
    }


def forward(numpy: Any, weights: Any, images: Any) -> tuple[Any, Any]:
    """Return the hidden layer and the scores of the ten digits; `numpy`: the library that computes."""
    hidden = numpy.maximum(images @ weights["w1"] + weights["b1"], 0)
    return hidden, hidden @ weights["w2"] + weights["b2"]


def gradients(numpy: Any, weights: Any, images: Any, labels: Any) -> dict[str, Any]:
    """Return the gradients of the cross entropy, summed over the images: the optimizer divides by their number."""
    hidden, scores = forward(numpy, weights, images)
    shares = numpy.exp(scores - scores.max(axis=1, keepdims=True))
    to_scores = shares / shares.sum(axis=1, keepdims=True)
    to_scores -= labels[:, None] == numpy.arange(CLASSES)
    to_hidden = (to_scores @ weights["w2"].T) * (hidden > 0)
    return {
        "w1": images.T @ to_hidden,
        "b1": to_hidden.sum(axis=0),
        "w2": hidden.T @ to_scores,
        "b2": to_scores.sum(axis=0),
    }


# --- training ---


@dataclass(frozen=True, slots=True)
class Result:
    """What the training came to."""

    store: str
    workers: int
    devices: int
    steps: int
    accuracy: float
    """On the images held out."""
    weights: str
    """16 hexadecimal digits that are the same only for the same bits."""


def load_images(seed: int) -> tuple[Any, Any, Any, Any]:
    """Return images and labels to train on, and those held out; the same for every worker with the same seed."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - so that who lacks it is told what to install
    except ImportError:
        sys.exit("device_digits.py takes its images from scikit-learn, which is missing: pip install 'aiokv[examples]'")
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    held_out = len(labels) // 5
    return images[held_out:], labels[held_out:], images[:held_out], labels[:held_out]


def train(kv: Any, options: argparse.Namespace) -> Result:
    """Train together with all other workers."""
    library: Any = Simulator() if SIMULATED else Card()
    images, labels, test_images, test_labels = load_images(options.seed)
    start = new_weights(options.seed)
    # One set of weights on every device.
    replicas: list[Any] = [
        {name: library.array(aiokv.split_and_load(value, [device])[0]) for name, value in start.items()}
        for device in options.devices
    ]
    kv.init(start)
    per_step = options.batch_size * len(options.devices)
    scale = 1 / (kv.num_workers * per_step)
    kv.set_optimizer("sgd", learning_rate=LEARNING_RATE, momentum=0.9, rescale_grad=scale)
    sampler = ShardedSampler(len(labels), kv.rank, kv.num_workers, batch_size=per_step, seed=options.seed, last="drop")
    steps = 0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for batch in sampler:
            step(kv, library, replicas, images[batch], labels[batch], options)
            steps += 1
    found = [each(weights, library.to_host) for weights in replicas]
    assert len(set(map(fingerprint, found))) == 1, "all devices have the same weights"
    _, scores = forward(np, found[0], test_images)
    accuracy = float((scores.argmax(axis=1) == test_labels).mean())
    return Result(options.store, kv.num_workers, len(replicas), steps, accuracy, fingerprint(found[0]))


def step(kv: Any, library: Any, replicas: list[Any], images: Any, labels: Any, options: argparse.Namespace) -> None:
    """Push the gradients of all devices, and bring the new weights to all of them."""
    parts = [[library.array(part) for part in aiokv.split_and_load(data, options.devices)] for data in (images, labels)]
    found = [library.compute(gradients, weights, *part) for weights, *part in zip(replicas, *parts, strict=True)]
    pushed = {name: [each_of[name] for each_of in found] for name in replicas[0]}
    weights = {name: [replica[name] for replica in replicas] for name in replicas[0]}
    if options.store in ON_DEVICE:
        kv.pushpull(pushed, out=weights)
        return
    new = {name: np.empty(arrays[0].shape, np.float32) for name, arrays in weights.items()}
    kv.pushpull({name: [library.to_host(array) for array in arrays] for name, arrays in pushed.items()}, out=new)
    for name, arrays in weights.items():
        for array in arrays:
            library.fill(array, new[name])


def fingerprint(weights: dict[str, Any]) -> str:
    """Return 16 hexadecimal digits that are the same only for the same bits."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].tobytes())
    return digest.hexdigest()[:16]


# --- the command line ---


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits, on CUDA devices.")
    stores = ["dist_sync_device", "dist_sync", "device", "local"]
    parser.add_argument("--store", choices=stores, default="dist_sync_device")
    parser.add_argument(
        "--devices", nargs="+", default=["cuda:0", "cuda:0"], help="of each worker; one may stand twice"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="images per device and step (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the first weights and the batches")
    return parser.parse_args(argv)


def main() -> None:
    """Train, report, and exit with 1 if the network has not learned enough."""
    options = arguments()
    with aiokv.create(options.store) as kv:
        result = train(kv, options)
        if kv.rank == 0:
            print(json.dumps(asdict(result)))
    if result.accuracy < GOOD_ENOUGH:
        sys.exit(f"device_digits.py: accuracy {result.accuracy:.4f} is below {GOOD_ENOUGH}: train for more --epochs")


if __name__ == "__main__":
    main()
