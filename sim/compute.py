"""How long a worker computes: independent draws, a fleet like those that were measured, or a recorded trace."""

from __future__ import annotations

import csv
import functools
import itertools
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from aiokv.errors import ConfigError
from sim.laws import (
    Constant,
    Deviation,
    Erlang,
    Exponential,
    Hyperexponential,
    Lognormal,
    Normal,
    Pareto,
    Positive,
    Share,
    ShiftedExponential,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Constant",
    "DataSkew",
    "Erlang",
    "Exponential",
    "Fleet",
    "Hyperexponential",
    "Law",
    "Lognormal",
    "Normal",
    "Pareto",
    "Quiet",
    "Recorded",
    "Shared",
    "ShiftedExponential",
    "Skewed",
    "read_trace",
    "step_times",
]


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="law"):
    """Base of the fleets with fixed parameters."""

    mean: Positive


class Fleet(Preset, frozen=True, kw_only=True, tag="fleet"):
    """Lognormal step times with what real fleets have: unequal workers, slow moments of all, and persistence.

    The logarithm is the sum of three parts: one of the worker, which stays; one of the step, the same for all workers;
    and a rest, which follows itself with the correlation `persistence` from step to step. `mean` is of all together,
    the standard deviations are of the logarithm.
    """

    worker_sd: Deviation = 0.0
    step_sd: Deviation = 0.0
    rest_sd: Deviation = 0.0
    persistence: Share = 0.0

    def times(self, seed: int, worker: str, rank: int) -> Iterator[float]:
        """Yield the seconds that a worker's steps take, without end."""
        return _fleet_times(self.mean, (self.worker_sd, self.step_sd, self.rest_sd, self.persistence), seed, worker)


def _fleet_times(mean: float, sds: tuple[float, float, float, float], seed: int, worker: str) -> Iterator[float]:
    worker_sd, step_sd, rest_sd, persistence = sds
    own = random.Random(f"{seed}:compute:{worker}")
    # Every worker draws the same numbers here: a slow moment of the cluster.
    common = random.Random(f"{seed}:compute:all")
    base = math.log(mean) - (worker_sd**2 + step_sd**2 + rest_sd**2) / 2.0 + own.gauss(0.0, worker_sd)
    fresh = math.sqrt(1.0 - persistence**2)
    rest = own.gauss(0.0, rest_sd)
    while True:
        yield math.exp(base + common.gauss(0.0, step_sd) + rest)
        rest = persistence * rest + fresh * own.gauss(0.0, rest_sd)


class Quiet(Preset, frozen=True, kw_only=True, tag="quiet"):
    """Almost equal workers with small, lasting disturbances (Alibaba PAI 2020, parameter-server job 1)."""

    def times(self, seed: int, worker: str, rank: int) -> Iterator[float]:
        """Yield the seconds that a worker's steps take, without end."""
        return _fleet_times(self.mean, (0.040, 0.031, 0.048, 0.68), seed, worker)


class Skewed(Preset, frozen=True, kw_only=True, tag="skewed"):
    """Some workers are always slower than others (Alibaba PAI 2020, parameter-server job 2)."""

    def times(self, seed: int, worker: str, rank: int) -> Iterator[float]:
        """Yield the seconds that a worker's steps take, without end."""
        return _fleet_times(self.mean, (0.086, 0.006, 0.016, 0.63), seed, worker)


class Shared(Preset, frozen=True, kw_only=True, tag="shared"):
    """Machines that others use too: fast and slow classes (Alibaba PAI 2020, parameter-server job 4)."""

    def times(self, seed: int, worker: str, rank: int) -> Iterator[float]:
        """Yield the seconds that a worker's steps take, without end."""
        return _fleet_times(self.mean, (0.71, 0.10, 0.22, 0.84), seed, worker)


class DataSkew(Preset, frozen=True, kw_only=True, tag="data-skew"):
    """Equal workers, unequal batches: independent from step to step (ByteDance straggler traces 2025, job SE)."""

    def times(self, seed: int, worker: str, rank: int) -> Iterator[float]:
        """Yield the seconds that a worker's steps take, without end."""
        return _fleet_times(self.mean, (0.0, 0.0, 0.117, 0.02), seed, worker)


class Recorded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="law", tag="trace"):
    """Step times from a CSV file with a row for each step of each worker.

    Worker of rank r takes the times of the r-th worker of the file, in the order of its steps.
    """

    file: str
    """Path; a relative one is looked up beside the scenario file."""
    worker: str = "worker"
    """Name of the column with the worker."""
    step: str = "step"
    """Name of the column with the number of the step."""
    time: str = "seconds"
    """Name of the column with the time."""
    scale: Positive = 1.0
    """Seconds that one unit of the file stands for."""

    def times(self, seed: int, worker: str, rank: int) -> Iterator[float]:
        """Yield the recorded seconds of the worker's steps."""
        for value in read_trace(self)[rank]:
            yield value * self.scale


LONGEST: Final = 1e9
"""Seconds that a recorded step may take."""


@functools.lru_cache(maxsize=8)
def read_trace(law: Recorded) -> list[list[float]]:
    """Return the recorded times, in units of the file, by worker and step; only steps that all workers have.

    A step that stands there twice, as in traces of workers that were started again, took the time of its last row.

    Raises:
        ConfigError: the file can't be read, a column or a number is missing in it, or a number can't be a time.
    """
    rows: dict[int, dict[int, float]] = {}
    try:
        # Some programs write a mark of the byte order before the first column's name.
        with Path(law.file).open(newline="", encoding="utf-8-sig") as file:
            for line, row in enumerate(csv.DictReader(file), start=2):
                worker, step, value = _recorded(law, line, row)
                rows.setdefault(worker, {})[step] = value
    except OSError as error:
        raise ConfigError(f"can't read the trace {law.file!r}: {error.strerror}", path=law.file) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"the trace {law.file!r} is not a CSV file: {error}", path=law.file) from None
    if not rows:
        raise ConfigError(f"the trace {law.file!r} is empty", path=law.file)
    complete = sorted(set.intersection(*(set(steps) for steps in rows.values())))
    return [[rows[worker][step] for step in complete] for worker in sorted(rows)]


def _recorded(law: Recorded, line: int, row: dict[str, str]) -> tuple[int, int, float]:
    """Return worker, step and time that a row of a trace holds."""
    try:
        worker, step, value = int(row[law.worker]), int(row[law.step]), float(row[law.time])
    except (KeyError, TypeError, ValueError) as error:
        expected = f"columns {law.worker!r}, {law.step!r} (whole numbers) and {law.time!r} (a number)"
        raise ConfigError(f"{law.file}, line {line}: expected {expected}; {error!r}") from None
    if not 0.0 <= value * law.scale <= LONGEST:
        expected = f"{law.time!r} from 0 to {LONGEST:g} seconds"
        raise ConfigError(f"{law.file}, line {line}: expected {expected}, got {value * law.scale:g}")
    return worker, step, value


Law = (
    Constant
    | Exponential
    | ShiftedExponential
    | Normal
    | Lognormal
    | Pareto
    | Erlang
    | Hyperexponential
    | Fleet
    | Quiet
    | Skewed
    | Shared
    | DataSkew
    | Recorded
)


AHEAD: Final = 16
"""So many times of a worker are drawn at once."""


def step_times(law: Law, *, factor: float, seed: int, worker: str, rank: int = 0) -> Iterator[float]:
    """Return the seconds that a worker's steps take, one after the other.

    The numbers depend on the arguments only: under every policy, step i of a worker takes the same time.

    Args:
        law: distribution of a step's time.
        factor: how many times slower than the law this worker is.
        seed: the run's seed.
        worker: the worker's name, which selects its stream.
        rank: its number, which selects its rows in a trace.
    """
    return itertools.chain.from_iterable(_ahead(law.times(seed, worker, rank), factor))


def _ahead(times: Iterator[float], factor: float) -> Iterator[list[float]]:
    # With thousands of workers, what draws a worker's times is in no cache by its next step.
    while ahead := [factor * time for time in itertools.islice(times, AHEAD)]:
        yield ahead
