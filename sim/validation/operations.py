"""Recorded operations of training steps: who did what in a step, from when on and for how long.

These are the tables that come with "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin et
al., OSDI 2025), as Parquet files, or with the same columns as CSV.
"""

from __future__ import annotations

import csv
import lzma
import math
from typing import TYPE_CHECKING, Any, Final

import msgspec

from aiokv.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

COLUMNS: Final = ("step", "dp_rank", "stage", "optype", "seq_id", "start_ts", "duration")
"""The columns that are read; a file may have more."""

Steps = dict[int, list["Operation"]]
"""The operations of each step, by the number of the step."""


class Operation(msgspec.Struct, frozen=True):
    """What one worker did once in a step."""

    replica: int
    """The worker's data-parallel rank."""
    stage: int
    """The worker's stage of the pipeline."""
    kind: str
    """As in `forward-compute` or `grads-reduce-scatter`."""
    number: int
    """Which one of its kind it is for the worker, in this step."""
    start: float
    """Seconds since the step began."""
    duration: float
    """Seconds, with the time in which a transfer waited for its partners."""


def read_operations(path: Path) -> Steps:
    """Return the operations in a file by step: Parquet, or CSV that may be compressed with xz (`.csv.xz`).

    Raises:
        ConfigError: the file can't be read, or a column or a number is missing in it.
        MissingExtraError: it is a Parquet file, and pyarrow is not installed.
    """
    try:
        return _sorted(path, _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path))
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the operations in {str(path)!r}: {error}", path=str(path)) from None


def _read_csv(path: Path) -> Iterable[Mapping[str, Any]]:
    packed = path.read_bytes()
    return csv.DictReader((lzma.decompress(packed) if path.suffix == ".xz" else packed).decode().splitlines())


def _read_parquet(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415
    except ImportError:
        raise MissingExtraError(
            f"{path} is a Parquet file, which needs pyarrow: install the extra with pip install 'aiokv[parquet]'",
            expected="aiokv[parquet]",
        ) from None
    try:
        table = parquet.read_table(path)
    except ArrowException as error:
        raise ConfigError(f"can't read the operations in {str(path)!r}: {error}", path=str(path)) from None
    known = table.select([column for column in COLUMNS if column in table.column_names])
    rows: list[Mapping[str, Any]] = known.to_pylist()
    return rows


def _sorted(path: Path, rows: Iterable[Mapping[str, Any]]) -> Steps:
    steps: Steps = {}
    for number, row in enumerate(rows, start=1):
        try:
            step, replica, stage, kind, nth, start, duration = (row[column] for column in COLUMNS)
            operation = Operation(int(replica), int(stage), str(kind), int(nth), float(start), float(duration))
            steps.setdefault(int(step), []).append(operation)
        except (KeyError, TypeError, ValueError) as error:
            expected = f"the columns {', '.join(COLUMNS)}, all but optype numbers"
            raise ConfigError(f"{path}, row {number}: expected {expected}; {error!r}", path=str(path)) from None
        if not (math.isfinite(operation.start) and 0.0 <= operation.duration < math.inf):
            text = f"{path}, row {number}: expected a start and a duration in seconds, got {operation.start:g} and "
            raise ConfigError(f"{text}{operation.duration:g}", path=str(path))
    if not steps:
        raise ConfigError(f"there are no operations in {str(path)!r}", path=str(path))
    return steps
