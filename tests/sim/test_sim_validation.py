"""The suite of known numbers, and that it notices wrong ones."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from sim import cli
from sim import closed_forms as known
from sim.validation import suite
from sim.validation.case import batched, estimated, exact, proportion

QUICK = ("queues.incast", "queues.overlap")


@pytest.mark.parametrize("name", suite.GROUPS)
def test_the_simulator_gives_what_is_known_on_paper(name: str) -> None:
    wrong = [case for case in suite.run_group(name) if not case.ok]
    assert wrong == []


def test_closed_forms_are_the_published_numbers() -> None:
    assert [round(known.harmonic(n), 6) for n in (8, 100, 10_000)] == [2.717857, 5.187378, 9.787606]
    assert round(known.deviation_of_largest(100), 4) == 1.2787
    assert round(known.mean_of_largest(32, known.normal_cdf(1.0, 0.1), 2.0), 5) == 1.20697
    assert round(known.mean_of_largest(10, known.erlang_cdf(5), 60.0) / 5, 4) == 1.7872
    assert [round(known.closed_queue(n, 0.1, 0.005)[0], 3) for n in (1, 5, 20, 30)] == [9.524, 47.128, 168.222, 198.309]
    assert [known.open_queue(0.8, scv) for scv in (0.0, 1.0, 4.0)] == pytest.approx([3.0, 5.0, 11.0])
    assert [round(f(300.0, 86_400.0), 1) for f in (known.young, known.daly)] == [7200.0, 7001.4]
    assert round(known.efficiency(7001.4, 300.0, 86_400.0, 600.0), 5) == 0.91261
    assert round(known.at_least_up(100, 99, 1000 / 1001), 6) == 0.995371
    assert [round(known.delayed_descent_limit(d), 6) for d in (1, 3, 31)] == [1.0, 0.445042, 0.049861]
    assert [round(known.heavy_ball(16, 0.1, n), 6) for n in (10, 50, 100)] == [0.088654, -0.076944, -0.013357]
    assert round(known.noise_floor(0.1, 1.0, 1.0, 8), 6) == 0.006579
    assert known.push_time(1e8, 1.25e9, 8, 2) == pytest.approx(0.32)


def test_closed_forms_of_policies_are_the_published_numbers() -> None:
    firsts = {(8, 4): 0.634524, (50, 45): 2.215872, (54, 50): 2.492097, (100, 96): 3.104044, (1000, 960): 3.206928}
    assert {pair: round(known.first_exponential(*pair), 6) for pair in firsts} == firsts
    tails = {(100, 100, 3): 6.29224, (100, 96, 3): 2.84834, (100, 100, 2): 17.74671, (100, 96, 2): 4.85262}
    assert {(n, k, shape): round(known.first_pareto(n, k, shape), 5) for n, k, shape in tails} == tails
    # The square of a Pareto time with shape 2 has none, with shape 6 it is one with shape 3.
    assert known.first_pareto(10, 9, 6.0, 2) == pytest.approx(known.first_pareto(10, 9, 3.0))
    assert [known.best_first(100, shift) for shift in (0.1, 0.5, 1.0, 2.0, 5.0)] == [34, 58, 69, 78, 88]
    coded = [16.5161, 12.5161, 11.0161, 10.3494, 10.0994, 10.0994]
    assert [round(known.coded_round(12, spare, 1.0, 5.0), 4) for spare in range(6)] == coded
    # Both of two workers compute everything, and the first of them is waited for: 2 (1 + 5/2).
    assert known.coded_round_in_proportion(2, 1, 1.0, 5.0) == pytest.approx(7.0)
    rates = {(1, 0): 0.66667, (1, 1): 0.8, (1, 3): 0.88889, (2, 0): 0.85714, (2, 1): 0.96774, (2, 3): 0.99804}
    assert {pair: round(known.stale_pair(pair[0], 1.0, pair[1])[0], 5) for pair in rates} == rates
    assert [round(known.stale_pair(2.0, 1.0, bound)[1], 3) for bound in (0, 1, 3)] == [0.571, 0.516, 0.501]


def test_a_number_that_is_wrong_is_not_ok() -> None:
    assert not exact("", 1.0001, 1.0).ok
    assert not estimated("", [1.0, 1.1, 0.9, 1.0], 1.2).ok
    assert not batched("", [1.0, 1.1] * 100, 1.2).ok
    assert not proportion("", 60, 100, 0.4).ok


def test_the_command_counts_what_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "GROUPS", {name: suite.GROUPS[name] for name in QUICK})
    result = CliRunner().invoke(cli.sim, ["validate", "--json"])
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["passed"] == len(document["cases"]) > 20
    assert document["failed"] == 0
    assert set(document["cases"][0]) == {"name", "value", "expected", "tolerance", "ok"}


def test_the_command_fails_when_a_number_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "GROUPS", {"wrong": lambda: iter([exact("1 of something", 2.0, 1.0)])})
    result = CliRunner().invoke(cli.sim, ["validate"])
    assert result.exit_code == 1
    assert "1 of 1 cases" in result.stderr
    assert "NO" in result.stdout


def test_the_schema_of_scenario_files_names_every_section() -> None:
    result = CliRunner().invoke(cli.sim, ["schema"])
    definitions = json.loads(result.stdout)["$defs"]
    assert {"workers", "racks", "servers"} <= set(definitions["ClusterSection"]["properties"])
    assert "fault" in definitions["Scenario"]["properties"]


def test_the_benchmark_measures_all() -> None:
    result = CliRunner().invoke(cli.sim, ["bench", "--json", "--workers", "20", "--rounds", "3"])
    document = json.loads(result.stdout)
    speeds = {"gradients_per_s_16", "gradients_per_s_10000", "replays_per_s", "fuzz_seeds_per_s"}
    assert speeds | {"peak_rss_mib"} <= set(document)
    assert min(document.values()) > 0
