"""Statistics of runs, checked on runs that were written by hand."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest

from aiokv.errors import WorkerLostError
from sim.record import Run, UpdateRecord, WorkerRecord
from sim.report import cell, failures, half_widths, mean, notes, standard_error, summarise, to_json, window
from sim.steps import Step, Steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.scenario import Scenario


def steps(*bounds: tuple[float, float, float]) -> Steps:
    return Steps(Step(*bound) for bound in bounds)


def update(time: float, version: int, rank: int, staleness: int) -> UpdateRecord:
    return UpdateRecord(time, "weights", 0, version, [rank], [staleness], [(f"worker-{rank}", version)])


@pytest.fixture
def run(make_scenario: Callable[..., Scenario]) -> Run:
    """Return a run of two workers; worker-0 is the first at 2.0 to be warm, worker-1 at 9.0 the first at the end."""
    return Run(
        make_scenario(2, 3, warmup=1),
        "asp",
        5,
        workers=[
            WorkerRecord("worker-0", 0, 0.0, 10.0, steps((0.0, 1.0, 2.0), (2.0, 4.0, 5.0), (5.0, 9.5, 10.0))),
            WorkerRecord("worker-1", 1, 0.0, 9.0, steps((0.0, 3.0, 3.0), (3.0, 4.0, 4.0), (4.0, 8.0, 9.0))),
        ],
        updates=[
            update(1.5, 1, 0, 0),
            update(3.0, 2, 1, 1),
            update(4.0, 3, 1, 0),
            update(4.5, 4, 0, 2),
            update(8.5, 5, 1, 1),
            update(9.8, 6, 0, 1),
        ],
        elapsed=11.0,
    )


def test_only_what_ended_while_all_were_at_work_is_counted(run: Run) -> None:
    assert window(run) == (2.0, 9.0)
    summary = summarise(run)
    # Steps that ended at 3, 4, 5 and 9 took 3, 1, 3 and 5 seconds.
    assert summary.step_time_s.mean == 3.0
    assert summary.step_time_s.p50 == 3.0
    assert summary.updates_per_s == 4 / 7
    assert summary.staleness.mean == 1.0
    assert summary.staleness.max == 2
    # From 2 to 9, worker-0 computed 2 + 4 seconds, and worker-1 1 + 1 + 4.
    assert summary.utilisation == 12 / 14


def test_rates_are_those_of_one_chunk(run: Run) -> None:
    for entry in list(run.updates):
        run.updates.append(
            UpdateRecord(entry.time, "other", 0, entry.version, entry.ranks, entry.staleness, entry.tokens)
        )
    assert summarise(run).updates_per_s == 4 / 7


def test_a_run_that_ends_in_its_warm_up_has_no_numbers(run: Run) -> None:
    for worker in run.workers:
        worker.steps = Steps()
    summary = summarise(run)
    assert math.isnan(summary.step_time_s.mean)
    assert math.isnan(summary.updates_per_s)
    document = json.loads(to_json({"asp": [run]}, "here.png"))
    assert document["policies"]["asp"]["step_time_s"] == {"mean": None, "p50": None, "p95": None, "p99": None}


def test_replications_are_averaged_with_their_standard_error(run: Run) -> None:
    one = summarise(run)
    run.elapsed = 15.0
    both = [one, summarise(run)]
    assert mean(both).elapsed_s == 13.0
    assert standard_error(both).elapsed_s == pytest.approx(2.0)
    assert standard_error(both).step_time_s.mean == 0.0


def test_one_run_has_no_standard_error(run: Run) -> None:
    assert math.isnan(standard_error([summarise(run)]).updates_per_s)


def test_the_table_shows_intervals_of_95_percent(run: Run) -> None:
    one = summarise(run)
    run.elapsed = 15.0
    runs = [one, summarise(run)]
    # Twice the standard error of 2 s is far too little for two runs: Student's quantile is 12.706.
    assert half_widths(runs).elapsed_s == pytest.approx(12.706 * 2.0, rel=1e-4)
    assert cell(13.0, half_widths(runs).elapsed_s) == "13 ± 25"
    assert "± is half the width of the 95 % confidence interval: mean of 2 runs" in notes({"asp": [run, run]})


def test_what_rounding_leaves_is_shown_as_nothing() -> None:
    assert cell(-5.6e-20, math.nan) == "0"


def test_workers_that_did_not_come_to_the_end_are_named(run: Run) -> None:
    run.workers[0].error = WorkerLostError("rank 1 is gone", ranks=[1])
    run.workers[1].struck = True
    assert [(entry["worker"], entry["error"]) for entry in failures(run)] == [
        ("worker-0", "WorkerLostError"),
        ("worker-1", "Fault"),
    ]
    assert "asp: worker-0: WorkerLostError: rank 1 is gone" in notes({"asp": [run]})


def test_a_node_that_did_not_stop_is_named(run: Run) -> None:
    run.unstopped = ["server-0"]
    assert "asp: still running long after the last worker: server-0" in notes({"asp": [run]})
