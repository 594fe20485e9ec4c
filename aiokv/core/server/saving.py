"""What a server does when its keys are saved or loaded: find what a message is about, and let the store do it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Configure, Effect, Refuse, Restore, Send, StoredState
from aiokv.core.merging import Merging
from aiokv.optim import Assign
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.roster import Roster
    from aiokv.core.rules import Rules
    from aiokv.core.server.catalog import Catalog
    from aiokv.core.server.creation import Creation
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.stimuli import Received, Restored
    from aiokv.optim import Optimizer
    from aiokv.types import Slot


def restored(stimulus: Restored) -> Effect:
    """Return the answer to who has sent what was restored."""
    if stimulus.error is not None:
        return Refuse(stimulus.peer, stimulus.request, stimulus.error)
    return Send(stimulus.peer, stimulus.request, m.Done())


class Saving:
    """The part of a `Coordinator` that deals with saved state.

    Args:
        catalog: the server's keys.
        rules: its update rule.
        creation: who makes keys.
    """

    def __init__(self, catalog: Catalog, rules: Rules, creation: Creation) -> None:
        self._catalog = catalog
        self._rules = rules
        self._creation = creation

    def create(self, message: m.PutState, roster: Roster) -> list[Effect]:
        """Make the chunk that a state is of, without values, if it is not there and may be made.

        Raises:
            AiokvError: it can't be.
        """
        start = message.first if message.sparse else message.start
        if not message.policy or self._catalog.find(message.key, start) is not None:
            return []
        head = (message.key, message.shape, message.dtype, start, message.stop)
        rest = (message.policy, message.timeout, message.group, b"")
        if message.sparse:
            init: m.Init | m.InitRows = m.InitRows(*head, 0, 0, 0, *rest, message.lazy, message.initializer)
        else:
            init = m.Init(*head, *rest)
        return self._creation.create_empty(init, roster)

    def read(self, received: Received, message: m.GetState, chunk: Chunk) -> list[Effect]:
        """Answer with what the store has of a key, which may lie in the chunk of a bundle."""
        what = (message.key, message.start, message.arrays, message.names)
        payload = StoredState(chunk.key, chunk.start, chunk.version, *what)
        return [Send(received.peer, received.request, m.State(chunk.version), payload, priority=0)]

    def write(self, received: Received, message: m.PutState, chunk: Chunk, slot: Slot) -> list[Effect]:
        """Replace what the store has of a chunk by what lies in the slot."""
        rule = Assign() if chunk.policy.keeps_sum else self._rules.current
        return [Restore(received.peer, received.request, chunk.key, chunk.start, message.start, rule, slot)]

    def read_rules(self, received: Received) -> list[Effect]:
        """Answer with the rule."""
        return [Send(received.peer, received.request, self._rules.saved())]

    def write_rules(self, received: Received, message: m.PutRules, rule: Optimizer | None) -> list[Effect]:
        """Go on with a saved rule, which has been checked; None: with the clock only."""
        effects: list[Effect] = []
        merging = Merging(message.reduction, message.staleness_rate)
        if rule is not None and self._rules.resume(rule, message.params, merging, message.changes):
            effects.append(Configure(rule))
        self._rules.newest = message.clock
        return [*effects, Send(received.peer, received.request, m.Done())]
