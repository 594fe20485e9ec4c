"""How a worker passes the clocks of the cluster's checkpoints: it tells the scheduler when nothing of before is open.

A push of clock C or less belongs to the checkpoint of C. When the worker has begun with a later one and all that it had
pushed before is answered, it is past C. If it compresses, what its encoders had left of gradients is kept key by key:
before the first gradient of a later clock is encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.checkpoint_names import place_of
from aiokv.core.effects import Effect, KeepResiduals, Send, WriteResiduals
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.stimuli import PartWritten
    from aiokv.core.worker.calls import Calls
    from aiokv.types import Key


class Passing:
    """The part of a `Session` that deals with the cluster's checkpoints.

    Args:
        calls: what this worker has asked.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._view: m.View | None = None
        self._clock = 0
        """Of the checkpoint that is asked for; 0: there is none, or it is not possible."""
        self._waits: list[int] | None = None
        """Once a push has a later clock: the requests that have to be answered before this worker is past it."""
        self._part: m.CheckpointPart | None = None
        """What the scheduler was told of it."""
        self.is_active = False
        """Whether a clock is to be passed, or was passed and the scheduler does not know it yet."""
        self.writes = 0
        """How many files are being written."""

    def viewed(self, view: m.View) -> None:
        """Take over where checkpoints are, and from the first view which one is due."""
        if self._view is None:
            self._await(view.checkpoint_at)
        elif (view.run, view.checkpoints) != (self._view.run, self._view.checkpoints):
            # A scheduler that was started again has another place for the one of the same clock.
            self._await(0)
        self._view = view

    def _await(self, clock: int) -> None:
        self._clock, self._waits, self._part = clock, None, None
        self.is_active = clock > 0

    def asked(self, clock: int, newest: int) -> list[Effect]:
        """Let a clock be passed that the scheduler asks for, unless that has happened already.

        It asks again when what was said may have got lost with the connection.
        """
        if clock != self._clock:
            self._await(clock if clock >= newest else 0)
        elif newest > clock:
            # It was known here before it was passed.
            newest = clock
        answer = Send(SCHEDULER, 0, m.CheckpointClock(clock, newest))
        return [answer] if self._part is None else [answer, Send(SCHEDULER, 0, self._part)]

    def keep(self, keys: list[Key], clock: int) -> list[Effect]:
        """Keep what is left of keys, before a gradient is encoded that will have a clock."""
        is_later = self._waits is not None or clock > self._clock
        return [KeepResiduals(self._clock, keys)] if is_later else []

    def pushed(self, clock: int) -> list[Effect]:
        """Take note that this worker has pushed with a clock, so that all earlier ones are over."""
        if self._waits is None:
            if clock <= self._clock:
                return []
            self._waits = self._calls.requests.pushes_until(self._clock)
        self._waits = [request for request in self._waits if request in self._calls.requests]
        if self._waits:
            return []
        self.is_active = False
        if self._calls.encodings.begun:
            assert self._view is not None, "there are no clocks before"
            self.writes += 1
            return [WriteResiduals(self._clock, place_of(self._view, self._clock))]
        return self._pass(m.CheckpointPart(self._clock))

    def _pass(self, part: m.CheckpointPart) -> list[Effect]:
        self._part = part
        return [Send(SCHEDULER, 0, part)]

    def departs(self, clock: int) -> list[Effect]:
        """Take note that no push follows that with a clock."""
        # Of a gradient that is being encoded, and is not sent any longer, more is left than what its encoder has.
        return self.pushed(clock + 1) if self.is_active and not self._calls.encodings.calls else []

    def written(self, written: PartWritten) -> list[Effect]:
        """Tell the scheduler what was written, and so that the clock is passed."""
        self.writes -= 1
        # What is asked for may be another one by now.
        part = m.CheckpointPart(written.clock, written.file, written.reason)
        return self._pass(part) if written.clock == self._clock else []
