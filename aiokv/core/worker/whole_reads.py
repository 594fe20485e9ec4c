"""Values that a worker reads in parts, from several chunks and servers, and that are to be of one round.

Rounds go on while a worker reads. Under policies whose rounds are decided for all keys at once, a worker that nobody
waits for may get one part of a call's values before a round is made, and another one after. It asks again for the
older ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import CallMemory
from aiokv.core.records import Record, field
from aiokv.core.worker.parts import Part
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.worker.parts import Lane
    from aiokv.types import Round

MOST_TRIES = 8
"""How often a call asks again, while rounds go on, until its values may be of several rounds."""

PATIENCE = 5.0
"""Seconds that a server is given to make a round that is made elsewhere."""


class Read(Record, eq=False):
    """What was read into one part of a call's memory: the last round in it, and the one that it was to have."""

    part: Part
    round: Round
    wanted: Round


class WholeReads(Record, eq=False):
    """What one call has read of keys whose rounds are decided together, by policy and group, and by its memory.

    `tries` counts how often it has asked again.
    """

    lanes: dict[Lane, dict[tuple[int, int], Read]] = field(default_factory=dict)
    tries: int = 0

    def add(self, lane: Lane, part: Part, number: Round) -> None:
        """Take note of the last round in a value."""
        assert isinstance(part.receives, CallMemory), "such keys are in no bundle"
        wanted = part.message.at_least_round if isinstance(part.message, m.Pull | m.PullRows) else 0
        place = part.receives.tensor, part.receives.start
        self.lanes.setdefault(lane, {})[place] = Read(part, number, wanted)

    def _newest(self, reads: dict[tuple[int, int], Read]) -> Round:
        return max([read.round for read in reads.values()])

    @property
    def is_whole(self) -> bool:
        """Whether the values are of one round."""
        return all(len({read.round for read in reads.values()}) == 1 for reads in self.lanes.values())

    @property
    def is_hopeless(self) -> bool:
        """Whether it is no use to ask again: a server has given up, or it was asked too often."""
        late = [read for reads in self.lanes.values() for read in reads.values() if read.round < read.wanted]
        return bool(late) or self.tries >= MOST_TRIES

    def again(self, wait: float) -> list[Part]:
        """Return what asks again for the values that are older than others, into the same memory."""
        self.tries += 1
        parts: list[Part] = []
        for reads in self.lanes.values():
            newest = self._newest(reads)
            parts += [_again(read.part, newest, wait) for read in reads.values() if read.round < newest]
        return parts


def _again(part: Part, number: Round, wait: float) -> Part:
    asked = part.message
    message: m.Pull | m.PullRows
    if isinstance(asked, m.PullRows):
        head = asked.key, asked.shape, asked.dtype, asked.start, asked.stop
        message = m.PullRows(*head, asked.rows, asked.at_least, wait, part.priority, number)
    else:
        assert isinstance(asked, m.Push | m.Pull), "nothing else is answered with such a value"
        head = asked.key, asked.shape, asked.dtype, asked.start, asked.stop
        at_least = asked.sequence if isinstance(asked, m.Push) else asked.at_least
        # A replica goes on from the answer before, so the next difference makes it right.
        message = m.Pull(*head, at_least, wait, part.priority, asked.value_codec, number)
    memory = part.receives
    return Part(part.peer, message, None, memory, part.key, part.start, priority=part.priority, replica=part.replica)
