"""How a server keeps a copy of what it has on its standby, and answers nobody before that is there.

The server sends the sum of an update before it makes it; the standby does the same with it, so that both have the same
bits. Whatever else happens to a chunk, all of it is sent again, when no update of it is under way. Messages have
numbers, and the standby says up to which one it has them. When the link ends, what the standby does not have is sent
as a whole over the next one: what it has of that meanwhile is older, but of what is newer nobody has had an answer.

So an answer waits until the standby has all that was sent before it. Only when the scheduler has said that there is no
standby, or that it is another one, may the server answer alone; the new one is then filled while rounds go on, and
answers wait for it from when it has everything.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from aiokv.core.bundle import BUNDLE_START
from aiokv.core.draining import Draining
from aiokv.core.effects import (
    Apply,
    ApplyRows,
    Connect,
    Disconnect,
    Divide,
    Effect,
    Forget,
    Hold,
    Install,
    InstallRows,
    LetGo,
    Log,
    Refuse,
    Restore,
    Send,
    Skip,
    StoredCopy,
    StoredSlots,
    StoredSum,
)
from aiokv.core.followed_calls import called, pushes_of, settled
from aiokv.core.followed_rounds import all_decided, decided
from aiokv.core.joiner import retry_delay
from aiokv.types import SCHEDULER, STANDBY
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.catalog import Catalog
    from aiokv.core.chunk import Chunk
    from aiokv.core.compression import Codecs
    from aiokv.core.decisions import Deciding, Decisions
    from aiokv.core.effects import Payload
    from aiokv.core.joiner import Joiner
    from aiokv.core.norms import Norms, Total
    from aiokv.core.open_rounds import Dropped
    from aiokv.core.resuming import Resuming
    from aiokv.core.rules import Rules
    from aiokv.core.whole_calls import CallName, WholeCall, WholeCalls
    from aiokv.optim import Optimizer
    from aiokv.policy import Token
    from aiokv.types import Key, Peer, Rank

ATTACH_REQUEST = 1
"""Request id of the one `AttachStandby` of a link."""

MOST_COPIES = 8
"""How many chunks may be on their way as a whole: a server does not send all that it has at once."""

LOOKED_AT = 64
"""How many chunks that are to be sent are looked at each time; some may be in the middle of an update."""

Subject = tuple["Key", int]
"""What is copied: a chunk, by key and first element, or one of the following."""

GONE = -2
"""In the place of a first element: the key is no more."""

TOTALS = -4
"""The same: totals of the key, which this server has added up for others too."""

SETTINGS: Subject = ("", -3)
"""All that is not in chunks, besides the following."""

DECISIONS: Subject = ("", -5)
"""What was decided about workers' steps."""

CALLS: Subject = ("", -6)
"""Pushes of calls that count as a whole, and what was decided about these."""

News = m.CopyDecisions | m.CopyDropped | m.CopySettled | m.CopyPush


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
        on_host: whether values are in the host's memory, from which alone they can be copied.
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
        on_host: bool,
    ) -> None:
        self._joiner = joiner
        self._catalog = catalog
        self._rules = rules
        self._codecs = codecs
        self._resuming = resuming
        self._norms = norms
        self._deciding = deciding
        self._whole = whole
        self._calls: dict[CallName, tuple[WholeCall, int | None]] = {}
        """Those that wait until their pushes are there, by which message; None: it is not sent yet."""
        self.there: list[WholeCall] = []
        """Those that wait no longer; the owner takes them out."""
        self._draining = Draining()
        self._news: list[tuple[Subject, News, StoredSlots | None]] = []
        """What the standby has to know before anything that follows."""
        self._new_totals: list[tuple[Key, Total]] = []
        """As above."""
        self._entry: m.StandbyEntry | None = None
        self._index = 0
        self._alone = alone
        self._on_host = on_host
        self.waits = not alone
        """Whether answers wait for the standby."""
        self._dirty: dict[Subject, None] = {}
        """What the standby does not have as it is, and gets as a whole."""
        self._last = 0
        """Number of the last message."""
        self._acked = 0
        """Up to which the standby has them."""
        self._sent: deque[tuple[int, Subject, bool]] = deque()
        """What the messages were about that it does not have yet, and whether they had all of a chunk."""
        self._copies = 0
        """How many of them had."""
        self._held: deque[tuple[int | None, int]] = deque()
        """For how many answers, in their order, which message is waited for; None: for what is not sent yet."""
        self._known = -1
        """How often the settings had changed when they were looked at last."""
        self._peer = STANDBY
        """The link, a new number for each: of an earlier one nothing counts any longer."""
        self._linked = False
        self._connecting = False
        self._attempt = 0
        self._reason = "no answer yet"
        self._give_up_at: float | None = None
        self._filled = 0
        """The last message of the filling; 0: it is not all sent yet."""
        self._refused = False
        """Whether there can be no copy."""
        self._told = False
        """Whether the scheduler knows that the standby is ready."""

    @property
    def _timeout(self) -> float:
        assert self._joiner.view is not None, "there is a standby in it"
        return self._joiner.view.death_timeout

    # --- the view ---

    def viewed(self, entry: m.ServerEntry, now: float) -> list[Effect]:
        """Take over what a newer view says of the standby."""
        known, new = self._entry, entry.standby
        self._entry, self._index = new, entry.index
        effects: list[Effect] = []
        if known is None or new is None or not _is_same(known, new):
            effects = self._begin_anew(alone=self._alone if known is None else True)
        if new is None:
            return effects
        if new.state == "ready":
            self._told = self.waits = True
        elif self._told:
            # The scheduler may have been started again before it heard that.
            effects.append(Send(SCHEDULER, 0, m.StandbyReady(self._index, new.name)))
        if not self._on_host:
            return effects + self._refuse("its values are on devices")
        if new.port and not self._linked and not self._connecting and self._give_up_at is None:
            self._give_up_at = now + self._timeout
            effects += self._connect()
        return effects

    def _begin_anew(self, *, alone: bool) -> list[Effect]:
        """Go on with a standby that has nothing yet, or without one."""
        effects = self._unlink("it is not the standby any longer") if self._linked or self._connecting else []
        self._sent.clear()
        self._copies = self._attempt = self._filled = 0
        totals = [(key, TOTALS) for key in self._norms.totalled]
        self._dirty = {SETTINGS: None, DECISIONS: None, CALLS: None} | dict.fromkeys([*totals, *self._catalog.chunks])
        self._new_totals, self._news = [], []
        self._acked, self._give_up_at, self._told, self.waits = self._last, None, False, not alone
        self._refused = False
        return effects + self._let_all_go() if alone else effects

    def _let_all_go(self) -> list[Effect]:
        self.there += [call for call, _ in self._calls.values()]
        self._calls.clear()
        count = sum(count for _, count in self._held)
        self._held.clear()
        return [LetGo(count)] if count else []

    # --- what is to be told ---

    def renew(self, chunk: Chunk) -> None:
        """Take note that something has changed a chunk of which nothing is seen in effects."""
        self._dirty[chunk.key, chunk.start] = None

    def totalled(self, key: Key, total: Total) -> None:
        """Take note that there are new totals of a key."""
        if self._linked and (key, TOTALS) not in self._dirty:
            self._new_totals.append((key, total))
        else:
            self._dirty[key, TOTALS] = None

    def decided(self, decisions: Decisions, tokens: list[Token]) -> None:
        """Take note that steps are decided."""
        if self._linked and DECISIONS not in self._dirty:
            self._news.append((DECISIONS, decided(decisions, tokens), None))
        else:
            self._dirty[DECISIONS] = None

    def dropped(self, chunk: Chunk, dropped: Dropped) -> None:
        """Take note that a push is in no round of a chunk."""
        subject, part = (chunk.key, chunk.start), dropped.contribution
        if self._linked and subject not in self._dirty:
            head = (0, *subject, part.rank, part.sequence, part.clock)
            self._news.append((subject, m.CopyDropped(*head, dropped.waiter.dropped), None))
        else:
            self._dirty[subject] = None

    def copy(self, call: WholeCall) -> bool:
        """Send the pushes of a call that is here; tell whether that has to be waited for."""
        if not self.waits:
            return False
        self._calls[call.name] = (call, None)
        if self._linked and CALLS not in self._dirty:
            self._news += [(CALLS, message, payload) for message, payload in pushes_of(call)]
        else:
            self._dirty[CALLS] = None
        return True

    def settled(self, name: CallName, verdict: str) -> None:
        """Take note that it was decided whether a call counts."""
        if self._linked and CALLS not in self._dirty:
            self._news.append((CALLS, m.CopySettled(0, ((*name, verdict),)), None))
        else:
            self._dirty[CALLS] = None

    def watch(self, effects: list[Effect]) -> list[Effect]:
        """Add what the standby is to be told of effects, and hold back the answers that have to wait for that."""
        # Before the updates that are made with them.
        wanted: list[Effect] = [self._totals(key, [total]) for key, total in self._new_totals]
        self._new_totals = []
        news, self._news = self._news, []
        wanted += [self._tell(*each) for each in news]
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
        if self._dirty and self._linked and not self._resuming.is_busy:
            wanted += self._send_dirty()
        if not self._told:
            wanted += self._tell_ready()
        if answers and self.waits and (self._dirty or self._acked < self._last or self._held):
            self._held.append((None if self._dirty else self._last, answers))
            return [Hold(effect) if _is_answer(effect) else effect for effect in wanted]  # type: ignore[arg-type]
        return wanted

    def _note(self, effect: Effect) -> None:
        """Take note of what has become of a chunk besides updates."""
        match effect:
            case Divide(key, start, parts):
                self._dirty.pop((key, start), None)
                self._dirty.update(((part, 0), None) for part, _ in parts)
            case Forget(key, start):
                self._dirty.pop((key, start), None)
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
        if not self._linked or not _can_follow(chunk, apply.rule):
            self._dirty[subject] = None
            return []
        update = chunk.updates[apply.version]
        ordered = [update.contributions[place] for place in update.folded]
        parts = tuple([(part.rank, part.sequence, part.read_version, part.clock) for part in ordered])
        norms = tuple([tuple(phase) for phase in apply.norms])
        # To compute norms, the sum was divided.
        divisor = 1 if norms else apply.divisor
        number = self._next(subject)
        head = (number, apply.key, apply.start, apply.version, parts, apply.clock, divisor)
        message = m.Replicate(*head, norms, apply.keep)
        if chunk.rounds is not None:
            # Nothing is done with the next round as long as this one is being made.
            message.round = chunk.rounds.first - 1
        payload: Payload | None = None if apply.slot is None else StoredSum(apply.slot, chunk.nbytes)
        if isinstance(effect, ApplyRows) and effect.slots:
            message.lengths, message.factors = tuple(effect.nbytes), tuple(effect.factors)
            payload = StoredSlots(list(effect.slots), sum(effect.nbytes))
        return [Send(self._peer, number, message, payload)]

    def _next(self, subject: Subject, *, whole: bool = False) -> int:
        self._last += 1
        self._copies += whole
        self._sent.append((self._last, subject, whole))
        return self._last

    def _send_dirty(self) -> list[Effect]:
        """Send what is to be sent as a whole, as far as it can be and may be."""
        effects = self._send_decided()
        for subject in list(islice(self._dirty, LOOKED_AT)):
            if self._copies >= MOST_COPIES:
                break
            key, start = subject
            chunk = self._catalog.chunks.get(subject)
            if chunk is not None and _is_changing(chunk):
                continue
            if chunk is not None and not chunk.policy.waits:
                effects += self._refuse(f"policy {chunk.policy} answers pushes before they are in a value")
                continue
            del self._dirty[subject]
            if subject == SETTINGS:
                effects.append(self._settings())
            elif start == GONE:
                number = self._next(subject)
                effects.append(Send(self._peer, number, m.ForgetKey(number, key)))
            elif start == TOTALS:
                effects.append(self._totals(key, self._norms.remembered(key)))
            elif chunk is not None:
                effects.append(self._copy(chunk))
        if not self._dirty:
            self._held = deque((self._last if need is None else need, count) for need, count in self._held)
            if not self._filled:
                self._filled, self.waits = self._last, True
                self._draining = Draining(self._whole.asked_about)
        return effects

    def _send_decided(self) -> list[Effect]:
        """Send all that is decided if it is to be sent as a whole: before chunks that may be made of it."""
        effects: list[Effect] = []
        if DECISIONS in self._dirty:
            del self._dirty[DECISIONS]
            effects += [self._tell(DECISIONS, message) for message in all_decided(self._deciding)]
        if CALLS in self._dirty:
            del self._dirty[CALLS]
            effects += [self._tell(CALLS, message) for message in settled(self._whole.known.items())]
            for call, _ in list(self._calls.values()):
                effects += [self._tell(CALLS, *each) for each in pushes_of(call)]
        return effects

    def _totals(self, key: Key, totals: list[Total]) -> Effect:
        number = self._next((key, TOTALS))
        return Send(self._peer, number, m.CopyTotals(number, key, tuple(totals)))

    def _tell(self, subject: Subject, message: News, payload: StoredSlots | None = None) -> Effect:
        message.number = self._next(subject)
        if isinstance(message, m.CopyPush):
            name = called(message)
            self._calls[name] = (self._calls[name][0], message.number)
        return Send(self._peer, message.number, message, payload)

    def _settings(self) -> Effect:
        number, catalog = self._next(SETTINGS), self._catalog
        head = (number, self._rules.saved(), self._codecs.saved(), catalog.numbered())
        return Send(self._peer, number, m.CopySettings(*head, catalog.next_bundle))

    def _copy(self, chunk: Chunk) -> Effect:
        number = self._next((chunk.key, chunk.start), whole=True)
        bundle = self._catalog.bundle_of(chunk.key) if chunk.start == BUNDLE_START else None
        keys, specs = ((chunk.key,), (chunk.spec,)) if bundle is None else (bundle.keys, bundle.specs)
        entries = [entry for key in keys if (entry := self._catalog.entry(key)) is not None]
        digests = tuple(entry.digest for entry in entries)
        shapes = tuple(spec.shape for spec in specs)
        counts = tuple(_count_of(chunk, rank, count) for rank, count in sorted(chunk.reflected.items()))
        head = (number, keys, shapes, digests, chunk.spec.dtype, chunk.start, chunk.stop, entries[0].policy)
        message = m.Copy(*head, chunk.group, chunk.version, chunk.since, counts)
        if chunk.rounds is not None:
            # It may be about to make the round before that, and is copied as it is before.
            message.first = chunk.rounds.first - chunk.applying
            message.before = tuple([last for version, last in chunk.rounds.until.items() if version < chunk.version])
        if chunk.former is not None:
            message.former = chunk.former.group[0]
        rows = entries[0].rows
        if rows is not None:
            message.sparse, message.lazy = True, rows.lazy
            message.initializer = msgspec.to_builtins(rows.initializer)
        return Send(self._peer, number, message, StoredCopy(chunk.key, chunk.start, chunk.version, chunk.nbytes))

    def _tell_ready(self) -> list[Effect]:
        """Tell the scheduler when the standby has all that was there when answers began to wait for it."""
        if not self._filled or self._acked < self._filled or self._entry is None:
            return []
        view = self._joiner.view
        if view is not None and view.on_worker_loss == "shrink" and not self._draining.is_over(self._catalog.chunks):
            return []
        self._told = True
        text = f"{self._joiner.name}: {self._entry.name} has a copy of all parameters of server {self._index}"
        return [Log("info", text), Send(SCHEDULER, 0, m.StandbyReady(self._index, self._entry.name))]

    def _refuse(self, reason: str) -> list[Effect]:
        """Tell the scheduler that there can't be a copy; what waits does so until it says that there is none."""
        if self._refused:
            return []
        self._refused = True
        return self._drop(f"{self._joiner.name} can have no standby: {reason}")

    def _drop(self, text: str) -> list[Effect]:
        assert self._entry is not None, "there is one to be dropped"
        told = Send(SCHEDULER, 0, m.DropStandby(self._index, self._entry.name))
        return [Log("warning", text, "standby_dropped", {"server": self._index, "node": self._entry.name}), told]

    # --- the link ---

    def _connect(self) -> list[Effect]:
        assert self._entry is not None, "it has an address"
        self._connecting = True
        self._peer -= 1
        delay = retry_delay(self._attempt) if self._attempt else 0.0
        return [Connect(self._peer, self._entry.host, self._entry.port, delay)]

    def connected(self, peer: Peer) -> list[Effect]:
        """Say who this server is, over a link that is open now."""
        view = self._joiner.view
        if peer != self._peer or not self._connecting or view is None:
            return [Disconnect(peer, "nobody waits for this connection any longer")]
        me = (self._index, self._joiner.name, self._joiner.incarnation)
        return [Send(self._peer, ATTACH_REQUEST, m.AttachStandby(*me, view.epoch, self._timeout))]

    def connect_failed(self, peer: Peer, reason: str) -> list[Effect]:
        """Try again, later and later, until `due` gives up."""
        if peer != self._peer or not self._connecting:
            return []
        self._reason = reason
        self._attempt += 1
        return self._connect()

    def received(self, peer: Peer, request: int, message: m.Message, now: float) -> list[Effect]:
        """Take in what the standby says."""
        if peer != self._peer:
            return []
        if not isinstance(message, m.Replicated):
            reason = message.message if isinstance(message, m.Error) else f"unexpected {type(message).__name__}"
            return [Disconnect(peer, reason), *self.lost(peer, reason, now)]
        if request == ATTACH_REQUEST and not self._linked:
            return self._attached(message.number)
        return self._acknowledged(message.number)

    def _attached(self, number: int) -> list[Effect]:
        """Go on over a new link, behind what the standby has."""
        self._linked, self._connecting, self._attempt, self._give_up_at = True, False, 0, None
        effects = self._acknowledged(number)
        lacking: dict[Subject, None] = {}
        for _, subject, _ in self._sent:
            # In the order of the last ones: a key may have been deleted and made again.
            lacking.pop(subject, None)
            lacking[subject] = None
        self._dirty = {subject: None for subject in lacking if subject not in self._dirty} | self._dirty
        self._sent.clear()
        self._copies = 0
        self._held = deque((None, count) for _, count in self._held)
        self._calls = {name: (call, None) for name, (call, _) in self._calls.items()}
        if self._filled > number:
            self._filled = 0
        return effects

    def _acknowledged(self, number: int) -> list[Effect]:
        """Take note of what the standby has."""
        self._acked = max(self._acked, number)
        while self._sent and self._sent[0][0] <= number:
            _, _, whole = self._sent.popleft()
            self._copies -= whole
        return self._let_go()

    def _let_go(self) -> list[Effect]:
        """Let those answers go for which all is there, and those calls."""
        for name, (call, need) in list(self._calls.items()):
            if need is not None and need <= self._acked:
                del self._calls[name]
                self.there.append(call)
        free = 0
        while self._held:
            need, count = self._held[0]
            if need is None or need > self._acked:
                break
            free += count
            self._held.popleft()
        return [LetGo(free)] if free else []

    def lost(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Make another link, if it is this one that has ended."""
        if peer != self._peer or not (self._linked or self._connecting):
            return []
        self._linked, self._reason = False, reason
        if self._give_up_at is None:
            self._give_up_at = now + self._timeout
        self._attempt += 1
        return self._connect()

    def _unlink(self, reason: str) -> list[Effect]:
        self._linked = self._connecting = False
        return [Disconnect(self._peer, reason)]

    def deadline(self) -> float | None:
        """Return the time at which `due` wants to be called."""
        return self._give_up_at

    def due(self, now: float) -> list[Effect]:
        """Tell the scheduler of a standby that can't be reached, until it says that it counts no more."""
        if self._give_up_at is None or now < self._give_up_at:
            return []
        assert self._entry is not None, "there is a link to be made"
        self._give_up_at = now + self._timeout
        return self._drop(f"{self._joiner.name} has no link to its standby {self._entry.name}: {self._reason}")

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        needs = [need for need, _ in self._held]
        known = [need for need in needs if need is not None]
        assert known == sorted(known)
        assert needs[: len(known)] == known, "what is not sent yet comes last"
        assert all(need > self._acked for need in known), "what all is there for has gone"
        assert not self._held or self.waits
        assert len(known) == len(needs) or self._dirty


CHANGES = frozenset((Install, InstallRows, Divide, Forget, Restore, Skip))
"""Effects on a chunk besides updates."""


def _is_changing(chunk: Chunk) -> bool:
    """Tell whether a chunk can't be copied as it is now."""
    return chunk.is_busy or (chunk.rounds is not None and not chunk.rounds.is_in_order(chunk))


def _count_of(chunk: Chunk, rank: Rank, count: int) -> m.RankCount:
    """Return what a chunk knows of a rank."""
    head = (rank, count, chunk.before.get(rank, 0))
    if chunk.rounds is None:
        return m.RankCount(*head, chunk.clocks.get(rank, count))
    return m.RankCount(*head, chunk.rounds.passed.get(rank, 0), chunk.rounds.made.get(rank, 0))


def _is_same(one: m.StandbyEntry, other: m.StandbyEntry) -> bool:
    """Tell whether two entries are of one process, which need not have registered by the first."""
    return one.name == other.name and one.incarnation in (0, other.incarnation)


def _is_answer(effect: Effect) -> bool:
    """Tell whether an effect says something to a worker, or to another server, that it may build upon."""
    if isinstance(effect, Send):
        return effect.peer >= 0 and type(effect.message) is not m.Waiting
    return isinstance(effect, Refuse)


def _can_follow(chunk: Chunk, rule: Optimizer) -> bool:
    """Tell whether the sum of an update is enough to make it elsewhere.

    Of a sum of integers that does not fit nothing is seen in its bytes, and some rules look at earlier values.
    """
    return "float" in chunk.spec.dtype and not rule.reads_weight
