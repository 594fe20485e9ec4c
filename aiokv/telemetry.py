"""What a node records of itself: counters and the event log. No I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S")
E = TypeVar("E")

Counters = Counter[str]
"""Name of an event -> how often it happened."""


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
