"""The figures follow from what was measured by sums that anybody can do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from aiokv.bench.cluster import Usage
from aiokv.bench.plan import Done, make_plan
from aiokv.bench.report import Report, make_report, make_summary, make_table


def report(**changes: Any) -> Report:
    """Report on two workers that moved 2 * 250,000,000 bytes in each of two rounds."""
    plan = make_plan("latency:250000000", servers=1, workers=2, rounds=2)
    second: dict[str, Any] = {"rank": 1, "round_s": [0.25, 0.4], "cpu_s": 0.3, "digest": 7, "problems": []} | changes
    results = {"worker-0": Done(0, [0.1, 0.25], 0.2, 7, []), "worker-1": Done(**second)}
    usage = {
        "scheduler": Usage(0.0, 30.0),
        "server-0": Usage(1.0, 500.0),
        "worker-0": Usage(0.2, 600.0),
        "worker-1": Usage(0.3, 601.0),
    }
    return make_report(plan, results, usage)


def test_gigabytes_are_those_pushed_and_pulled_in_the_median_round() -> None:
    assert report().gbps_per_worker == pytest.approx(0.5 / 0.25)


def test_each_worker_has_its_own_figures() -> None:
    workers = report().by_worker
    assert [workers["worker-0"].gbps, workers["worker-1"].gbps] == pytest.approx([0.5 / 0.175, 0.5 / 0.325])


def test_rounds_are_those_of_all_workers_together() -> None:
    rounds = report().round_s
    assert (rounds.min, rounds.median) == (0.1, 0.25)
    assert 0.39 < rounds.p99 <= 0.4


def test_cpu_is_per_gigabyte_that_all_workers_moved_so_that_nodes_can_be_added_up() -> None:
    # Two workers, two rounds, 0.5 GB each.
    made = report()
    assert made.cpu_s_per_gb == pytest.approx(
        {"scheduler": 0.0, "server-0": 0.5, "worker-0": 0.1, "worker-1": 0.15},
    )
    assert made.cpu_s_per_gb_total == pytest.approx(0.75)


def test_report_without_problems_is_ok() -> None:
    made = report()
    assert (made.ok, made.problems) == (True, [])


def test_problem_of_a_worker_has_its_name() -> None:
    made = report(problems=["round 3: element 0 is 1, expected 2"])
    assert (made.ok, made.problems) == (False, ["worker-1: round 3: element 0 is 1, expected 2"])


def test_workers_that_received_different_values_are_a_problem() -> None:
    made = report(digest=8)
    assert (made.ok, made.problems) == (False, ["the workers did not receive the same values in the last round"])


def test_json_has_the_names_that_programs_read() -> None:
    names = set(json.loads(report().to_json()))
    promised = "workload servers workers rounds gbps_per_worker round_s cpu_s_per_gb peak_rss_mib ok"
    assert set(promised.split()) <= names


def test_table_has_a_line_for_each_node() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(make_table(report()))
    text = capture.get()
    assert "latency:250000000: 2 workers, 1 server, dist_sync, 2 rounds" in text
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert cells[1] == ["server-0", "", "", "", "", "0.5", "500"]
    assert cells[2] == ["worker-0", "2.86", "100", "175", "248", "0.1", "600"]


def test_summary_says_that_the_numbers_are_wrong() -> None:
    assert make_summary(report()) == (
        "2 GB/s a worker, median round 250 ms, 0.75 CPU s/GB on all nodes; every number is right"
    )
    assert make_summary(report(digest=8)).endswith("NUMBERS ARE WRONG")
