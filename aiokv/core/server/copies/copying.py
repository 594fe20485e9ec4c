"""How a server keeps a copy of what it has on its standby, and answers nobody before that is there.

The server sends the sum of an update before it makes it; the standby does the same with it, so that both have the same
bits. Whatever else happens to a chunk, all of it is sent again, when the store makes no update of it. Messages have
numbers, and the standby says up to which one it has them. When the link ends, what the standby does not have is sent
as a whole over the next one: what it has of that meanwhile is older, but of what is newer nobody has had an answer.

So an answer waits until the standby has all that was sent before it. Only when the scheduler has said that there is no
standby, or that it is another one, may the server answer alone; the new one is then filled while rounds go on, and
answers wait for it from when it has everything.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from aiokv.core.effects import (
    Apply,
    ApplyRows,
    Disconnect,
    Divide,
    Effect,
    Forget,
    Hold,
    Install,
    InstallRows,
    Log,
    Refuse,
    Restore,
    Send,
    Skip,
    StoredSlots,
)
from aiokv.core.server.copies.acknowledgements import Acknowledgements
from aiokv.core.server.copies.copied_calls import CopiedCalls
from aiokv.core.server.copies.copied_chunks import (
    can_follow,
    contribution_of,
    copy_of,
    is_changing,
    open_parts,
    update_of,
)
from aiokv.core.server.copies.copied_contributions import CopiedContributions
from aiokv.core.server.copies.filling import Filling
from aiokv.core.server.copies.followed_calls import pushes_of, settled
from aiokv.core.server.copies.followed_rounds import all_decided, decided
from aiokv.core.server.copies.standby_link import ATTACH_REQUEST, StandbyLink
from aiokv.core.server.copies.subjects import CALLS, DECISIONS, GONE, SETTINGS, TOTALS
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.compression import Codecs
    from aiokv.core.joiner import Joiner
    from aiokv.core.rules import Rules
    from aiokv.core.server.catalog import Catalog
    from aiokv.core.server.copies.forwarding import Forwarding
    from aiokv.core.server.copies.subjects import Subject
    from aiokv.core.server.resuming import Resuming
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.deciding import Deciding
    from aiokv.core.server.rounds.decisions import Decisions
    from aiokv.core.server.rounds.norms import Norms, Total
    from aiokv.core.server.rounds.open_rounds import Dropped
    from aiokv.core.server.rounds.updates import Contribution, Update
    from aiokv.core.server.rounds.whole_call import CallName, WholeCall
    from aiokv.core.server.rounds.whole_calls import WholeCalls
    from aiokv.policy import Token
    from aiokv.types import Key, Peer

MOST_COPIES = 8
"""How many chunks may be on their way as a whole: a server does not send all that it has at once."""

LOOKED_AT = 64
"""How many chunks that are to be sent are looked at each time; some may be in the middle of an update."""

News = (
    m.CopySettings
    | m.ForgetKey
    | m.CopyTotals
    | m.CopyDecisions
    | m.CopyDropped
    | m.CopyContribution
    | m.CopySettled
    | m.CopyPush
)


class Copying:
    """The part of a `Coordinator` that deals with its standby.

    Args:
        joiner: the server's place in the cluster.
        catalog: its keys.
        rules: its update rule.
        codecs: how contributions and values may be compressed.
        resuming: who loads a checkpoint first.
        norms: who adds up totals of keys.
        deciding: who knows which step is in which round.
        whole: who knows which calls count.
        alone: whether answers may go on while the first standby is being filled: it is not the one with which the
            server has begun.
    """

    def __init__(
        self,
        joiner: Joiner,
        catalog: Catalog,
        rules: Rules,
        codecs: Codecs,
        resuming: Resuming,
        norms: Norms,
        deciding: Deciding,
        whole: WholeCalls,
        *,
        alone: bool,
    ) -> None:
        self._joiner = joiner
        self._catalog = catalog
        self._rules = rules
        self._codecs = codecs
        self._resuming = resuming
        self._norms = norms
        self._deciding = deciding
        self._whole = whole
        self.calls = CopiedCalls()
        """Those that wait until their pushes are there."""
        self.contributions = CopiedContributions()
        """Those that are sent one by one."""
        self._news: list[tuple[Subject, News, StoredSlots | None]] = []
        """What the standby has to know before anything that follows."""
        self._alone = alone
        self.waits = not alone
        """Whether answers wait for the standby."""
        self._dirty: dict[Subject, None] = {}
        """What the standby does not have as it is, and gets as a whole."""
        self._filling = Filling()
        """How far the standby is."""
        self._again = Filling()
        """How far its own one is."""
        self._acks = Acknowledgements()
        self.link = StandbyLink(joiner)
        """The connection to it."""
        self._known = -1
        """How often the settings had changed when they were looked at last."""

    # --- the view ---

    def viewed(self, entry: m.ServerEntry, now: float) -> list[Effect]:
        """Take over what a newer view says of the standby."""
        is_first, new = self.link.entry is None, entry.standby
        effects: list[Effect] = []
        if self.link.viewed(entry.index, new):
            effects = self._begin_anew(alone=self._alone if is_first else True)
        if new is None:
            return effects
        if new.state == "ready":
            self._filling.told = self.waits = True
        elif self._filling.told:
            # The scheduler may have been started again before it heard that.
            effects.append(Send(SCHEDULER, 0, m.StandbyReady(self.link.index, new.name)))
        if self._again.told and new.standby is not None and new.standby.name == self._again.name:
            effects += self._say_ready(self._again) if new.standby.state != "ready" else []
        return effects + self.link.look_for(now)

    def take_up(self, forwarding: Forwarding, entry: m.ServerEntry) -> list[Effect]:
        """Go on with the standby to which this node has handed on what came to it while it was a standby itself."""
        self.link, self._acks = forwarding.link, forwarding.acks
        standby = entry.standby
        if forwarding.is_up and standby is not None and standby.state == "ready":
            self._dirty = dict.fromkeys((SETTINGS, DECISIONS, CALLS))
            return []
        return self._begin_anew(alone=True)

    def _begin_anew(self, *, alone: bool) -> list[Effect]:
        """Go on with a standby that has nothing yet, or without one."""
        effects = self.link.close()
        self._acks.begin_anew()
        totals = [(key, TOTALS) for key in self._norms.totalled]
        self._dirty = {SETTINGS: None, DECISIONS: None, CALLS: None} | dict.fromkeys([*totals, *self._catalog.chunks])
        self._news, self._alone = [], alone
        name = "" if self.link.entry is None else self.link.entry.name
        self._filling, self._again = Filling(name), Filling()
        return effects + self._go_on_alone() if alone else effects

    def _go_on_alone(self) -> list[Effect]:
        """Let nothing wait for the standby, which is to be filled first."""
        self.waits = False
        self.calls.give_up()
        self.contributions.give_up()
        return self._acks.let_all_go()

    # --- what is to be told ---

    def renew(self, chunk: Chunk) -> None:
        """Take note that something has changed a chunk of which nothing is seen in effects."""
        self._dirty[chunk.key, chunk.start] = None

    def totalled(self, key: Key, total: Total) -> None:
        """Take note that there are new totals of a key."""
        self._add((key, TOTALS), m.CopyTotals(0, key, (total,)))

    def decided(self, decisions: Decisions, tokens: list[Token]) -> None:
        """Take note that steps are decided."""
        self._add(DECISIONS, decided(decisions, tokens))

    def dropped(self, chunk: Chunk, dropped: Dropped) -> None:
        """Take note that a push is in no round of a chunk."""
        subject, part = (chunk.key, chunk.start), dropped.contribution
        head = (0, *subject, part.rank, part.sequence, part.clock)
        self._add(subject, m.CopyDropped(*head, dropped.waiter.dropped))

    def contributed(self, chunk: Chunk, part: Contribution) -> None:
        """Take note of a contribution on which its worker goes on although it is in no value."""
        if self._is_bound(chunk):
            return
        subject = (chunk.key, chunk.start)
        self.contributions.add(subject, part)
        self._add(subject, *contribution_of(chunk, part))

    def has_contributions(self, chunk: Chunk, update: Update) -> bool:
        """Tell whether the standby has all that it was to be told of an update, or nothing waits for it."""
        return not self.waits or self.contributions.has_all(chunk, update)

    def copy(self, call: WholeCall) -> bool:
        """Send the pushes of a call that is here; tell whether that has to be waited for."""
        if not self.waits:
            return False
        self.calls.add(call)
        for message, payload in pushes_of(call):
            self._add(CALLS, message, payload)
        return True

    def settled(self, name: CallName, verdict: str) -> None:
        """Take note that it was decided whether a call counts."""
        self._add(CALLS, m.CopySettled(0, ((*name, verdict),)))

    def _add(self, subject: Subject, message: News, payload: StoredSlots | None = None) -> None:
        """Let something be told, unless all of what it is about is to be sent."""
        if self.link.is_up and subject not in self._dirty:
            self._news.append((subject, message, payload))
        else:
            self._dirty[subject] = None

    def watch(self, effects: list[Effect]) -> list[Effect]:
        """Add what the standby is to be told of effects, and hold back the answers that have to wait for that."""
        # Before the updates that are made with them.
        news, self._news = self._news, []
        wanted = [self._tell(*each) for each in news]
        answers = 0
        for effect in effects:
            kind = type(effect)
            if kind is Apply or kind is ApplyRows:
                wanted += self._replicate(effect)  # type: ignore[arg-type]
            elif kind is Send or kind is Refuse:
                answers += _is_answer(effect)
            elif kind in CHANGES:
                self._note(effect)
            wanted.append(effect)
        known = self._rules.revision + self._codecs.revision + self._catalog.revision
        if known != self._known:
            self._known = known
            self._dirty[SETTINGS] = None
        if (self._dirty or self._again.left) and self.link.is_up and not self._resuming.is_busy:
            wanted += self._send_dirty()
        for filling in (self._filling, self._again):
            if not filling.told and filling.is_over(self._acks, self._bound, unsent=bool(self._dirty)):
                wanted += self._say_ready(filling)
        if answers and self.waits and self._acks.must_wait(unsent=bool(self._dirty)):
            self._acks.hold(answers, unsent=bool(self._dirty))
            return [Hold(effect) if _is_answer(effect) else effect for effect in wanted]  # type: ignore[arg-type]
        return wanted

    def _note(self, effect: Effect) -> None:
        """Take note of what has become of a chunk besides updates."""
        match effect:
            case Divide(key, start, parts):
                self._dirty.pop((key, start), None)
                self.contributions.forget((key, start))
                self._dirty.update(((part, 0), None) for part, _ in parts)
            case Forget(key, start):
                self._dirty.pop((key, start), None)
                self.contributions.forget((key, start))
                self._dirty.pop((key, TOTALS), None)
                # Behind it in case that the key is made again.
                self._dirty.pop((key, GONE), None)
                self._dirty[key, GONE] = None
            case _:
                assert isinstance(effect, Restore | Skip | Install | InstallRows), "all others are above"
                self._dirty[effect.key, effect.start] = None

    def _replicate(self, effect: Apply | ApplyRows) -> list[Effect]:
        """Send an update, unless the standby gets the chunk as it is then."""
        apply = effect.update if isinstance(effect, ApplyRows) else effect
        subject = (apply.key, apply.start)
        if subject in self._dirty:
            return []
        chunk = self._catalog.chunks[subject]
        if not self.link.is_up or not can_follow(chunk, apply.rule):
            self._dirty[subject] = None
            return []
        number = self._acks.next(subject)
        return [Send(self.link.peer, number, *update_of(chunk, effect, number))]

    def _send_dirty(self) -> list[Effect]:
        """Send what is to be sent as a whole, as far as it can be and may be."""
        effects = self._send_decided()
        for subject in list(islice(self._dirty, LOOKED_AT)):
            if self._acks.copies >= MOST_COPIES:
                break
            chunk = self._catalog.chunks.get(subject)
            # Where nothing waits for the standby, it may lack some of what is in a sum.
            if chunk is not None and is_changing(chunk, has_parts=self.waits):
                continue
            del self._dirty[subject]
            effects += self._send_whole(subject)
        if self._again.left:
            effects += self._send_again()
        if not self._dirty:
            self._acks.all_sent()
            self.waits = True
            self._filling.sent(self._acks.last, self._whole.asked_about)
            if not self._again.left:
                self._again.sent(self._acks.last, self._whole.asked_about)
        return effects

    def _send_again(self) -> list[Effect]:
        """Send, as far as it can be and may be, what the standby has and its own one does not."""
        effects: list[Effect] = []
        for subject in list(islice(self._again.left, LOOKED_AT)):
            if self._acks.copies >= MOST_COPIES:
                break
            chunk = self._catalog.chunks.get(subject)
            if chunk is None or not is_changing(chunk, has_parts=False):
                del self._again.left[subject]
                # What is to be sent anyway goes to both.
                effects += [] if subject in self._dirty else self._send_whole(subject)
        return effects

    def _send_whole(self, subject: Subject) -> list[Effect]:
        """Send all of something, if it is still there."""
        key, start = subject
        chunk = self._catalog.chunks.get(subject)
        if subject == SETTINGS:
            return [self._tell(subject, self._settings())]
        if start == GONE:
            return [self._tell(subject, m.ForgetKey(0, key))]
        if start == TOTALS:
            return [self._tell(subject, m.CopyTotals(0, key, tuple(self._norms.remembered(key))))]
        if chunk is None:
            return []
        number = self._acks.next(subject, whole=True)
        copied: list[Effect] = [Send(self.link.peer, number, *copy_of(chunk, self._catalog, number))]
        if self._is_bound(chunk):
            return copied
        parts = open_parts(chunk)
        self.contributions.copied(subject, parts)
        return copied + [self._tell(subject, *contribution_of(chunk, part)) for part in parts]

    def _send_decided(self) -> list[Effect]:
        """Send all that is decided if it is to be sent as a whole: before chunks that may be made of it."""
        effects: list[Effect] = []
        if DECISIONS in self._dirty:
            del self._dirty[DECISIONS]
            effects += [self._tell(DECISIONS, message) for message in all_decided(self._deciding)]
        if CALLS in self._dirty:
            del self._dirty[CALLS]
            effects += [self._tell(CALLS, message) for message in settled(self._whole.known.items())]
            effects += [self._tell(CALLS, *each) for each in self.calls.pushes()]
        return effects

    def _tell(self, subject: Subject, message: News, payload: StoredSlots | None = None) -> Effect:
        message.number = self._acks.next(subject)
        if isinstance(message, m.CopyPush):
            self.calls.sent(message)
        elif isinstance(message, m.CopyContribution):
            self.contributions.sent(subject, message.rank, message.sequence, message.number)
        return Send(self.link.peer, message.number, message, payload)

    def _settings(self) -> m.CopySettings:
        head = (0, self._rules.saved(), self._codecs.saved(), self._catalog.numbered())
        return m.CopySettings(*head, self._catalog.next_bundle)

    def _say_ready(self, filling: Filling) -> list[Effect]:
        """Tell the scheduler that a standby has all."""
        filling.told = True
        index, name = self.link.index, filling.name
        text = f"{self._joiner.name}: {name} has a copy of all parameters of server {index}"
        return [Log("info", text), Send(SCHEDULER, 0, m.StandbyReady(index, name))]

    def _is_bound(self, chunk: Chunk) -> bool:
        """Tell whether pushes to a chunk count as parts of calls, and are copied as such."""
        view = self._joiner.view
        return chunk.policy.per_step or (view is not None and view.on_worker_loss == "shrink")

    def _bound(self) -> dict[tuple[Key, int], Chunk]:
        """The chunks to which pushes of lost workers count, which nobody sends again."""
        return {place: chunk for place, chunk in self._catalog.chunks.items() if self._is_bound(chunk)}

    def _drop(self, text: str) -> list[Effect]:
        index, entry = self.link.index, self.link.entry
        assert entry is not None, "there is one to be dropped"
        told = Send(SCHEDULER, 0, m.DropStandby(index, entry.name))
        return [Log("warning", text, "standby_dropped", {"server": index, "node": entry.name}), told]

    # --- the link ---

    def told(self, peer: Peer, request: int, message: m.Message, now: float) -> list[Effect]:
        """Take in what the standby says."""
        if peer != self.link.peer:
            return []
        if isinstance(message, m.FillAgain):
            self._fill_again(message.name)
            return []
        if not isinstance(message, m.Replicated):
            reason = message.message if isinstance(message, m.Error) else f"unexpected {type(message).__name__}"
            return [Disconnect(peer, reason), *self.link.lost(peer, reason, now)]
        if request == ATTACH_REQUEST and not self.link.is_up:
            return self._attached(message.number)
        return self._acknowledged(message.number)

    def _fill_again(self, name: str) -> None:
        """Begin to send all that there is once more: the standby hands it on to one of its own."""
        self._dirty.update(dict.fromkeys((SETTINGS, DECISIONS, CALLS)))
        totals = [(key, TOTALS) for key in self._norms.totalled]
        self._again = Filling(name, [*totals, *self._catalog.chunks])

    def _attached(self, number: int) -> list[Effect]:
        """Go on over a new link, behind what the standby has."""
        self.link.attached()
        effects = self._acknowledged(number)
        lacking = self._acks.take_lacking()
        self._dirty = {subject: None for subject in lacking if subject not in self._dirty} | self._dirty
        self.calls.send_again()
        self.contributions.send_again()
        self._again.attached(number)
        if self._filling.attached(number) and self._alone:
            # Who has gone on without it may have pushed what it does not have.
            effects += self._go_on_alone()
        return effects

    def _acknowledged(self, number: int) -> list[Effect]:
        """Take note of what the standby has, and let those answers and calls go for which all is there."""
        effects = self._acks.acknowledged(number)
        self.calls.acknowledged(self._acks.acked)
        self.contributions.acknowledged(self._acks.acked)
        return effects

    def link_lost(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Make another link to the standby."""
        return self.link.lost(peer, reason, now)

    def due(self, now: float) -> list[Effect]:
        """Tell the scheduler of a standby that can't be reached, until it says that it counts no more."""
        if not self.link.is_late(now):
            return []
        assert self.link.entry is not None, "there is a link to be made"
        name = self.link.entry.name
        return self._drop(f"{self._joiner.name} has no link to its standby {name}: {self.link.reason}")

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        self._acks.validate(waits=self.waits, unsent=bool(self._dirty))


CHANGES = frozenset((Install, InstallRows, Divide, Forget, Restore, Skip))
"""Effects on a chunk besides updates."""


def _is_answer(effect: Effect) -> bool:
    """Tell whether an effect says something to a worker, or to another server, that it may build upon."""
    if isinstance(effect, Send):
        return effect.peer >= 0 and type(effect.message) is not m.Waiting
    return isinstance(effect, Refuse)
