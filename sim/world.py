"""What all nodes of a run share, and what a driver knows of a state machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from sim.standing import Standing

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.effects import Effect
    from aiokv.core.stimuli import Stimulus
    from sim.checks import Checks
    from sim.clock import Clock
    from sim.disk import Disk
    from sim.network import Network
    from sim.node import Node
    from sim.record import DivideRecord, Run, UpdateRecord
    from sim.saving import States
    from sim.service import Service
    from sim.timeline import Timeline
    from sim.trace import Trace


class Machine(Protocol):
    """What `Coordinator`, `Session` and `Membership` have in common."""

    def handle(self, stimulus: Stimulus, *, now: float) -> list[Effect]:
        """Take in one stimulus and return what is to be done, in order."""
        ...

    def deadline(self) -> float | None:
        """Return the time at which a `Tick` is wanted."""
        ...

    def validate(self) -> None:
        """Check the machine's invariants."""
        ...


@dataclass(slots=True)
class World:
    """What all nodes of a run share."""

    env: Clock
    network: Network
    trace: Trace
    run: Run
    service: Service
    timeline: Timeline
    states: States
    """How much there is to save."""
    disk: Disk
    """Where checkpoints lie."""
    checks: Checks | None = None
    """What is asked after every event whether all is well."""
    on_update: Callable[[UpdateRecord], None] = lambda update: None
    """Is called after every update of a chunk."""
    validated: int = 0
    """After so many events of its own a state machine checks itself, too; 0: never."""
    host: Callable[[Node, int, str], None] = lambda host, index, name: None
    """Starts a standby in the process of a node."""
    standing: Standing = field(init=False)
    """Which updates stand when servers may be lost."""

    def __post_init__(self) -> None:
        self.standing = Standing(self._stands, self._divided)

    def _stands(self, update: UpdateRecord) -> None:
        self.run.updates.append(update)
        if self.checks is not None:
            self.checks.on_update(update)
        self.on_update(update)

    def _divided(self, division: DivideRecord) -> None:
        division.updates = len(self.run.updates)
        self.run.divisions.append(division)
        if self.checks is not None:
            self.checks.on_divide(division)
