"""What compression has left, in files: found again after the step that it belongs to, and no other."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.checkpoint.residual_journal import ResidualJournal
from aiokv.telemetry import take_note

if TYPE_CHECKING:
    from pathlib import Path

COUNTERS: Counter[str] = Counter()
NOTE = functools.partial(take_note, COUNTERS)


class Left:
    """Stands for what a compressor keeps of a key."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def state(self) -> dict[str, Any]:
        return {"dtype": "float32", "residual": np.array(self.values, np.float32)}


def write(journal: ResidualJournal, **keys: float) -> None:
    """Write what a job has left of some keys."""
    job: Any = SimpleNamespace(kept=[(key, Left(value)) for key, value in keys.items()])
    journal.write(job, 1)


def left(folder: Path, step: int, name: str = "worker-1") -> dict[Any, float]:
    """Return what another process finds."""
    found = ResidualJournal(str(folder), "c", name, NOTE).begin(["a", "b"], 1, step)
    return {key: float(state["residual"][0]) for key, state in found.items()}


@pytest.fixture
def journal(tmp_path: Path) -> ResidualJournal:
    """That of a worker which has made two steps, and the first half of a third one."""
    journal = ResidualJournal(str(tmp_path / "new"), "c", "worker-1", NOTE)
    assert journal.begin(["a", "b"], 1, 0) == {}
    write(journal, a=1, b=10)
    write(journal, a=2, b=20)
    write(journal, a=3)
    return journal


def test_what_was_left_after_the_last_whole_step_is_found(journal: ResidualJournal, tmp_path: Path) -> None:
    assert left(tmp_path / "new", 2) == {"a": 2, "b": 20}
    again = ResidualJournal(str(tmp_path / "new"), "c", "worker-1", NOTE)
    again.begin(["a", "b"], 1, 2)
    write(again, a=3, b=30)
    assert left(tmp_path / "new", 3) == {"a": 3, "b": 30}


def test_another_worker_finds_nothing_of_it(journal: ResidualJournal, tmp_path: Path) -> None:
    assert left(tmp_path / "new", 2, "worker-2") == {}


def test_a_new_job_begins_with_nothing(journal: ResidualJournal, tmp_path: Path) -> None:
    assert left(tmp_path / "new", 0) == {}
    assert list((tmp_path / "new").iterdir()) == []


def test_what_is_torn_or_of_another_step_is_lost_and_said(
    journal: ResidualJournal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    COUNTERS.clear()
    with caplog.at_level(logging.WARNING, logger="aiokv"):
        assert left(tmp_path / "new", 4) == {}
        for path in (tmp_path / "new").iterdir():
            path.write_bytes(path.read_bytes()[:-3])
        assert left(tmp_path / "new", 2) == {}
    assert len(caplog.records) == 4
    assert COUNTERS == {"residuals_lost": 4}
    assert "key 'a' before step 4 is lost" in caplog.text


def test_a_folder_that_can_not_be_written_is_said_once(
    journal: ResidualJournal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (tmp_path / "new").iterdir():
        path.unlink()
    (tmp_path / "new").rmdir()
    with caplog.at_level(logging.WARNING, logger="aiokv"):
        write(journal, a=4)
        write(journal, a=5)
    assert len(caplog.records) == 1
    assert "is not kept any longer" in caplog.text
