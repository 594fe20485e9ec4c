"""How fast gradients are compressed, how small they become and what is lost, by codec.

    python benchmarks/codec.py
    python benchmarks/codec.py --sizes 4194304 --codecs 2bit qsgd --json

GB/s count the bytes of the float32 gradient, not those of the payload. A time is the median of all calls on one core;
`rounds` are the medians of the turns, which say how much to trust it. The two backends take turns, so that a
disturbance hits both. Gradients are normal with variance 1. `error` is the norm of what the first payload did not say
over the norm of the gradient; `after 100` is the same for the mean of 100 payloads of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.codec import QSGD, BFloat16, Codec, Float8, Float16, OneBit, RandomK, TopK, TwoBit
from aiokv.codec.decoder import Decoder
from aiokv.codec.encoder import Encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

KIB = 1024
SIZES = [512 * KIB, 64 * KIB * KIB]
CODECS: dict[str, Codec] = {
    "1bit": OneBit(threshold=0),
    "2bit": TwoBit(threshold=1),
    "fp16": Float16(),
    "bf16": BFloat16(),
    "fp8": Float8(),
    "topk": TopK(fraction=0.01),
    "randomk": RandomK(fraction=0.01),
    "qsgd": QSGD(levels=127),
    "qsgd-4bits": QSGD(levels=7),
    "qsgd-2bits": QSGD(levels=1),
}
BACKENDS = ("reference", "cpu")
ROUNDS = 4
ROUND_SECONDS = 0.05
MIN_CALLS = 2
ERROR_SIZE = 100_000
REPEATS = 100


@dataclass(frozen=True, slots=True)
class Result:
    """What one codec did on one backend; `ratio` is the gradient's bytes over the payload's."""

    codec: str
    backend: str
    nbytes: int
    ratio: float
    encode: float
    encode_rounds: list[float]
    decode: float
    decode_rounds: list[float]
    accumulate: float
    accumulate_rounds: list[float]
    error: float
    error_after_100: float


def make_calls(codec: Codec, backend: str, size: int) -> dict[str, Callable[[], Any]]:
    """Return what is measured, warmed up."""
    gradient = np.random.default_rng(0).standard_normal(size, np.float32)
    encoder, decoder = Encoder(codec, "w", size, backend=backend), Decoder(codec, backend=backend)
    (payload,) = encoder.encode(gradient)
    out, total = np.empty(size, np.float32), np.zeros(size, np.float32)
    calls: dict[str, Callable[[], Any]] = {
        "encode": lambda: encoder.encode(gradient),
        "decode": lambda: decoder.decode_into(payload, out),
        "accumulate": lambda: decoder.accumulate_into(payload, total),
    }
    for call in calls.values():
        call()
    return calls


def one_round(call: Callable[[], Any]) -> list[float]:
    """Return the seconds of each call in one turn."""
    times: list[float] = []
    end = time.perf_counter() + ROUND_SECONDS
    while len(times) < MIN_CALLS or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def errors_of(codec: Codec) -> tuple[float, float]:
    """Return the relative error of the first payload, and of the mean of many."""
    gradient = np.random.default_rng(1).standard_normal(ERROR_SIZE, np.float32)
    encoder, decoder = Encoder(codec, "w", ERROR_SIZE), Decoder(codec)
    total: NDArray[np.float64] = np.zeros(ERROR_SIZE)
    found = []
    for count in range(1, REPEATS + 1):
        decoder.accumulate_into(encoder.encode(gradient)[0], total)
        if count in {1, REPEATS}:
            found.append(float(np.linalg.norm(total / count - gradient) / np.linalg.norm(gradient)))
    return found[0], found[1]


def measure(name: str, nbytes: int) -> list[Result]:
    """Measure one codec on its backends in turn."""
    codec, size = CODECS[name], nbytes // 4
    calls = [make_calls(codec, backend, size) for backend in BACKENDS]
    turns: list[dict[str, list[list[float]]]] = [{key: [] for key in each} for each in calls]
    for _ in range(ROUNDS):
        for each, mine in zip(calls, turns, strict=True):
            for key, call in each.items():
                mine[key].append(one_round(call))
    (payload,) = Encoder(codec, "w", size, backend="reference").encode(np.ones(size, np.float32))
    error, after = errors_of(codec)
    results = []
    for backend, mine in zip(BACKENDS, turns, strict=True):
        figures: dict[str, Any] = {}
        for key, rounds in mine.items():
            median = statistics.median(seconds for turn in rounds for seconds in turn)
            figures[key] = round(nbytes / median / 1e9, 2)
            figures[f"{key}_rounds"] = [round(nbytes / statistics.median(turn) / 1e9, 2) for turn in rounds]
        ratio = round(nbytes / payload.nbytes, 2)
        results.append(
            Result(
                codec=name,
                backend=backend,
                nbytes=nbytes,
                ratio=ratio,
                error=round(error, 5),
                error_after_100=round(after, 5),
                **figures,
            )
        )
    return results


def show(result: Result) -> str:
    """Return one line of the table."""
    return (
        f"{result.codec:<11} {result.backend:<10} {result.nbytes // KIB:>6} KiB  1/{result.ratio:<6.1f} "
        f"encode {result.encode:>6.2f}  decode {result.decode:>6.2f}  accumulate {result.accumulate:>6.2f} GB/s  "
        f"error {result.error:<8.5f} after 100 {result.error_after_100:<8.5f} "
        f"encode rounds {' '.join(f'{each:.2f}' for each in result.encode_rounds)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the arguments ask for and print a table, or one JSON array."""
    parser = argparse.ArgumentParser(description="Measure the codecs of aiokv.")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=list(CODECS))
    parser.add_argument("--sizes", nargs="+", default=SIZES, type=int, metavar="BYTES")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    options = parser.parse_args(arguments)
    results: list[Result] = []
    for name in options.codecs:
        for nbytes in options.sizes:
            found = measure(name, nbytes)
            results += found
            if not options.json:
                print("\n".join(map(show, found)), flush=True)
    if options.json:
        json.dump([asdict(result) for result in results], sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
