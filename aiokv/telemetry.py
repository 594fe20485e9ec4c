"""What a node records of itself: counters, what an operator should know, the event log and a profile. No clock."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

S = TypeVar("S")
E = TypeVar("E")

Counters = Counter[str]
"""Name of an event -> how often it happened."""

Note = Callable[[str, str, str, dict[str, Any]], None]
"""Takes note of what an operator should know: level, name of the event or "", text, and facts for programs."""

logger = logging.getLogger("aiokv")


def take_note(counters: Counters, level: str, event: str, text: str, facts: dict[str, Any]) -> None:
    """Write a line for the operator; what has the name of an event is counted by it, and is one for programs."""
    if event:
        counters[event] += 1
    logger.log(logging.getLevelNamesMapping()[level.upper()], "%s", text, extra={"event": event, "facts": facts})


@dataclass(slots=True)
class Event(Generic[S, E]):
    """One step of a state machine: when, what came in, what it wanted done."""

    now: float
    stimulus: S
    effects: list[E]


@dataclass(slots=True)
class EventLog(Generic[S, E]):
    """Everything that a state machine was told, in order: fed to a fresh machine it gives the same effects."""

    events: list[Event[S, E]] = field(default_factory=list)

    def add(self, now: float, stimulus: S, effects: list[E]) -> None:
        """Append one step."""
        self.events.append(Event(now, stimulus, effects))


MAX_STEPS = 200_000


@dataclass(slots=True)
class Profile:
    """What a node did and how long each step took. Its driver adds every step while it is `running`.

    At most `MAX_STEPS` are kept; later ones are counted as `dropped`.
    """

    running: bool = False
    steps: list[tuple[str, str, float, float]] = field(default_factory=list)
    """Name of what came in, its key or "", and begin and end in seconds of some clock."""
    dropped: int = 0

    def start(self) -> None:
        """Forget all steps, and keep those that come."""
        self.steps, self.dropped, self.running = [], 0, True

    def add(self, stimulus: object, begin: float, end: float) -> None:
        """Keep one step."""
        if len(self.steps) >= MAX_STEPS:
            self.dropped += 1
            return
        what = getattr(stimulus, "message", stimulus)
        self.steps.append((type(what).__name__, str(getattr(what, "key", "")), begin, end))

    def trace(self, name: str, number: int) -> dict[str, Any]:
        """Return the steps as JSON for Chrome's trace viewer: times in microseconds, one process for each node.

        The format is that of the Trace Event Format of the Chromium project: complete events, and the process's name.
        """
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": {"name": name}}
        ]
        for what, key, begin, end in list(self.steps):
            event = {"name": what, "ph": "X", "pid": number, "tid": 0, "ts": begin * 1e6, "dur": (end - begin) * 1e6}
            events.append(event | {"args": {"key": key}} if key else event)
        return {"traceEvents": events, "displayTimeUnit": "ms"}
