"""How a worker passes the clocks of the cluster's checkpoints: it tells the scheduler when nothing of before is open.

A push of clock C or less belongs to the checkpoint of C. When the worker has begun with a later one and all that it had
pushed before is answered, it is past C. If it compresses, what its encoders had left of gradients is kept key by key:
before the first gradient of a later clock is encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.cluster_checkpoints import NEVER, Clocks, place_of
from aiokv.core.effects import Effect, KeepResiduals, Send, WriteResiduals
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.stimuli import PartWritten
    from aiokv.types import Key


class Passing:
    """The part of a `Session` that deals with the cluster's checkpoints.

    Args:
        open_pushes: returns the ids of the requests that push something of a clock or of an earlier one, and are not
            answered.
        is_open: tells whether a request is not answered.
    """

    def __init__(self, open_pushes: Callable[[int], list[int]], is_open: Callable[[int], bool]) -> None:
        self._open_pushes = open_pushes
        self._is_open = is_open
        self._clocks = Clocks()
        self._view: m.View | None = None
        self._waiting: dict[int, list[int]] = {}
        """By clock, the requests that have to be answered before this worker is past it."""
        self._compresses = False
        self.is_active = False
        """Whether a clock is to be passed, or was passed and the scheduler does not know it yet."""

    def viewed(self, view: m.View) -> None:
        """Take over the cluster's settings, from the first view."""
        if self._view is None:
            self._clocks.begin(view.checkpoint_every, 0)
            self._look()
        self._view = view

    def resumed(self, clock: int) -> None:
        """Go on after a clock up to which this worker's pushes were made before."""
        self._clocks.begin(self._clocks.every, clock)
        self._look()

    def _look(self) -> None:
        self.is_active = self._clocks.next != NEVER or bool(self._waiting)

    def asked(self, clock: int, newest: int) -> list[Effect]:
        """Let a clock be passed that the scheduler asks for, unless that has happened already."""
        if clock >= newest:
            self._clocks.ask(clock)
            self._look()
        return [Send(SCHEDULER, 0, m.CheckpointClock(clock, newest))]

    def keep(self, keys: list[Key], clock: int) -> list[Effect]:
        """Keep what is left of keys, before a gradient is encoded that will have a clock."""
        self._compresses = True
        clocks = [*self._waiting, *([self._clocks.next] if clock > self._clocks.next else [])]
        return [KeepResiduals(each, keys) for each in clocks]

    def pushed(self, clock: int) -> list[Effect]:
        """Take note that this worker has pushed with a clock, so that all earlier ones are over."""
        if clock > self._clocks.next:
            self._waiting |= {passed: self._open_pushes(passed) for passed in self._clocks.pass_over(clock)}
        return self._answered() if self._waiting else []

    def departs(self, clock: int) -> list[Effect]:
        """Take note that no push follows that with a clock. Residuals can't be written any longer."""
        return [] if self._compresses else self.pushed(clock + 1)

    def _answered(self) -> list[Effect]:
        """Tell the scheduler of the clocks of which nothing is open any longer."""
        effects: list[Effect] = []
        for clock, requests in list(self._waiting.items()):
            left = self._waiting[clock] = [request for request in requests if self._is_open(request)]
            if not left:
                del self._waiting[clock]
                effects.append(self._passed(clock))
        self._look()
        return effects

    def _passed(self, clock: int) -> Effect:
        assert self._view is not None, "there are no clocks before"
        if self._compresses:
            return WriteResiduals(clock, place_of(self._view, clock))
        return Send(SCHEDULER, 0, m.CheckpointPart(clock))

    def written(self, written: PartWritten) -> list[Effect]:
        """Tell the scheduler what was written, and so that the clock is passed."""
        return [Send(SCHEDULER, 0, m.CheckpointPart(written.clock, written.file, written.reason))]
