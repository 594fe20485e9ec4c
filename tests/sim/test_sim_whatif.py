"""Recorded operations, and what a job would have taken without the slow ones."""

from __future__ import annotations

import csv
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from aiokv.errors import ConfigError, MissingExtraError
from sim import cli
from sim.validation import suite, traces
from sim.validation.operations import COLUMNS, read_operations
from sim.validation.whatif import WhatIf

if TYPE_CHECKING:
    from pathlib import Path

# step, replica, stage, kind, number, start, duration: two replicas, each one worker that computes and shares gradients.
LONE = (
    (1, 0, 0, "forward-compute", 0, 0.0, 1.0),
    (1, 0, 0, "backward-compute", 0, 1.0, 2.0),
    (1, 0, 0, "grads-reduce-scatter", 0, 3.0, 5.0),
    (1, 1, 0, "forward-compute", 0, 0.0, 1.0),
    (1, 1, 0, "backward-compute", 0, 1.0, 6.0),
    (1, 1, 0, "grads-reduce-scatter", 0, 7.0, 1.0),
)
# One replica in two stages: the second stage's forward pass needs what the first one sends.
STAGES = (
    (1, 0, 0, "forward-compute", 0, 0.0, 1.0),
    (1, 0, 0, "forward-send", 0, 1.0, 0.5),
    (1, 0, 0, "forward-compute", 1, 1.0, 3.0),
    (1, 0, 0, "forward-send", 1, 4.0, 0.5),
    (1, 0, 1, "forward-recv", 0, 0.0, 1.5),
    (1, 0, 1, "forward-compute", 0, 1.5, 1.0),
    (1, 0, 1, "forward-recv", 1, 2.5, 2.0),
    (1, 0, 1, "forward-compute", 1, 4.5, 1.0),
)


def written(path: Path, rows: tuple[tuple[object, ...], ...], columns: tuple[str, ...] = COLUMNS) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def what_if(path: Path, rows: tuple[tuple[object, ...], ...]) -> WhatIf:
    return WhatIf(read_operations(written(path / "operations.csv", rows)))


def test_the_slower_of_two_replicas_decides_how_long_a_step_takes(tmp_path: Path) -> None:
    # 1 + 6 + 1 as recorded, 1 + 4 + 1 with the mean of both backward passes.
    recording = what_if(tmp_path, LONE)
    assert recording.slowdown() == pytest.approx(8.0 / 6.0)
    assert recording.slowdown(["backward-compute"]) == pytest.approx(8.0 / 6.0)


def test_waiting_for_a_partner_is_not_counted_as_a_slow_transfer(tmp_path: Path) -> None:
    # The first replica was five seconds in it, four of which it waited for the second.
    assert what_if(tmp_path, LONE).slowdown(["grads-reduce-scatter"]) == pytest.approx(1.0)


def test_a_stage_waits_for_what_the_one_before_it_sends(tmp_path: Path) -> None:
    # As recorded 1 + 3 + 0.5 + 1; usually a computation takes 1.5, and 1.5 + 1.5 + 0.5 + 1.5.
    assert what_if(tmp_path, STAGES).slowdown() == pytest.approx(5.5 / 5.0)


def test_sending_does_not_hold_up_the_next_computation(tmp_path: Path) -> None:
    rows = tuple((*row[:6], 2.0) if row[3:5] == ("forward-send", 0) else row for row in STAGES)
    # The first transfer lasts until 3, the second stage computes from then on until 4 and from 4.5 until 5.5.
    assert what_if(tmp_path, rows).slowdown(["forward-compute", "backward-compute"]) == pytest.approx(
        (1.0 + 3.0 + 1.25 + 1.0) / (1.5 + 1.5 + 1.25 + 1.5)
    )


def test_parquet_files_give_what_csv_files_give(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    tables = pytest.importorskip("pyarrow.csv")
    plain = written(tmp_path / "operations.csv", LONE)
    packed = tmp_path / "operations.parquet"
    parquet.write_table(tables.read_csv(plain), packed)
    assert read_operations(packed) == read_operations(plain)


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trace-SE.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"aiokv\[parquet\]"):
        read_operations(tmp_path / "trace-SE.parquet")
    result = CliRunner().invoke(cli.sim, ["validate", "--traces", str(tmp_path)])
    assert result.exit_code == 1
    assert "aiokv[parquet]" in result.stderr


@pytest.mark.parametrize(
    ("rows", "columns", "named"),
    [
        (LONE, (*COLUMNS[:-1], "seconds"), "row 1"),
        ((LONE[0], (*LONE[1][:5], "soon", 1.0)), COLUMNS, "row 2"),
        (
            (LONE[0], (*LONE[1][:5], "nan", 1.0)),
            COLUMNS,
            "row 2: expected a start and a duration in seconds, got nan and 1",
        ),
        ((LONE[0], (*LONE[1][:6], -1.0)), COLUMNS, "row 2: expected a start and a duration"),
        ((), COLUMNS, "no operations"),
    ],
)
def test_a_file_that_does_not_fit_is_an_error_that_says_where(
    tmp_path: Path, rows: tuple[tuple[object, ...], ...], columns: tuple[str, ...], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        read_operations(written(tmp_path / "operations.csv", rows, columns))


def test_a_file_that_is_not_compressed_as_its_name_says_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "operations.csv.xz").write_bytes(b"step")
    with pytest.raises(ConfigError, match="can't read"):
        read_operations(tmp_path / "operations.csv.xz")


def test_a_file_that_is_no_parquet_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the optional package that reads Parquet")
    (tmp_path / "trace-SE.parquet").write_bytes(b"step")
    with pytest.raises(ConfigError, match=r"can't read the operations in .*trace-SE\.parquet"):
        read_operations(tmp_path / "trace-SE.parquet")


def test_operations_that_wait_for_each_other_are_an_error(tmp_path: Path) -> None:
    forth = (
        (1, 0, 0, "forward-compute", 0, 0.0, 1.0),
        (1, 0, 0, "forward-send", 0, 1.0, 0.5),
        (1, 0, 1, "forward-recv", 0, 0.0, 1.5),
        (1, 0, 1, "forward-compute", 0, 1.5, 1.0),
        (1, 0, 1, "backward-compute", 0, 2.5, 1.0),
        (1, 0, 1, "backward-send", 0, 3.5, 0.5),
        (1, 0, 0, "backward-recv", 0, 1.0, 3.0),
    )
    assert what_if(tmp_path, (*forth, (1, 0, 0, "backward-compute", 0, 4.0, 1.0))).slowdown() == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="wait for each other"):
        # The first stage has computed back before it has computed anything forth.
        what_if(tmp_path, (*forth, (1, 0, 0, "backward-compute", 0, -2.0, 1.0)))


def test_a_worker_that_computes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="replica 7 and stage 0"):
        what_if(tmp_path, (*LONE, (1, 7, 0, "optimizer", 0, 0.0, 1.0)))


def test_a_folder_without_recorded_jobs_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.sim, ["validate", "--traces", str(tmp_path)])
    assert result.exit_code == 1
    assert "job_4_norm.csv" in result.stderr


def test_recorded_jobs_are_found_below_a_folder_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "deeper").mkdir()
    parquet = pytest.importorskip("pyarrow.parquet")
    tables = pytest.importorskip("pyarrow.csv")
    parquet.write_table(tables.read_csv(written(tmp_path / "a.csv", LONE)), tmp_path / "deeper" / "trace-AR.parquet")
    monkeypatch.setattr(suite, "GROUPS", {})
    monkeypatch.setattr(traces, "SLOWDOWNS", {"AR": {"all": 1.34}, "SE": {"all": 2.0}})
    result = CliRunner().invoke(cli.sim, ["validate", "--traces", str(tmp_path)])
    assert result.exit_code == 0
    assert "29 ByteDance job AR" in result.stdout
