"""What goes wrong has a name by which it is counted, and facts for programs: each warning and each error."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import aiokv.core
from aiokv.core import effects as ef

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.core.conftest import Scheduler

FIELDS = ["level", "text", "event", "facts"]


def lines() -> Iterator[tuple[str, dict[str, ast.expr]]]:
    """Return where the machines want a line in the log, and what they give for it."""
    for path in sorted(Path(aiokv.core.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Log":
                given = dict(zip(FIELDS, node.args, strict=False))
                yield f"{path.name}:{node.lineno}", given | {each.arg or "": each.value for each in node.keywords}


def test_each_warning_and_each_error_is_an_event_with_facts() -> None:
    found = {where: given for where, given in lines() if ast.literal_eval(given["level"]) != "info"}
    assert found
    assert [where for where, given in found.items() if set(given) != set(FIELDS)] == []


def test_a_lost_worker_is_one_event_that_says_who_and_why(scheduler: Scheduler) -> None:
    scheduler.drop("worker-1", "connection reset")
    said = [effect for effect in scheduler.effects if isinstance(effect, ef.Log) and effect.level == "error"]
    assert [(log.event, log.facts["node"], log.facts["number"]) for log in said] == [("worker_lost", "worker-1", 1)]
    assert "connection reset" in said[0].facts["reason"]
