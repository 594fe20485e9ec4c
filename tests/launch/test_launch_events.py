"""Lines of JSON about what goes wrong."""

from __future__ import annotations

import io
import json
import logging

from aiokv.launch.events import EventHandler


def test_only_what_has_an_event_is_written_with_its_facts() -> None:
    stream = io.StringIO()
    handler = EventHandler(stream)
    said = {"name": "aiokv", "levelno": logging.ERROR, "levelname": "ERROR", "msg": "worker %d is silent", "args": (3,)}
    handler.handle(logging.makeLogRecord(said | {"event": "silent", "facts": {"node": "worker-3"}}))
    handler.handle(logging.makeLogRecord(said))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines == [{"event": "silent", "level": "error", "text": "worker 3 is silent", "node": "worker-3"}]
