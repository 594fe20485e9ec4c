"""What a chaos run does to which process, and when: drawn from a seed."""

from __future__ import annotations

import enum
import random
from typing import TYPE_CHECKING

import msgspec

from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

KILLABLE = ("worker", "server", "scheduler")
TOGETHER = 0.2
"""How often the next fault comes right after one, before the cluster has got over it."""
SOON = 0.3
"""Seconds within which it comes then."""


class Kind(enum.StrEnum):
    """What is done."""

    KILL = "kill"
    STOP = "stop"
    CUT = "cut"
    DELAY = "delay"


DISTURBANCES = (Kind.STOP, Kind.CUT, Kind.DELAY)


class Fault(msgspec.Struct, frozen=True):
    """One thing that is done to a node.

    Attributes:
        wait: seconds after the fault before it.
        settled: whether the job must have made a step since then.
        kind: what is done.
        node: to whom: its name; connections are those that lead to it.
        seconds: how long it is stopped, or its connections are held up.
    """

    wait: float
    settled: bool
    kind: Kind
    node: str
    seconds: float = 0.0


class FaultPlan(msgspec.Struct, frozen=True):
    """What may be done.

    Attributes:
        kill: roles whose processes are killed.
        disturb: what is done besides.
        every: mean seconds between faults.
        longest: most seconds that a process is stopped or connections are held up.
        seed: of all that is drawn.
    """

    kill: tuple[str, ...]
    disturb: tuple[Kind, ...]
    every: float
    longest: float
    seed: int

    def faults(self, names: Iterable[str]) -> Iterator[Fault]:
        """Draw faults without end.

        Args:
            names: of all nodes, by which their roles are known: "worker-1", "server-0", "scheduler".
        """
        draw = random.Random(self.seed)
        nodes = list(names)
        kinds = [Kind.KILL, *self.disturb] if self.kill else list(self.disturb)
        while kinds:
            settled = draw.random() >= TOGETHER
            wait = draw.expovariate(1 / self.every) if settled else draw.uniform(0, SOON)
            kind = draw.choice(kinds)
            yield Fault(wait, settled, kind, *self._aim(kind, nodes, draw))

    def _aim(self, kind: Kind, nodes: list[str], draw: random.Random) -> tuple[str, float]:
        match kind:
            case Kind.KILL:
                # First the role: there may be many workers and only one scheduler.
                role = draw.choice(self.kill)
                return draw.choice([name for name in nodes if name.startswith(role)]), 0.0
            case Kind.STOP:
                return draw.choice(nodes), draw.uniform(0.05, self.longest)
            case Kind.CUT:
                return draw.choice([name for name in nodes if not name.startswith("worker")]), 0.0
            case Kind.DELAY:
                held = [name for name in nodes if not name.startswith("worker")]
                return draw.choice(held), draw.uniform(0.05, self.longest)


def parse_words(text: str, known: Iterable[str], option: str) -> tuple[str, ...]:
    """Read words with commas between them; "none" is none of them.

    Raises:
        ConfigError: an unknown word.
    """
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if words == ("none",):
        return ()
    known = tuple(known)
    for word in words:
        if word not in known:
            expected = ", ".join([*known, "none"])
            raise ConfigError(f"{option}: {word!r} is none of {expected}", key=option, expected=expected, got=word)
    return words
