"""What goes wrong in a node, as lines of JSON for whoever watches it."""

from __future__ import annotations

import contextlib
import json
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def writing_events(stream: TextIO) -> Iterator[None]:
    """Write a line of JSON for whatever goes wrong in the nodes of this process meanwhile."""
    logger, handler = logging.getLogger("aiokv"), EventHandler(stream)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class EventHandler(logging.Handler):
    """Writes one line for each log record that has an event: when it was, its name, its facts and its text.

    Args:
        stream: where to.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line, if there is one."""
        event = getattr(record, "event", "")
        if not event:
            return
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said = {"time": when, "event": event, "level": record.levelname.lower(), "text": record.getMessage()}
        # Who watched may be gone, or the stream closed (a ValueError); the node is not to suffer from that.
        try:
            # What a peer has said must not look like something else.
            self._stream.write(json.dumps(said | getattr(record, "facts", {}) | said, default=str) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self.handleError(record)
