"""Cases of compression: the codec's bytes, and that a simulated job loses nothing to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv.codec import TwoBit
from aiokv.codec.decoder import Decoder
from aiokv.codec.encoder import Encoder
from sim.compute import Exponential
from sim.sections import StopSection
from sim.validation.case import Case, exact, within
from sim.validation.runs import run_ideal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from sim.record import Run

    Floats = NDArray[np.float32]

CODEC: Final = TwoBit(threshold=0.5)

GOLDEN: Final = ("2cc00000", "ecc00000", "2ec00000")
"""What MXNet sends when the gradient (0.3, -0.7, 0.5, -0.2, 1.2, 0) is pushed three times."""

SIZE: Final = 1000
"""Elements of the tensor of a job."""


def golden() -> Iterator[Case]:
    """Case 27: bytes of MXNet's two-bit codec, and how many there are."""
    gradient = np.array([0.3, -0.7, 0.5, -0.2, 1.2, 0.0], np.float32)
    encoder, decoder = Encoder(CODEC, "w", gradient.size, backend="reference"), Decoder(CODEC, backend="reference")
    said = np.zeros(gradient.size, np.float64)
    for number, expected in enumerate(GOLDEN, start=1):
        (payload,) = encoder.encode(gradient)
        yield within(f"27 bytes of push {number}, 2bit, 0x{expected}", int(payload.hex(), 16), int(expected, 16), 0.0)
        decoder.accumulate_into(payload, said)
    for element, total in enumerate((0.5, -1.5, 1.5, -0.5, 1.5, 0.0)):
        yield exact(f"27 sum of three pushes, 2bit, element {element}", float(said[element]), total)
    gaps = said + encoder.state()["residual"] - np.array([0.9, -2.1, 1.5, -0.6, 3.6, 0.0])
    # Decimal fractions are rounded in float32.
    yield within("27 sent and left over, less three gradients, 2bit", float(np.abs(gaps).max()), 0.0, 1e-6)
    (payload,) = Encoder(CODEC, "w", SIZE, backend="reference").encode(np.zeros(SIZE, np.float32))
    yield exact(f"27 bytes of {SIZE} elements, 2bit", payload.nbytes, 252)
    yield exact(f"27 times smaller, {SIZE} elements, 2bit", 4 * SIZE / payload.nbytes, 4000 / 252)


def nothing_lost() -> Iterator[Case]:
    """Case 27: what servers are told, plus what workers have left over, is all gradients, in any order of pushes."""
    law = Exponential(mean=1.0)
    for policy in ("bsp", "asp", "k_batch_async:3"):
        run = run_ideal(policy, 4, 50, law, stop=StopSection(updates=60, departures=False))
        yield within(f"27 sent and left over, less all gradients, 2bit, {policy}, N=4", _largest_gap(run), 0.0, 0.0)


def _gradient(worker: str, push: int) -> Floats:
    """Return a gradient all of whose sums are exact in float32."""
    stream = np.random.default_rng([int(worker.rpartition("-")[2]), push])
    return (stream.integers(-2048, 2049, SIZE) / 1024).astype(np.float32)


def _largest_gap(run: Run) -> float:
    """Return by how much an element of all applied pushes, compressed by their workers, differs from the gradients."""
    decoder = Decoder(CODEC, backend="reference")
    encoders: dict[str, Encoder] = {}
    told, gradients = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    for worker, push in (token for update in run.updates for token in update.tokens):
        if worker not in encoders:
            rank = int(worker.rpartition("-")[2])
            encoders[worker] = Encoder(CODEC, "w", SIZE, rank=rank, backend="reference")
        gradient = _gradient(worker, push)
        gradients += gradient
        (payload,) = encoders[worker].encode(gradient)
        decoder.accumulate_into(payload, told)
    left = sum(encoder.state()["residual"] for encoder in encoders.values())
    return float(np.abs(told + left - gradients).max())
