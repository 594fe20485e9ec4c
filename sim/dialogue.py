"""What must hold of the messages of a run: who is asked has to answer, in time, and with what is true.

This sees what goes into the network and what comes out of it, and nothing of the state machines.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from aiokv.core.records import Record
from aiokv.errors import CallTimeoutError, ProtocolError, from_code
from aiokv.wire import messages as m
from sim.faults import Pause
from sim.readings import EXCHANGES, PUSHES, Push, Readings
from sim.sections import SCHEDULER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiokv.core.effects import Payload
    from aiokv.types import Peer
    from sim.readings import Holdings, Place
    from sim.record import Run

ROUNDING: Final = 1e-6
"""Seconds by which a deadline may be missed."""

Meeting = tuple[str, tuple[int, ...]]
"""Name and group of a barrier."""

# Messages are looked up in these by their type: `isinstance` takes long to say no, and all of them come here.
_MAKING: Final = frozenset((m.Init, m.InitBundle, m.SetPolicy, m.Switched))
_ASKED: Final = EXCHANGES | _MAKING | {m.Attach, m.Barrier, m.Finish, m.Leave, m.PlanLeave, m.ReportLoss}
"""Messages that are to be answered."""

_TIMED: Final = frozenset(kind for kind in _ASKED if "timeout" in kind.__struct_fields__)
"""Those that say until when."""

_WHOLE: Final = frozenset(kind for kind in _ASKED if "whole" in kind.__struct_fields__)
"""Those that may be part of a call which counts as a whole."""

_ANSWERS: Final = frozenset((m.Done, m.Bundled, m.Value, m.Met, m.Error))

COUNTED: Final = ("alive", "away", "lost")
"""States of workers for which rounds and barriers wait."""


class Question(Record, eq=False, gc=False):
    """A message that has arrived and is not answered yet."""

    asker: str
    message: m.Message
    due: float
    after_loss: bool
    """The node knew already that the worker was lost."""
    decided: float | None = None
    """When the answer was there, if it waits for a standby since then: how long is up to others."""


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
      heard within the death time-out. Only when no node is left that has a view another cluster may begin.
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
        self.readings = Readings(run, chunks)
        """Looks at pushes and pulls."""
        self._death = scenario.cluster.death_timeout
        self._stops: dict[str, float] = {}
        """Seconds in which a node is stopped, all together."""
        for fault in scenario.fault:
            for node in scenario.select(fault.node) if isinstance(fault, Pause) else ():
                assert isinstance(fault, Pause)
                self._stops[node] = self._stops.get(node, 0.0) + fault.times * fault.duration
        self._open: defaultdict[str, defaultdict[Peer, dict[int, Question]]] = defaultdict(_by_peer)
        """What a node has been asked, by who it is there and request."""
        self._servers = frozenset(scenario.servers)
        self._lost: dict[str, list[str]] = {}
        """Who is lost as far as a node knows."""
        self._published = Published()
        self._back: dict[str, None] = {}
        """Nodes of the cluster that are connected to a scheduler that was started again."""
        self.on_another: Callable[[], None] = lambda: None
        """Is told when another cluster begins, of which the views so far say nothing."""
        self._heard: dict[str, float] = {}
        self._closed: set[str] = set()
        self._meeting: dict[Meeting, dict[str, None]] = {}
        """Who waits at a barrier."""
        self._opened: dict[Meeting, float] = {}
        """When a barrier was last opened."""
        self._released: dict[str, int] = {}
        """With which request a worker came to the last barrier that let it through."""
        self._calls: defaultdict[str, dict[int, tuple[str, float]]] = defaultdict(dict)
        """What a node's user has asked for, and until when."""

    # --- members ---

    def is_given_up(self, worker: str) -> bool:
        """Say whether the others were told that a worker is lost, whether it has heard so itself or not."""
        return worker in _lost(self._published.view)

    def _is_lost(self, node: str, worker: str) -> bool:
        return worker in self._lost.get(node, ())

    # --- calls of users ---

    def called(self, node: str, call: int, what: str, timeout: float, now: float) -> None:
        """A node's user makes a call."""
        self._calls[node][call] = (what, now + timeout + self._stops.get(node, 0.0))

    def returned(self, node: str, call: int, now: float) -> None:
        """A call is over."""
        what, due = self._calls[node].pop(call, ("", now))
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
        if kind in EXCHANGES:
            self.readings.sent(node, to, request, message)  # type: ignore[arg-type]
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
                if question.after_loss:
                    return [*found, f"push {push.sequence} is accepted, although the worker is known to be lost"]
                dropped = getattr(message, "dropped", "")
                found += self.readings.pushed(node, question.asker, push, payload, dropped)
            case m.Pull() | m.PullBundle() as pull:
                found += self.readings.pulled(node, question.asker, request, pull, payload)
            case m.Barrier() as barrier:
                found += self._released_too_early(barrier, question.asker, request, now)
            case m.InitBundle(keys=keys) if isinstance(message, m.Bundled):
                self.readings.bundles[node, message.bundle] = keys
        return found

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
        if view is before or view == before:
            return
        if before.epoch and view.founder != before.founder:
            published.view, published.alone = view, False
            if self._back:
                self._report([f"another cluster begins although {', '.join(self._back)} came back to go on"])
            self.on_another()
            return
        if view.epoch == before.epoch:
            self._report([f"two views of epoch {view.epoch}"])
            return
        if view.epoch != before.epoch + 1 and not (published.alone and view.epoch > before.epoch):
            self._report([f"epoch {view.epoch} follows epoch {before.epoch}"])
        published.view, published.alone = view, False
        self._note_workers(view, now)
        given_up = [entry.name for entry in before.workers if entry.state in {"joining", "away"}]
        for name in [name for name in _lost(view) if name not in given_up]:
            # A standby is lost with its process.
            nodes = {name, name.partition("/")[0]}
            silent = now - min(self._heard.get(node, 0.0) for node in nodes)
            ended = not nodes.isdisjoint(self._closed)
            if name not in _lost(before) and not ended and silent < self._death - ROUNDING:
                self._report([f"{name} is called lost, but was heard {silent:g} s before"])

    def _note_workers(self, view: m.View, now: float) -> None:
        """Take note in which rounds workers count, as the others are told."""
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

    # --- messages that arrive ---

    def arrived(self, node: str, peer: Peer, source: str, request: int, message: m.Message, now: float) -> None:
        """A message has come to a node from another, which it knows as `peer`."""
        if node == SCHEDULER:
            self._heard[source] = now
            if type(message) is m.Register and message.epoch:
                self._back[source] = None
        kind = type(message)
        if kind in _ASKED:
            lost = bool(self._lost) and kind in PUSHES and self._is_lost(node, source)
            if lost:
                assert isinstance(message, Push)
                places = self.readings.places(node, message)
                self.readings.late.update((place, (source, message.sequence)) for place in places)
            self._open[node][peer][request] = Question(source, message, self._due(node, kind, message, now), lost)
            # Types are not looked at by `isinstance`, which takes five times as long to say no.
            if type(message) is m.Barrier:
                self._meeting.setdefault((message.name, message.group), {})[source] = None
        elif kind in _ANSWERS:
            self.readings.arrived(node, source, request, message)
        elif type(message) is m.CopySettings:
            self.readings.bundles.update(((node, number), keys) for number, keys in message.bundles)
        elif type(message) is m.View and node in self._servers:
            # Not those of the workers: of thousands, looking at all of their views would take longer than the run.
            self._lost.pop(node, None)
            if gone := _lost(message):
                self._lost[node] = gone

    def _due(self, node: str, kind: type[m.Message], message: m.Message, now: float) -> float:
        """Return when a question is to be answered at the latest."""
        due = now
        if kind in _TIMED:
            due += message.timeout  # type: ignore[attr-defined]
        elif kind is m.PlanLeave:
            # How long it takes to plan depends on how long the steps of the others take.
            return math.inf
        if self._stops:
            due += self._stops.get(node, 0.0)
        if kind in _WHOLE and message.whole is not None:  # type: ignore[attr-defined]
            # Another server is asked whether its call counts, and has so long to answer.
            due += self._death
        return due

    def closed(self, node: str, peer: Peer, source: str, now: float, *, by_itself: bool = False) -> None:
        """A connection of a node is over: nothing that came over it is to be answered any longer."""
        if node == SCHEDULER:
            self._back.pop(source, None)
            self._published.listeners.pop(peer, None)
            self._published.alone |= not self._published.listeners
            if not by_itself:
                self._closed.add(source)
        self._forget(node, self._open[node].pop(peer, {}), now)

    def ended(self, node: str, now: float) -> None:
        """A node is no more."""
        self._released.pop(node, None)
        self._back.pop(node, None)
        if node == SCHEDULER:
            self._back.clear()
            # One that is started again has heard nobody yet.
            self._closed.update(self._heard)
            self._published.listeners.clear()
            self._published.alone = True
        self.readings.ended(node)
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
