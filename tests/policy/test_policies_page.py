"""The page about policies: a policy of one's own does what the page says, over TCP and in the simulator."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aiokv.errors import PolicyError
from aiokv.policy import get_policy, policy_class, policy_names, registry
from aiokv.policy.bsp import BSP

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
FILES = {
    name: text
    for text, name in re.findall(r"^```[a-z]+\n(# ([a-z_]+\.(?:py|toml))\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs Python beside the files of the page, which are installed as it says, without the network."""
    folder, site = tmp_path_factory.mktemp("page"), tmp_path_factory.mktemp("site")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")

    def run(*arguments: str) -> str:
        path = os.pathsep.join([str(site), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, *arguments]
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=50
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    run(
        "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation", "--no-deps", "--target", str(site), "."
    )
    return run


def test_every_policy_is_on_the_page() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    named = {text.split(":")[0] for row in rows for text in re.findall(r"`([^`]+)`", row)}
    assert named == set(policy_names())


def test_a_policy_is_at_most_a_hundred_lines_and_has_a_test(installed: Callable[..., str]) -> None:
    assert FILES["majority.py"].count("\n") <= 100
    assert "1 passed" in installed(
        "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "test_majority.py"
    )


def test_it_runs_over_tcp(installed: Callable[..., str]) -> None:
    assert installed("train.py") == "dropped: 1 value: 2.0\n"


def test_it_runs_in_the_simulator(installed: Callable[..., str]) -> None:
    results = json.loads(installed("-m", "aiokv", "sim", "run", "half.toml", "--json"))
    times = {policy: result["step_time_s"]["p50"] for policy, result in results["policies"].items()}
    # The slow worker's steps take 1 s in the mean; of the other four, the third is there after 0.1 (1/4 + 1/3 + 1/2) s.
    assert times["majority"] < times["bsp"] / 3


class Point:
    """An entry point of a package."""

    value = "package:thing"

    def __init__(self, found: object) -> None:
        self._found = found

    def load(self) -> object:
        """Return what it is."""
        return self._found


class Mine(BSP):
    """A policy of a package."""

    name = "mine"


class Nothing:
    """Not a policy."""


def test_policy_of_a_package_is_named_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_POLICIES", dict(registry._POLICIES))
    monkeypatch.setitem(registry._INSTALLED, "mine", Point(Mine))
    assert "mine" in policy_names()
    # Asked twice: by then it is known.
    assert (policy_class("mine"), policy_class("mine")) == (Mine, Mine)


@pytest.mark.parametrize("found", [Nothing, get_policy("bsp"), type(get_policy("bsp"))])
def test_entry_point_that_is_no_policy_of_its_name_is_refused(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    monkeypatch.setitem(registry._INSTALLED, "mine", Point(found))
    with pytest.raises(PolicyError, match=r"entry point 'mine' of aiokv\.policies is package:thing"):
        get_policy("mine")
