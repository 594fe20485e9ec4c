"""How a node holds a copy of what another server has, until a view makes it the primary in that one's place.

What the primary sends is done in its order, one after the other, each when the store has done the one before. An update
is made as the primary makes it, of the same sum by the same rule, so that chunks look as they do there when nothing of
a next round has come. What is counted as received is done in any case: when the primary is lost, the rest first.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from aiokv.core.effects import (
    Apply,
    ApplyRows,
    Configure,
    Disconnect,
    Effect,
    Install,
    InstallRows,
    Prepare,
    Refuse,
    Restore,
    Retire,
    Send,
    Skip,
    Split,
    Widen,
    freed,
)
from aiokv.core.keys import BUNDLE_START
from aiokv.core.roster import standbys_of
from aiokv.core.server.copies.followed_calls import FollowedCalls
from aiokv.core.server.copies.followed_pushes import FollowedPushes
from aiokv.core.server.copies.followed_rounds import FollowedRounds
from aiokv.core.server.copies.forwarding import Forwarding
from aiokv.core.server.rounds.chunk import NONE, Chunk
from aiokv.core.server.rounds.open_rounds import step_place
from aiokv.core.server.rounds.rows import options_of
from aiokv.core.server.rounds.updates import Contribution, Update
from aiokv.errors import AiokvError, KeyDeletedError, ProtocolError, StaleEpochError
from aiokv.optim import Assign
from aiokv.policy import get_policy
from aiokv.types import ITEM_SIZES, STANDBY, Piece
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aiokv.core.compression import Codecs
    from aiokv.core.joiner import Joiner
    from aiokv.core.rules import Rules
    from aiokv.core.server.answers import Answers
    from aiokv.core.server.catalog import Catalog
    from aiokv.core.server.copies.standby_link import StandbyLink
    from aiokv.core.server.exchanges import Exchanges
    from aiokv.core.server.rounds.norms import Norms
    from aiokv.core.server.rounds.tallies import Tallies
    from aiokv.core.stimuli import Received, Restored
    from aiokv.optim import Optimizer
    from aiokv.types import Incarnation, Key, Peer, Rank

COPIED = (
    *(m.Replicate, m.Copy, m.CopySettings, m.ForgetKey, m.CopyTotals),
    *(m.CopyDecisions, m.CopyDropped, m.CopyContribution, m.CopyPush, m.CopySettled),
)
"""What a primary sends to its standby."""


class Standby:
    """The part of a `Coordinator` that holds a copy.

    Args:
        joiner: the node's place in the cluster.
        catalog: where the primary's keys are entered.
        rules: where its update rule is set.
        codecs: where its codecs are.
        answers: who knows the workers of the newest view.
        exchanges: who divides bundles and forgets keys.
        norms: who remembers totals of keys.
        tallies: where contributions are counted.
        stop: ends the node, for a reason.
    """

    def __init__(
        self,
        joiner: Joiner,
        catalog: Catalog,
        rules: Rules,
        codecs: Codecs,
        answers: Answers,
        exchanges: Exchanges,
        norms: Norms,
        tallies: Tallies,
        stop: Callable[[str], list[Effect]],
    ) -> None:
        self._joiner = joiner
        self._catalog = catalog
        self._rules = rules
        self._codecs = codecs
        self._answers = answers
        self._exchanges = exchanges
        self._norms = norms
        self._tallies = tallies
        self._stop = stop
        self.forwarding = Forwarding(joiner)
        """Whoever is to have all of it too."""
        self._fills = True
        """Whether not everything is here yet."""
        self.rounds = FollowedRounds()
        """Those that are decided for all keys at once."""
        self.pushes = FollowedPushes()
        """Those whose workers go on although they are in no value."""
        self.calls = FollowedCalls()
        """Those that count as a whole."""
        self._primary: tuple[str, Incarnation] | None = None
        """Whose copy it is."""
        self.peer: Peer | None = None
        """The connection to it."""
        self.place: m.ServerEntry | None = None
        """What the newest view says of this node as the primary, if it does."""
        self._number = 0
        """Of the last message from it."""
        self._queue: deque[Received] = deque()
        self._updating: Chunk | None = None
        self._restoring = False

    @property
    def is_idle(self) -> bool:
        """Whether all is done that has come."""
        return not self._queue and not self._restoring and not self._is_updating

    @property
    def _is_updating(self) -> bool:
        return self._updating is not None and self._updating.applying

    # --- the primary ---

    def attach(self, peer: Peer, request: int, message: m.AttachStandby) -> list[Effect]:
        """Let the primary of the newest view say who it is; refuse all others."""
        view = self._joiner.view
        entry = None if view is None else next((each for each in view.servers if each.index == message.index), None)
        here = (message.name, message.incarnation)
        if entry is None or _before(entry, self._joiner.name) != here:
            text = f"{message.name} (server {message.index}) is not the server whose standby {self._joiner.name} is"
            return [Refuse(peer, request, StaleEpochError(text, server=message.index))]
        effects: list[Effect] = []
        if self.peer is not None and self.peer != peer:
            effects.append(Disconnect(self.peer, "its server has connected again"))
        if self._primary is not None and self._primary != here:
            # A server has this standby for all of its life.
            return effects + self._give_up(f"it was filled by {self._primary[0]}, not by {message.name}")
        self._primary, self.peer = here, peer
        has = self.forwarding.acks.acked if self.forwarding.is_up else self._number
        return [*effects, Send(peer, request, m.Replicated(has)), *self._ask_to_fill()]

    def forget_peer(self, peer: Peer) -> None:
        """Take note that a connection is over; what has come stays."""
        if peer == self.peer:
            self.peer = None

    # --- its own standby ---

    @property
    def link(self) -> StandbyLink:
        """The connection to it."""
        return self.forwarding.link

    def due(self, now: float) -> list[Effect]:
        """Give it up if it can't be reached."""
        return self.forwarding.due(now)

    def viewed(self, index: int, entry: m.StandbyEntry, now: float) -> list[Effect]:
        """Take over what a newer view says of this node."""
        self._fills = entry.state != "ready"
        was_up = self.forwarding.is_up
        return self.forwarding.viewed(index, entry.standby, now) + self._changed(was_up)

    def told(self, peer: Peer, request: int, message: m.Message, now: float) -> list[Effect]:
        """Take in what its own standby says."""
        was_up, acked = self.forwarding.is_up, self.forwarding.acks.acked
        effects = self.forwarding.received(peer, request, message, now)
        if was_up and self.forwarding.is_up and self.forwarding.acks.acked > acked:
            effects += self._acknowledge(self.forwarding.acks.acked)
        return effects + self._changed(was_up)

    def link_lost(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Take note that the link to its own standby has ended."""
        was_up = self.forwarding.is_up
        return self.forwarding.lost(peer, reason, now) + self._changed(was_up)

    def _changed(self, was_up: bool) -> list[Effect]:
        """Go on with its own standby that is there now, or without one that is gone."""
        if was_up == self.forwarding.is_up:
            return []
        if was_up:
            return self._acknowledge(self._number)
        self.forwarding.begin(self._number)
        return self._ask_to_fill()

    def _ask_to_fill(self) -> list[Effect]:
        """Let the server send all that there is, if that has to be handed on."""
        entry = self.forwarding.link.entry
        if self.peer is None or not self.forwarding.is_up or entry is None or entry.state == "ready":
            return []
        return [Send(self.peer, 0, m.FillAgain(entry.name))]

    def _acknowledge(self, number: int) -> list[Effect]:
        return [] if self.peer is None else [Send(self.peer, 0, m.Replicated(number))]

    # --- what it sends ---

    def received(self, received: Received, now: float) -> list[Effect]:
        """Take in what the primary sends, in its order."""
        message = received.message
        assert isinstance(message, COPIED), "nothing else is for a copy"
        if received.peer != self.peer:
            return freed(received.slot)
        self._number = message.number
        self._queue.append(received)
        handed_on = self.forwarding.forward(received)
        return [*(handed_on or self._acknowledge(message.number)), *self._go_on(now)]

    def watch(self, effects: list[Effect], now: float) -> list[Effect]:
        """Go on with what has come when the store has done what was before."""
        return effects + self._go_on(now) if self._queue else effects

    def restored(self, restored: Restored) -> list[Effect]:
        """Take note that a chunk is here as a whole."""
        self._restoring = False
        return [] if restored.error is None else self._give_up(restored.error.message)

    def _go_on(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._queue and not self._restoring and not self._is_updating:
            received = self._queue.popleft()
            try:
                effects += self._carry_out(received, now)
            except AiokvError as error:
                effects += freed(received.slot) + self._give_up(error.message)
        return effects

    def _give_up(self, reason: str) -> list[Effect]:
        """End, since this is no copy: the scheduler finds another standby."""
        effects = [effect for received in self._queue for effect in freed(received.slot)]
        self._queue.clear()
        return effects + self._stop(f"{self._joiner.name} has no right copy: {reason}")

    def _carry_out(self, received: Received, now: float) -> list[Effect]:
        message = received.message
        match message:
            case m.Replicate():
                return self._update(received, message)
            case m.Copy():
                return self._fill(received, message, now)
            case m.CopySettings():
                return self._settings(message)
            case m.CopyTotals(_, key, totals):
                self._norms.remember(key, totals)
                return []
            case m.CopyDecisions():
                self.rounds.decided(message)
                return []
            case m.CopyDropped():
                return self._drop(message)
            case m.CopyContribution():
                return self._keep(received, message)
            case m.CopyPush():
                return self.calls.pushed(received)
            case m.CopySettled():
                return self.calls.settled(message)
            case _:
                assert isinstance(message, m.ForgetKey), "all others are above"
                return self._forget(message.key)

    # --- updates ---

    def _update(self, received: Received, message: m.Replicate) -> list[Effect]:
        chunk = self._catalog.chunks.get((message.key, message.start))
        if chunk is None and self._fills:
            # It was handed on; all of the chunk is still to come.
            return freed(received.slot)
        if chunk is None or message.version != chunk.version + 1:
            has = "nothing" if chunk is None else f"version {chunk.version}"
            raise ProtocolError(f"key {message.key!r}: version {message.version} is to be made of {has}")
        update = Update(message.version)
        if message.round:
            self.rounds.made(chunk, message)
        for rank, sequence, read, clock in message.parts:
            place = step_place(rank, clock) if message.round else rank
            update.contributions[place] = Contribution(rank, sequence, read, clock, None, place)
            chunk.pushed[rank] = sequence
            if self._answers.roster.respawns:
                chunk.clocks[rank] = (sequence, clock)
        update.folded = sorted(update.contributions)
        chunk.updates[message.version], chunk.newest, chunk.applying = update, message.version, True
        self._updating = chunk
        rule: Optimizer = Assign() if chunk.policy.keeps_sum else self._rules.for_update(message.clock)
        ranks = [part[0] for part in message.parts]
        behind = [chunk.version - part[2] for part in message.parts]
        if not chunk.policy.in_step:
            self._tallies.applied(ranks, behind)
        head = (chunk.key, chunk.start, message.version, received.slot, ranks, behind, message.clock, rule)
        norms = [list(phase) for phase in message.norms]
        apply = Apply(*head, message.divisor, norms, None, message.keep)
        kept = self._made(chunk, ranks)
        if not chunk.is_dense:
            return kept + self._update_rows(received, message, apply)
        if received.slot is not None and received.nbytes != chunk.nbytes:
            return [*kept, Widen(received.slot, chunk.spec.dtype), apply]
        return [*kept, apply]

    def _drop(self, message: m.CopyDropped) -> list[Effect]:
        """Count a push that is in no update."""
        chunk = self._catalog.chunks.get((message.key, message.start))
        if chunk is None and self._fills:
            return []
        if chunk is None:
            raise ProtocolError(f"key {message.key!r}: a push of rank {message.rank} is dropped, but it is not here")
        self.rounds.dropped(chunk, message)
        self._tallies.dropped(message.rank, message.reason)
        return self._made(chunk, [message.rank])

    def _keep(self, received: Received, message: m.CopyContribution) -> list[Effect]:
        """Keep a push that is in no update yet."""
        chunk = self._catalog.chunks.get((message.key, message.start))
        if chunk is None and self._fills:
            return freed(received.slot)
        if chunk is None:
            raise ProtocolError(f"key {message.key!r}: a push of rank {message.rank} is to be kept, but it is not here")
        head = (message.rank, message.sequence, message.read, message.clock)
        part = Contribution(*head, received.slot, message.rank, message.nbytes)
        is_wide = received.slot is not None and received.nbytes != message.nbytes
        widened: list[Effect] = [Widen(received.slot, chunk.spec.dtype)] if is_wide else []  # type: ignore[arg-type]
        return widened + self.pushes.came(chunk, part)

    def _made(self, chunk: Chunk, ranks: Iterable[Rank]) -> list[Effect]:
        """Keep no longer what is in the value of a chunk now, or is dropped."""
        return self.calls.made(chunk, ranks) + self.pushes.made(chunk)

    def _update_rows(self, received: Received, message: m.Replicate, apply: Apply) -> list[Effect]:
        """Cut the contributions out of the payload, and sum them as the primary does."""
        apply.slot = None
        parts = [(self._exchanges.new_slot(), nbytes) for nbytes in message.lengths]
        rows = ApplyRows(apply, [slot for slot, _ in parts], list(message.factors), list(message.lengths))
        return [rows] if received.slot is None else [Split(received.slot, parts), rows]

    # --- whole chunks ---

    def _fill(self, received: Received, message: m.Copy, now: float) -> list[Effect]:
        """Put a whole chunk in the place of what is here of it."""
        address = (message.keys[0], message.start)
        effects: list[Effect] = []
        if message.start != BUNDLE_START:
            effects += self._divide(message.keys[0])
        chunk = self._catalog.chunks.get(address)
        if chunk is None:
            chunk, install = self._enter(message)
            effects.append(install)
        elif chunk.is_dense and NONE < chunk.previous < chunk.version:
            effects.append(Retire(*address, [chunk.previous]))
        self._follow(chunk, message, now)
        for key in message.keys:
            self._go_over(key, chunk)
        effects += self._made(chunk, list(chunk.reflected))
        self._restoring = True
        rule = Assign() if chunk.policy.keeps_sum else self._rules.current
        assert received.slot is not None, "a copy has a payload"
        kept = message.previous if message.previous < message.version else NONE
        return [
            *effects,
            Skip(*address, chunk.version, None),
            Restore(STANDBY, message.number, *address, chunk.start, rule, received.slot, kept),
        ]

    def _go_over(self, key: Key, chunk: Chunk) -> None:
        """Let a key have the policy of one of its chunks when all have it: till then its workers ask for it again."""
        entry, others = self._catalog.entry(key), self._catalog.chunks
        assert entry is not None, "it is entered"
        if get_policy(entry.policy) == chunk.policy:
            return
        if all(one.policy == chunk.policy for (name, _), one in others.items() if name == key):
            entry.policy = str(chunk.policy)

    def _divide(self, key: Key) -> list[Effect]:
        """Make chunks of their own of the keys of a bundle, if one is to be replaced that is in it."""
        bundle = self._catalog.bundle_of(key)
        return [] if bundle is None else self._exchanges.divide(bundle)

    def _enter(self, message: m.Copy) -> tuple[Chunk, Effect]:
        """Enter a new chunk, without values yet."""
        options = (message.policy, 0.0, message.group)
        nbytes = (message.stop - message.start) * ITEM_SIZES[message.dtype]
        if message.sparse:
            head = (message.keys[0], message.shapes[0], message.dtype, message.start, message.stop)
            rows = m.InitRows(*head, 0, 0, 0, *options, message.digests[0], message.lazy, message.initializer)
            made = options_of(rows)
            table = self._catalog.create_table(rows, made)
            place = (table.key, table.start, table.stop, table.spec)
            return table, InstallRows(*place, made.initializer, made.lazy, None)
        if message.start == BUNDLE_START:
            init = m.InitBundle(message.keys, message.shapes, message.dtype, *options, message.digests)
            bundle = self._catalog.create_bundle(init, nbytes)
            assert bundle.chunk is not None, "a new bundle is one chunk"
            chunk = bundle.chunk
            pieces = [
                Piece(key, 0, spec.size, spec.row_size) for key, spec in zip(bundle.keys, bundle.specs, strict=True)
            ]
        else:
            head = (message.keys[0], message.shapes[0], message.dtype, message.start, message.stop)
            chunk = self._catalog.create(m.Init(*head, *options, message.digests[0]), nbytes)
            pieces = [Piece(chunk.key, chunk.start, chunk.size, chunk.spec.row_size)]
        return chunk, Install(chunk.key, chunk.start, message.dtype, chunk.size, None, pieces)

    def _follow(self, chunk: Chunk, message: m.Copy, now: float) -> None:
        """Let a chunk stand where that of the primary does."""
        chunk.policy = get_policy(message.policy)
        chunk.gate = chunk.policy.gate()
        chunk.version = chunk.newest = message.version
        chunk.since, chunk.previous = message.since, message.previous
        chunk.reflected = {each.rank: each.count for each in message.counts}
        chunk.pushed = dict(chunk.reflected)
        chunk.before = {each.rank: each.before for each in message.counts}
        chunk.clocks = {each.rank: (each.count, each.clock) for each in message.counts}
        chunk.admitted = {each.rank: (each.count, each.joined) for each in message.counts if each.joined >= 0}
        self.rounds.copied(chunk, message)
        self._rules.newest = max(self._rules.newest, _newest_in(message))
        if chunk.gate is not None:
            members = chunk.members(self._answers.roster)
            for each in message.counts:
                chunk.gate.advanced(each.rank, each.count - each.before, members, now)

    # --- all else ---

    def _settings(self, message: m.CopySettings) -> list[Effect]:
        rule = self._rules.restore(message.rules)
        effects: list[Effect] = [] if rule is None else [Configure(rule)]
        self._rules.newest = max(self._rules.newest, message.rules.clock)
        effects += map(Prepare, self._codecs.resume(message.compressions))
        self._catalog.number(message.bundles, message.next_bundle)
        return effects

    def _forget(self, key: Key) -> list[Effect]:
        self.rounds.forget(key)
        effects = self.calls.deleted(key) + self.pushes.forget(key)
        if key not in self._catalog:
            return effects
        return (
            effects
            + self._divide(key)
            + self._exchanges.forget(key, KeyDeletedError(f"key {key!r} was deleted", key=key))
        )


def _before(server: m.ServerEntry, name: str) -> tuple[str, Incarnation] | None:
    """Return whose standby a node is, as a view says; None: it is nobody's there."""
    before = (server.name, server.incarnation)
    for standby in standbys_of(server):
        if standby.name == name:
            return before
        before = (standby.name, standby.incarnation)
    return None


def _newest_in(message: m.Copy) -> int:
    """Return the clock of the newest update that is in a chunk."""
    counts = [each for each in message.counts if each.joined < 0]
    return max([each.made if message.first else each.clock for each in counts], default=0)
