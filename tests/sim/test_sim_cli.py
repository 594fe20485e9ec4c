"""The command as its users see it."""

from __future__ import annotations

import json
import re
import struct
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from sim import cli
from sim.scenario import shipped_scenarios

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

SMALL = """\
title = "two of a kind"
steps = 10
[cluster]
workers = 2
[compute]
law = "exponential"
mean = 0.5
"""


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.sim, ["run", *arguments])


def png_size(path: Path) -> tuple[int, int]:
    """Return width and height of a PNG file, in pixels."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_a_run_prints_a_table_and_says_where_the_picture_is(scenario: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    result = invoke(scenario, "--seed", "7", "--out", str(out))
    assert result.exit_code == 0, result.output
    for words in ("small: two of a kind", "bsp", "asp", "utilisation (%)", "staleness, maximum", "seed 7"):
        assert words in result.stdout
    assert f"timeline: {out / 'small.png'}" in result.stdout
    assert result.stderr == ""


def test_the_picture_has_a_size_to_look_at(scenario: str, tmp_path: Path) -> None:
    assert invoke(scenario, "--out", str(tmp_path)).exit_code == 0
    width, height = png_size(tmp_path / "small.png")
    assert 800 <= width <= 2000
    assert 300 <= height <= 2000
    assert 5_000 < (tmp_path / "small.png").stat().st_size < 1_000_000


def test_json_is_all_that_is_on_stdout(scenario: str, tmp_path: Path) -> None:
    result = invoke(scenario, "--seed", "7", "--json", "--out", str(tmp_path))
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["seed"] == 7
    assert list(document["policies"]) == ["bsp", "asp"]
    assert document["policies"]["bsp"]["staleness"] == {"mean": 0.0, "p95": 0.0, "max": 0.0}
    assert document["picture"] == str(tmp_path / "small.png")
    assert (tmp_path / "small.png").exists()


def test_replications_give_confidence_intervals(scenario: str, tmp_path: Path) -> None:
    arguments = (scenario, "--replications", "3", "--out", str(tmp_path))
    asp = json.loads(invoke(*arguments, "--json").stdout)["policies"]["asp"]
    assert len(set(asp["traces"])) == 3
    assert asp["standard_error"]["step_time_s"]["mean"] > 0
    table = invoke(*arguments).stdout
    width = asp["half_width_95"]["step_time_s"]["mean"]
    assert f"{asp['step_time_s']['mean']:.4g} ± {width:.2g}" in table
    assert "95 % confidence interval: mean of 3 runs" in table


def test_the_first_replication_is_the_run_of_that_seed(scenario: str, tmp_path: Path) -> None:
    one, two = (
        json.loads(invoke(scenario, "--json", "--out", str(tmp_path), "--seed", "4", "--replications", count).stdout)
        for count in ("1", "2")
    )
    assert two["policies"]["bsp"]["traces"][0] == one["policies"]["bsp"]["traces"][0]


def test_a_shipped_scenario_runs_by_its_name(tmp_path: Path) -> None:
    result = invoke("crash", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "WorkerLostError" in result.stdout
    assert (tmp_path / "crash.png").exists()


def test_a_wrong_scenario_is_explained_in_one_line(scenario: str, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.replace("workers = 2", "workers = -2"))
    result = invoke(scenario)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == f"Error: {scenario}, line 4: cluster.workers: expected a whole number >= 1, got -2\n"


def test_a_directory_that_cannot_be_made_is_named_before_anything_runs(scenario: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = invoke(scenario, "--out", str(tmp_path / "file" / "folder"))
    assert result.exit_code == 1
    assert f"can't make the directory {tmp_path / 'file' / 'folder'}" in result.stderr


def test_missing_packages_are_named_with_their_extra(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    result = invoke(scenario)
    assert result.exit_code == 1
    assert "needs simpy and matplotlib" in result.stderr
    assert "aiokv[sim]" in result.stderr


def test_a_broken_invariant_is_an_error(scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> list[str]:
        return ["push 3 of worker-1 was applied twice"]

    monkeypatch.setattr("sim.checks._check_version", broken)
    result = invoke(scenario, "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "push 3 of worker-1 was applied twice" in result.stderr


def test_an_assertion_that_is_not_true_fails_the_command(scenario: str, tmp_path: Path) -> None:
    text = 'assertions = ["mean_step < 1 ms"]\n' + SMALL
    (tmp_path / "small.toml").write_text(text)
    result = invoke(scenario, "--out", str(tmp_path))
    assert result.exit_code == 1
    assert re.search(r"bsp: expected mean_step < 1 ms, got mean_step = \d+(\.\d+)? ms\n", result.stderr)


@pytest.mark.parametrize("title", ["ends at [/x]", "a [red] b :bug: c", r"from $5 to $\nothing$"])
def test_a_title_is_shown_as_it_is_written(title: str, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.replace('"two of a kind"', f"'{title}'"))
    result = invoke(str(tmp_path / "small.toml"), "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert f"small: {title}" in result.stdout


def test_help_lists_the_scenarios_that_come_along() -> None:
    stdout = " ".join(CliRunner().invoke(cli.sim, ["run", "--help"]).stdout.split())
    assert ", ".join(shipped_scenarios()) in stdout
