"""The demo: it trains in both modes, and it notices what went wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from examples import demo

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def test_it_trains_in_both_modes_and_leaves_nothing_running(
    run_example: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_example("demo.py")
    assert done.returncode == 0, done.stdout + done.stderr
    *_, sync, asynchronous, cluster, left = done.stdout.splitlines()
    assert sync.startswith("dist_sync   held-out accuracy 0.9")
    assert asynchronous.startswith("dist_async  held-out accuracy 0.9")
    assert cluster.startswith("2 workers and 2 servers, ")
    assert left == "nothing is left running"


def test_a_process_that_stays_behind_is_named() -> None:
    waits = [sys.executable, "-c", "input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, env={**os.environ, demo.MARK: str(os.getpid())}) as process:
        found = demo.left_running()
        process.communicate(b"\n")
    assert [line.partition(":")[0] for line in found] == [str(process.pid)]


def test_processes_of_others_are_not_its_business() -> None:
    waits = [sys.executable, "-c", "input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, env={**os.environ, demo.MARK: "1"}) as process:
        found = demo.left_running()
        process.communicate(b"\n")
    assert found == []


def test_it_fails_when_one_mode_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {"dist_sync": demo.Run("dist_sync", 0, 0.97, 2.0), "dist_async": demo.Run("dist_async", 1, None, 3.0)}
    monkeypatch.setattr(demo, "train", runs.__getitem__)
    assert demo.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "dist_sync   held-out accuracy 0.9700, 2.0 s",
        "dist_async  not trained to the end, 3.0 s, exit code 1",
        "2 workers and 2 servers, 5.0 s in all",
        "nothing is left running",
    ]


def test_it_fails_when_something_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "train", lambda store: demo.Run(store, 0, 0.97, 2.0))
    monkeypatch.setattr(demo, "left_running", lambda: ["17: python server"])
    assert demo.main() == 1
    assert capsys.readouterr().out.endswith("still running:\n  17: python server\n")
