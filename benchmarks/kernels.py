"""How long sums and updates take, by backend, dtype and size of a chunk.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --backends reference cpu cuda --dtypes float32 float16 --json

The backends take turns, so that a disturbance hits all of them. A time is the median of all calls; `rounds` are the
medians of the turns, which say how much to trust it. The arrays stay where they are from call to call, as hot in the
caches as their size allows. GB/s count every array that is read and every array that is written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from aiokv.errors import ConfigError, MissingExtraError
from aiokv.kernels import Backend, get_backend
from aiokv.optim import LAMB, PRECISIONS, SGD, Adam, Optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KIB = 1024
SIZES = [64 * KIB, 512 * KIB, 4096 * KIB]
RULES: dict[str, Optimizer | None] = {
    "accumulate": None,
    "sgd": SGD(learning_rate=0.01, momentum=0.9),
    "adam": Adam(),
    "lamb": LAMB(),
}
ROUNDS = 4
ROUND_SECONDS = 0.05
MIN_CALLS = 5


@dataclass(frozen=True, slots=True)
class Result:
    """What one operation took on one backend; `ratio` is its time over that of the first backend."""

    operation: str
    dtype: str
    nbytes: int
    backend: str
    microseconds: float
    rounds: list[float]
    gigabytes_per_second: float
    ratio: float


def make_call(backend: Backend, rule: Optimizer | None, dtype: str, nbytes: int) -> tuple[Callable[[], None], int]:
    """Return what is measured, warmed up, and how many bytes a call reads and writes."""
    size = nbytes // np.dtype(dtype).itemsize
    rng = np.random.default_rng(0)
    # In place the sum of one call is the input of the next: small numbers stay finite long enough.
    weight, total = (rng.uniform(-1e-3, 1e-3, size).astype(dtype) for _ in range(2))
    if rule is None:
        weight[:] = 0

        def accumulate() -> None:
            backend.accumulate(total, weight)

        accumulate()
        return accumulate, 3 * nbytes
    state = backend.new_state(rule, weight)
    step = 0

    def update() -> None:
        nonlocal step
        step += 1
        numbers = rule.step_for("w", count=step, num_update=step)
        norms: list[tuple[float, ...]] = []
        for phase in range(rule.norm_phases):
            norms.append(backend.norms(rule, phase, weight, total, state, numbers, norms))
        backend.update(rule, weight, total, state, numbers, norms=norms)

    update()
    kept = sum(array.nbytes for array in state.values())
    return update, 3 * nbytes + 2 * kept + rule.norm_phases * (2 * nbytes + kept)


def one_round(call: Callable[[], None]) -> list[float]:
    """Return the seconds of each call in one turn."""
    times: list[float] = []
    end = time.perf_counter() + ROUND_SECONDS
    while len(times) < MIN_CALLS or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def measure(backends: Sequence[Backend], operation: str, dtype: str, nbytes: int) -> list[Result]:
    """Measure one operation on all backends in turn."""
    calls = [make_call(backend, RULES[operation], dtype, nbytes) for backend in backends]
    turns: list[list[list[float]]] = [[] for _ in backends]
    for _ in range(ROUNDS):
        for (call, _), mine in zip(calls, turns, strict=True):
            mine.append(one_round(call))
    medians = [statistics.median(seconds for turn in mine for seconds in turn) for mine in turns]
    return [
        Result(
            operation,
            dtype,
            nbytes,
            backend.name,
            round(median * 1e6, 2),
            [round(statistics.median(turn) * 1e6, 2) for turn in mine],
            round(moved / median / 1e9, 2),
            round(median / medians[0], 3),
        )
        for backend, (_, moved), mine, median in zip(backends, calls, turns, medians, strict=True)
    ]


def show(result: Result) -> str:
    """Return one line of the table."""
    return (
        f"{result.operation:<11} {result.dtype:<8} {result.nbytes // KIB:>5} KiB  {result.backend:<10} "
        f"{result.microseconds:>10.1f} us {result.gigabytes_per_second:>7.1f} GB/s  x {result.ratio:<6.2f} "
        f"rounds {' '.join(f'{each:.1f}' for each in result.rounds)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the arguments ask for and print a table, or one JSON array."""
    parser = argparse.ArgumentParser(description="Measure the kernels of aiokv.")
    parser.add_argument("--backends", nargs="+", default=["reference", "cpu"])
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=list(PRECISIONS))
    parser.add_argument("--sizes", nargs="+", default=SIZES, type=int, metavar="BYTES")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    options = parser.parse_args(arguments)
    try:
        backends = [get_backend(name) for name in options.backends]
    except (ConfigError, MissingExtraError) as error:
        parser.error(str(error))
    results: list[Result] = []
    for dtype in options.dtypes:
        for operation in RULES:
            for nbytes in options.sizes:
                found = measure(backends, operation, dtype, nbytes)
                results += found
                if not options.json:
                    print("\n".join(map(show, found)), flush=True)
    if options.json:
        json.dump([asdict(result) for result in results], sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
