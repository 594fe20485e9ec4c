"""Lines of JSON about what goes wrong."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING

from aiokv.launch.events import EventHandler, writing_events

if TYPE_CHECKING:
    import pytest


def test_only_what_has_an_event_is_written_with_its_facts() -> None:
    stream = io.StringIO()
    handler = EventHandler(stream)
    said = {"name": "aiokv", "levelno": logging.ERROR, "levelname": "ERROR", "msg": "worker %d is silent", "args": (3,)}
    said |= {"created": 1_000_000_000.25}
    handler.handle(logging.makeLogRecord(said | {"event": "silent", "facts": {"node": "worker-3"}}))
    handler.handle(logging.makeLogRecord(said))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    when = "2001-09-09T01:46:40.250+00:00"
    assert lines == [
        {"time": when, "event": "silent", "level": "error", "text": "worker 3 is silent", "node": "worker-3"}
    ]


def test_a_node_does_not_suffer_when_nobody_reads_any_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = io.StringIO()
    with writing_events(stream):
        stream.close()
        logging.getLogger("aiokv").error("late", extra={"event": "late"})
    assert "I/O operation on closed file" in capsys.readouterr().err


def test_what_is_said_later_is_not_written() -> None:
    stream = io.StringIO()
    with writing_events(stream):
        logging.getLogger("aiokv").error("now", extra={"event": "now"})
    logging.getLogger("aiokv").error("late", extra={"event": "late"})
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["now"]
