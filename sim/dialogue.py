"""What must hold of the messages of a run: who is asked has to answer, in time, and with what is true.

This sees what goes into the network and what comes out of it, and nothing of the state machines.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from aiokv.core.bundle import BUNDLE_START
from aiokv.core.effects import StoredChunk, StoredChunks
from aiokv.core.records import Record
from aiokv.core.session import MAX_OPEN_PUSHES
from aiokv.errors import CallTimeoutError, ProtocolError, from_code
from aiokv.policy import get_policy
from aiokv.wire import messages as m
from sim.faults import Pause
from sim.promises import rule_of
from sim.sections import SCHEDULER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiokv.core.effects import Payload
    from aiokv.types import Key, Peer, Version
    from sim.record import Run, Token, UpdateRecord

ROUNDING: Final = 1e-6
"""Seconds by which a deadline may be missed."""

Place = tuple["Key", int]
"""Key and first element of a chunk."""

Meeting = tuple[str, tuple[int, ...]]
"""Name and group of a barrier."""

Push = m.Push | m.PushBundle
Pull = m.Pull | m.PullBundle
# Messages are looked up in these by their type: `isinstance` takes long to say no, and all of them come here.
_PUSHES: Final = frozenset((m.Push, m.PushBundle))
_EXCHANGES: Final = _PUSHES | {m.Pull, m.PullBundle}
_MAKING: Final = frozenset((m.Init, m.InitBundle, m.SetPolicy, m.Switched))
_ASKED: Final = _EXCHANGES | _MAKING | {m.Attach, m.Barrier, m.Finish, m.Leave, m.PlanLeave, m.ReportLoss}
"""Messages that are to be answered."""

_ANSWERS: Final = frozenset((m.Done, m.Bundled, m.Value, m.Met, m.Error))

COUNTED: Final = ("alive", "away", "lost")
"""States of workers for which rounds and barriers wait."""


class Question(Record, eq=False):
    """A message that has arrived and is not answered yet."""

    asker: str
    message: m.Message
    due: float
    after_loss: bool
    """The node knew already that the worker was lost."""
    decided: float | None = None
    """When the answer was there, if it waits for a standby since then: how long is up to others."""


@dataclass(slots=True)
class Holdings:
    """What is known of a chunk from its updates."""

    version: Version = 0
    holds: dict[Token, Version] = field(default_factory=dict)
    """The version that holds a gradient."""


@dataclass(slots=True)
class Published:
    """The newest view that the scheduler has sent.

    `listeners` are the connections over which it has sent views, and which are there. `alone` says that there was none
    at some time since: other views may have been published for nobody.
    """

    view: m.View = field(default_factory=lambda: m.View(0, (), (), 1.0, 1, 1, 1.0))
    listeners: dict[Peer, None] = field(default_factory=dict)
    alone: bool = False


class Dialogue:
    """Looks at every message of a run when it is sent and when it arrives.

    - Who is asked answers once, before the time-out that the question names; and not earlier with a time-out error.
    - A push is answered when an update has been made of it, with a version that holds it; a pull with one that holds
      all that its worker had pushed before; unless the policy does not wait, or the answer says that it is dropped.
      No worker gets an older version after a newer one,.
    - What comes from a worker that a server knows to be lost is refused, and is in no update.
    - Epochs go up by one while somebody could hear of that, a view is the same for all, and nobody is lost who was
      heard within the death time-out.
    - A barrier lets nobody through before all members of its group are there.
    - No node finds fault with the protocol of another.

    Args:
        run: what is looked at.
        report: takes what does not hold, in sentences.
        chunks: what was made so far, by key and first element; somebody else keeps it.
    """

    def __init__(self, run: Run, report: Callable[[list[str]], None], chunks: Mapping[Place, Holdings]) -> None:
        scenario = run.scenario
        self._evicted = run.evicted
        self._since, self._until = run.since, run.until
        self._report = report
        self._chunks = chunks
        self._may_go_back = scenario.cluster.on_worker_loss == "respawn"
        """Whether a process may read what the one before in its place has read, after newer values."""
        self._makes_again = self._may_go_back and not all(get_policy(policy).in_step for policy in run.policies)
        """Whether a worker that is started again makes its last step again, from other values."""
        self._death = scenario.cluster.death_timeout
        self._stops: dict[str, float] = {}
        """Seconds in which a node is stopped, all together."""
        for fault in scenario.fault:
            for node in scenario.select(fault.node) if isinstance(fault, Pause) else ():
                assert isinstance(fault, Pause)
                self._stops[node] = self._stops.get(node, 0.0) + fault.times * fault.duration
        self._open: defaultdict[str, defaultdict[Peer, dict[int, Question]]] = defaultdict(_by_peer)
        """What a node has been asked, by who it is there and request."""
        self._waits = all(get_policy(policy).waits for policy in run.policies)
        rules = [rule_of(policy) for policy in run.policies]
        self._drops = None if None in rules else frozenset(drop for rule in rules if rule for drop in rule.drops)
        """Why pushes may be dropped, if that is known."""
        self._policy = ", then ".join(run.policies)
        self._servers = frozenset(scenario.servers)
        self._dropped: set[tuple[Place, Token]] = set()
        self._lost: dict[str, list[str]] = {}
        """Who is lost as far as a node knows."""
        self._published = Published()
        self._heard: dict[str, float] = {}
        self._closed: set[str] = set()
        self._late: set[tuple[Place, Token]] = set()
        """Pushes that arrived at a server after it knew that their worker was lost."""
        self._meeting: dict[Meeting, dict[str, None]] = {}
        """Who waits at a barrier."""
        self._opened: dict[Meeting, float] = {}
        """When a barrier was last opened."""
        self._released: dict[str, int] = {}
        """With which request a worker came to the last barrier that let it through."""
        self._bundles: dict[tuple[str, int], tuple[Key, ...]] = {}
        self._pushes: dict[tuple[str, str, int, Place], int] = {}
        """How many pushes a worker had sent before a pull, by worker, server, request and chunk."""
        self._sent: dict[tuple[str, Place], int] = {}
        # The first push of a worker's process.
        self._begun: dict[tuple[str, Place], int] = {}
        self._read: dict[tuple[str, Place], Version] = {}
        """The newest version that a worker was answered with."""
        self._asked: dict[tuple[str, str, int], list[Place]] = {}
        """What a worker wants values of, by worker, server and request."""
        self._known: dict[tuple[str, Place], Version] = {}
        """The newest version that has arrived at a worker."""
        self._computed: defaultdict[tuple[str, Place], dict[int, Version]] = defaultdict(dict)
        """The version that a worker had when it sent a push, for its newest ones."""
        self._calls: dict[str, dict[int, tuple[str, float]]] = {}

    # --- members ---

    def is_late(self, update: UpdateRecord, token: Token) -> bool:
        """Say whether a push of an update arrived when the server knew that its worker was lost."""
        return ((update.key, update.start), token) in self._late

    def is_dropped(self, place: Place, token: Token) -> bool:
        """Say whether a worker was told that its push is in no update of a chunk."""
        return (place, token) in self._dropped

    def computed_at(self, update: UpdateRecord, token: Token) -> Version | None:
        """Return the version that a worker had when it sent a push that is in an update; None if that was not seen."""
        name, number = token
        if self._makes_again:
            # It may have been computed twice, from other versions.
            return None
        return self._computed.get((name, (update.key, update.start)), {}).get(number)

    def is_given_up(self, worker: str) -> bool:
        """Say whether the others were told that a worker is lost, whether it has heard so itself or not."""
        return worker in _lost(self._published.view)

    def _is_lost(self, node: str, worker: str) -> bool:
        return worker in self._lost.get(node, ())

    # --- calls of users ---

    def called(self, node: str, call: int, what: str, timeout: float, now: float) -> None:
        """A node's user makes a call."""
        self._calls.setdefault(node, {})[call] = (what, now + timeout + self._stops.get(node, 0.0))

    def returned(self, node: str, call: int, now: float) -> None:
        """A call is over."""
        what, due = self._calls.get(node, {}).pop(call, ("", now))
        if now > due + ROUNDING:
            self._report([f"{node}: {what} took {now - due:g} s longer than it may"])

    # --- messages that leave ---

    def held(self, node: str, peer: Peer, request: int, now: float) -> None:
        """A node has an answer that waits until its standby has what it says."""
        question = self._open[node][peer].get(request)
        if question is not None:
            question.decided = now

    def unheard(self, node: str, peer: Peer, to: str, request: int, message: m.Message, now: float) -> None:
        """A node sends a message over a connection that the other side has closed: an answer is one all the same.

        And a view is published, although nobody hears of it by this.
        """
        if type(message) is m.View:
            self._view_sent(peer, message, now)
            return
        question = self._open[node][peer].get(request) if type(message) in _ANSWERS else None
        if question is not None and isinstance(question.message, m.Barrier):
            # The others are let through, too.
            self.sent(node, peer, to, request, message, None, now)
        elif question is not None:
            self._forget(node, {request: self._open[node][peer].pop(request)}, now)

    def sent(
        self, node: str, peer: Peer, to: str, request: int, message: m.Message, payload: Payload | None, now: float
    ) -> None:
        """A node sends a message to another, which it knows as `peer`."""
        kind = type(message)
        if kind in _EXCHANGES:
            self._exchange_sent(node, to, request, message)  # type: ignore[arg-type]
        elif kind in _ANSWERS:
            question = self._open[node][peer].pop(request, None)
            found = []
            if question is not None:
                now = now if question.decided is None else question.decided
                found = self._answer(node, question, request, message, payload, now)
            elif isinstance(message, (m.Done, m.Value, m.Met)) and not to.startswith("server"):
                found = [f"{type(message).__name__} answers nothing that is open"]
            if found:
                self._report([f"{node} to {to}: {text}" for text in found])
        elif type(message) is m.View and node == SCHEDULER:
            # What nodes tell a scheduler that is started again may be older than what the one before had sent last.
            self._view_sent(peer, message, now)

    def _exchange_sent(self, worker: str, server: str, request: int, message: Push | Pull) -> None:
        places = self._places(server, message)
        self._asked[worker, server, request] = places
        for place in places:
            if isinstance(message, (m.Push, m.PushBundle)):
                # One that is sent again, because its connection has ended, was computed when it was sent first.
                self._sent[worker, place] = max(message.sequence, self._sent.get((worker, place), 0))
                self._begun.setdefault((worker, place), message.sequence)
                newest = self._computed[worker, place]
                newest.setdefault(message.sequence, self._known.get((worker, place), 0))
                newest.pop(message.sequence - MAX_OPEN_PUSHES, None)
            else:
                self._pushes[worker, server, request, place] = self._sent.get((worker, place), 0)

    def _places(self, server: str, message: m.Message) -> list[Place]:
        if isinstance(message, (m.Push, m.Pull)):
            return [(message.key, message.start)]
        assert isinstance(message, m.PushBundle | m.PullBundle), "nothing else is about chunks"
        keys = self._bundles.get((server, message.bundle), ())
        return [(key, start) for key in keys for start in (BUNDLE_START, 0)]

    def _answer(
        self, node: str, question: Question, request: int, message: m.Message, payload: Payload | None, now: float
    ) -> list[str]:
        if type(message) is m.Error:
            asked = type(question.message).__name__
            if isinstance(question.message, m.Barrier):
                self._meeting[question.message.name, question.message.group].pop(question.asker, None)
            error = from_code(message.code, message.message, message.details)
            if isinstance(error, ProtocolError):
                return [f"refuses {asked}: {error}"]
            # A call whose time is over on one server is given up on all.
            by_itself = getattr(question.message, "whole", None) is None
            if (
                isinstance(error, CallTimeoutError)
                and by_itself
                and now < question.due - self._stops.get(node, 0.0) - ROUNDING
            ):
                return [f"gives {asked} up {question.due - now:g} s too early"]
            return []
        found = []
        if now > question.due + ROUNDING:
            found.append(f"answers {type(question.message).__name__} {now - question.due:g} s too late")
        match question.message:
            # The frequent ones come first.
            case m.Push() | m.PushBundle() as push:
                dropped = getattr(message, "dropped", "")
                found += self._pushed(node, question, push, payload, dropped)
            case m.Pull() | m.PullBundle() as pull:
                found += self._pulled(node, question.asker, request, pull, payload)
            case m.Barrier() as barrier:
                found += self._released_too_early(barrier, question.asker, request, now)
            case m.InitBundle(keys=keys) if isinstance(message, m.Bundled):
                self._bundles[node, message.bundle] = keys
        return found

    def _pushed(self, server: str, question: Question, push: Push, payload: Payload | None, dropped: str) -> list[str]:
        token = (question.asker, push.sequence)
        if question.after_loss:
            return [f"push {push.sequence} is accepted, although the worker is known to be lost"]
        places = self._places(server, push)
        held = False
        for place in places:
            held = held or token in self._holdings(place).holds
        if dropped:
            self._dropped.update((place, token) for place in places)
            return self._on_dropped(push, dropped, held=held) + self._got(question.asker, payload, {})
        found = self._got(question.asker, payload, dict.fromkeys(places, push.sequence))
        if not held and self._waits:
            found.append(f"push {push.sequence} of key {places[0][0]!r} is answered, but is in no version")
        return found

    def _on_dropped(self, push: Push, reason: str, *, held: bool) -> list[str]:
        found = []
        if self._drops is not None and reason not in self._drops:
            found.append(f"push {push.sequence} is dropped as {reason}, which {self._policy} does not do")
        if held:
            found.append(f"push {push.sequence} is dropped as {reason}, but was applied")
        return found

    def _pulled(self, server: str, worker: str, request: int, pull: Pull, payload: Payload | None) -> list[str]:
        places = self._places(server, pull)
        pushed = {place: self._pushes.pop((worker, server, request, place), 0) for place in places}
        return self._got(worker, payload, pushed)

    def _got(self, worker: str, payload: Payload | None, pushed: Mapping[Place, int]) -> list[str]:
        """Look at the versions that a worker is answered with, and at what it has pushed to each chunk before."""
        found = []
        for part in payload.chunks if type(payload) is StoredChunks else [payload]:
            if type(part) is not StoredChunk:
                continue
            place, version = (part.key, part.start), part.version
            holdings = self._holdings(place)
            wrong = []
            if version > holdings.version:
                wrong.append(", but not made")
            if version < self._read.get((worker, place), 0) and not self._may_go_back:
                wrong.append(f" after {self._read[worker, place]}")
            self._read[worker, place] = version
            number = pushed.get(place, 0) if self._waits else 0
            while self._dropped and (place, (worker, number)) in self._dropped:
                number -= 1
            if number < self._begun.get((worker, place), 0):
                # Of what a process before has pushed it may have been dropped without anybody to be told so.
                number = 0
            if number and holdings.holds.get((worker, number), version + 1) > version:
                wrong.append(f", which does not hold its push {number}")
            found += [f"key {part.key!r} from element {part.start}: version {version} is sent{text}" for text in wrong]
        return found

    def _holdings(self, place: Place) -> Holdings:
        return self._chunks.get(place) or Holdings()

    def _released_too_early(self, barrier: m.Barrier, asker: str, request: int, now: float) -> list[str]:
        meeting = (barrier.name, barrier.group)
        here, opened = self._meeting[meeting], self._opened.get(meeting)
        if self._released.get(asker) == request:
            # It asks again, because its connection had ended when it was let through.
            here.pop(asker, None)
            return []
        self._released[asker] = request
        self._opened[meeting] = now
        absent = []
        if opened != now:
            # This is the first one who is let through.
            members = [entry for entry in self._published.view.workers if entry.state in COUNTED]
            members = [entry for entry in members if not barrier.group or entry.rank in barrier.group]
            absent = [entry.name for entry in members if entry.name not in here]
        here.pop(asker, None)
        return [f"the barrier {barrier.name!r} opens without {', '.join(absent)}"] if absent else []

    def _view_sent(self, peer: Peer, view: m.View, now: float) -> None:
        published = self._published
        published.listeners[peer] = None
        before = published.view
        if view.epoch == before.epoch:
            if view is not before and view != before:
                self._report([f"two views of epoch {view.epoch}"])
            return
        if view.epoch != before.epoch + 1 and not (published.alone and view.epoch > before.epoch):
            self._report([f"epoch {view.epoch} follows epoch {before.epoch}"])
        published.view, published.alone = view, False
        for entry in view.workers:
            if entry.until:
                self._until[entry.name] = entry.until
            joined = self._since.setdefault(entry.name, []) if entry.since else []
            if entry.since and entry.since not in joined:
                joined.append(entry.since)
            elif entry.state == "joining" and not entry.since:
                # Nothing came of it: the scheduler was started again.
                self._since.pop(entry.name, None)
            if entry.state == "evicted":
                self._evicted.setdefault(entry.name, now)
            elif entry.state == "alive" and entry.name in self._evicted:
                # It has joined again.
                del self._evicted[entry.name]
        given_up = [entry.name for entry in before.workers if entry.state in {"joining", "away"}]
        for name in [name for name in _lost(view) if name not in given_up]:
            # A standby is lost with its process.
            nodes = {name, name.partition("/")[0]}
            silent = now - min(self._heard.get(node, 0.0) for node in nodes)
            ended = not nodes.isdisjoint(self._closed)
            if name not in _lost(before) and not ended and silent < self._death - ROUNDING:
                self._report([f"{name} is called lost, but was heard {silent:g} s before"])

    # --- messages that arrive ---

    def arrived(self, node: str, peer: Peer, source: str, request: int, message: m.Message, now: float) -> None:
        """A message has come to a node from another, which it knows as `peer`."""
        if node == SCHEDULER:
            self._heard[source] = now
        kind = type(message)
        if kind in _ASKED:
            # How long it takes to plan depends on how long the steps of the others take.
            timeout = getattr(message, "timeout", math.inf if kind is m.PlanLeave else 0.0)
            lost = bool(self._lost) and kind in _PUSHES and self._is_lost(node, source)
            if lost:
                assert isinstance(message, Push)
                self._late.update((place, (source, message.sequence)) for place in self._places(node, message))
            due = now + timeout + self._stops.get(node, 0.0)
            if getattr(message, "whole", None) is not None:
                # Another server is asked whether its call counts, and has so long to answer.
                due += self._death
            self._open[node][peer][request] = Question(source, message, due, lost)
            # Types are not looked at by `isinstance`, which takes five times as long to say no.
            if type(message) is m.Barrier:
                self._meeting.setdefault((message.name, message.group), {})[source] = None
        elif kind in _ANSWERS:
            for place in self._asked.pop((node, source, request), ()):
                if isinstance(message, m.Value):
                    self._known[node, place] = max(message.version, self._known.get((node, place), 0))
        elif type(message) is m.CopySettings:
            self._bundles.update(((node, number), keys) for number, keys in message.bundles)
        elif type(message) is m.View and node in self._servers:
            # Not those of the workers: of thousands, looking at all of their views would take longer than the run.
            self._lost.pop(node, None)
            if gone := _lost(message):
                self._lost[node] = gone

    def closed(self, node: str, peer: Peer, source: str, now: float, *, by_itself: bool = False) -> None:
        """A connection of a node is over: nothing that came over it is to be answered any longer."""
        if node == SCHEDULER:
            self._published.listeners.pop(peer, None)
            self._published.alone |= not self._published.listeners
            if not by_itself:
                self._closed.add(source)
        self._forget(node, self._open[node].pop(peer, {}), now)

    def ended(self, node: str, now: float) -> None:
        """A node is no more."""
        self._released.pop(node, None)
        if node == SCHEDULER:
            # One that is started again has heard nobody yet.
            self._closed.update(self._heard)
            self._published.listeners.clear()
            self._published.alone = True
        for name in [name for name in self._sent if name[0] == node]:
            # What was under way need not have arrived.
            del self._sent[name], self._begun[name]
        for questions in self._open.pop(node, {}).values():
            self._forget(node, questions, now)
        late = [what for what, due in self._calls.pop(node, {}).values() if now > due + ROUNDING]
        self._report([f"{node}: {what} did not end in time" for what in late])

    def _forget(self, node: str, questions: dict[int, Question], now: float) -> None:
        for question in questions.values():
            if isinstance(question.message, m.Barrier):
                self._meeting[question.message.name, question.message.group].pop(question.asker, None)
            if question.decided is None and now > question.due + ROUNDING:
                self._report([f"{node} to {question.asker}: {type(question.message).__name__} was never answered"])

    def finish(self, now: float) -> None:
        """The run is over: nothing may be open whose time has passed."""
        for node in list(dict.fromkeys((*self._open, *self._calls))):
            self.ended(node, now)


def _by_peer() -> defaultdict[Peer, dict[int, Question]]:
    return defaultdict(dict)


def _lost(view: m.View) -> list[str]:
    workers = [entry.name for entry in view.workers if entry.state in {"lost", "evicted"}]
    return workers + [entry.name for entry in view.servers if entry.state == "lost"]
