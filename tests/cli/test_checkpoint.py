"""The commands about checkpoints, and how `aiokv run` hands on what its options say of them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.checkpoint.cluster_files import part_pieces, write_file
from aiokv.checkpoint.folder import complete
from aiokv.checkpoint.saving import SavedRule
from aiokv.cli import main
from aiokv.core.effects import WriteManifest
from aiokv.launch import LocalLauncher
from tests.launch.fake_nodes import Recorder, make_job

if TYPE_CHECKING:
    from pathlib import Path

RULE = SavedRule("", {}, "sum", (), 0)


def make_checkpoint(folder: Path, clock: int) -> Path:
    """Write a checkpoint of two workers and one server without keys."""
    place = folder / f"run-000001-clock-{clock:010d}"
    file = write_file(str(place), "part-0.safetensors", part_pieces(clock, RULE, []))
    complete(WriteManifest(clock, str(place), 2, [file], []), "")
    return place


def call(*args: str) -> int:
    """Run the command and return its exit code."""
    try:
        main(args)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a whole checkpoint, one that was not completed, and one with a changed file."""
    for clock in (10, 20, 30):
        make_checkpoint(tmp_path, clock)
    (tmp_path / "run-000001-clock-0000000020" / "manifest.json").unlink()
    part = tmp_path / "run-000001-clock-0000000030" / "part-0.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    return tmp_path


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the lines of JSON that were printed."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_list_says_what_there_is_without_reading_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("checkpoint", "list", str(folder), "--json") == 0
    shown = [(each["clock"], each["state"], each["servers"], each["workers"]) for each in lines(capsys)]
    assert shown == [(10, "complete", 1, 2), (20, "incomplete", 0, 0), (30, "complete", 1, 2)]


def test_verify_finds_what_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("checkpoint", "verify", str(folder), "--json") == 1
    captured = capsys.readouterr()
    states = [json.loads(line)["state"] for line in captured.out.splitlines()]
    assert states == ["complete", "incomplete", "damaged"]
    assert captured.err == "error: damaged: run-000001-clock-0000000030\n"


def test_one_checkpoint_can_be_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("checkpoint", "verify", str(folder / "run-000001-clock-0000000010")) == 0
    out = capsys.readouterr().out
    assert "complete" in out
    assert "round" in out


def test_table_says_why_one_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("checkpoint", "verify", str(folder)) == 1
    # A long path makes lines of it.
    assert "is damaged" in " ".join(capsys.readouterr().out.split())


def test_folder_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("checkpoint", "list", str(tmp_path)) == 0
    assert capsys.readouterr().out == f"there are no checkpoints in {tmp_path}\n"


def test_nothing_was_verified_where_no_checkpoint_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (make_checkpoint(tmp_path / "torn", 10) / "manifest.json").unlink()
    for folder in (tmp_path / "torn", tmp_path / "no-such-folder"):
        assert call("checkpoint", "verify", str(folder)) == 1
        assert capsys.readouterr().err == f"error: there is no complete checkpoint in {folder}\n"


# --- aiokv run ---

SAY = "import os; print(*[os.environ['AIOKV_' + name] for name in {names}])"
NAMES = ("CHECKPOINT_FOLDER", "CHECKPOINT_EVERY", "CHECKPOINT_SECONDS", "CHECKPOINT_KEEP", "RESUME")


@pytest.mark.skipif(sys.platform == "win32", reason="the fake nodes use POSIX signals")
@pytest.mark.parametrize(("option", "resume"), [((), ""), (("--resume",), "latest"), (("--resume-from", "/r"), "/r")])
def test_run_hands_its_options_on_to_all_nodes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], option: tuple[str, ...], resume: str
) -> None:
    scheduler = "import json, signal; print(json.dumps({'host': '127.0.0.1', 'port': 4321})); signal.pause()"
    codes = {"scheduler": scheduler, "server": "import signal; signal.pause()"}
    monkeypatch.setattr("aiokv.launch.base.node_command", lambda role: [sys.executable, "-S", "-c", codes[role]])
    options = ("--checkpoint-folder", "/ck", "--checkpoint-every", "5", "--checkpoint-keep", "2", *option)
    code = SAY.format(names=NAMES)
    assert call("run", *options, "--json", "--", "python", "-S", "-c", code) == 0
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    printed = [event["text"] for event in events if event["event"] == "line" and event["node"] == "worker-0"]
    assert printed == [f"/ck 5 0.0 2 {resume}".rstrip() if resume else "/ck 5 0.0 2 "]


@pytest.mark.parametrize(
    ("begun_with", "has_own", "resume"),
    [("", False, "latest"), ("", True, "latest"), ("/old", False, "/old"), ("/old", True, "latest")],
)
def test_job_that_is_started_again_goes_on_from_its_own_checkpoints(
    tmp_path: Path, begun_with: str, has_own: bool, resume: str
) -> None:
    if has_own:
        make_checkpoint(tmp_path, 10)
    environ = {"AIOKV_CHECKPOINT_FOLDER": str(tmp_path), "AIOKV_RESUME": begun_with}
    launcher = LocalLauncher(make_job(""), Recorder(), environ=environ)
    launcher._choose_checkpoint()
    assert launcher._environ["AIOKV_RESUME"] == resume
