"""What must hold of the values that workers are answered with: they are made, none is older than the one before, and
each holds what its worker had pushed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from aiokv.core.effects import StoredChunk, StoredChunks
from aiokv.core.keys import BUNDLE_START
from aiokv.core.records import Record
from aiokv.core.records import field as record_field
from aiokv.core.worker.session import MAX_OPEN_PUSHES
from aiokv.policy import get_policy
from aiokv.wire import messages as m
from sim.promises import rule_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aiokv.core.effects import Payload
    from aiokv.types import Key, Version
    from sim.record import Run
    from sim.tokens import Token

Place = tuple["Key", int]
"""Key and first element of a chunk."""

Push = m.Push | m.PushBundle
Pull = m.Pull | m.PullBundle
# Messages are looked up in these by their type: `isinstance` takes long to say no, and all of them come here.
PUSHES: Final = frozenset((m.Push, m.PushBundle))
EXCHANGES: Final = PUSHES | {m.Pull, m.PullBundle}


@dataclass(slots=True)
class Holdings:
    """What is known of a chunk from its updates."""

    version: Version = 0
    holds: dict[Token, Version] = field(default_factory=dict)
    """The version that holds a gradient."""


_NOTHING: Final = Holdings()


class _Sight(Record, eq=False, gc=False):
    """What a worker has sent to a chunk, and has got from it."""

    sent: int = 0
    """The number of its newest push."""
    begun: int = 0
    """The first push of its process; 0: there is none."""
    read: Version = 0
    """The newest version that it was answered with."""
    known: Version = 0
    """The newest version that has arrived."""
    computed: dict[int, Version] = record_field(default_factory=dict)
    """The version that it had when it sent a push, for its newest ones."""


class Readings:
    """Looks at every push and pull of a run, and at what comes of it.

    Args:
        run: what is looked at.
        chunks: what was made so far, by key and first element; somebody else keeps it.
    """

    def __init__(self, run: Run, chunks: Mapping[Place, Holdings]) -> None:
        self._chunks = chunks
        self._may_go_back = run.scenario.cluster.on_worker_loss == "respawn"
        """Whether a process may read what the one before in its place has read, after newer values."""
        self._makes_again = self._may_go_back and not all(get_policy(policy).in_step for policy in run.policies)
        """Whether a worker that is started again makes its last step again, from other values."""
        self._waits = all(get_policy(policy).waits for policy in run.policies)
        rules = [rule_of(policy) for policy in run.policies]
        self._drops = None if None in rules else frozenset(drop for rule in rules if rule for drop in rule.drops)
        """Why pushes may be dropped, if that is known."""
        self._policy = ", then ".join(run.policies)
        self._dropped: set[tuple[Place, Token]] = set()
        self.late: set[tuple[Place, Token]] = set()
        """Pushes that arrived at a server after it knew that their worker was lost."""
        self.bundles: dict[tuple[str, int], tuple[Key, ...]] = {}
        """The keys of a server's bundles, by their numbers."""
        self._pushes: dict[tuple[str, str, int, Place], int] = {}
        """How many pushes a worker had sent before a pull, by worker, server, request and chunk."""
        self._sights: defaultdict[str, defaultdict[Place, _Sight]] = defaultdict(_by_place)
        """By worker."""
        self._asked: dict[tuple[str, str, int], list[_Sight]] = {}
        """What a worker wants values of, by worker, server and request."""

    def places(self, server: str, message: m.Message) -> list[Place]:
        """Return the chunks that a push or pull is about; of a bundle, also those that its keys may be divided into."""
        if type(message) is m.Push or type(message) is m.Pull:
            return [(message.key, message.start)]
        assert isinstance(message, m.PushBundle | m.PullBundle), "nothing else is about chunks"
        keys = self.bundles.get((server, message.bundle), ())
        return [(key, start) for key in keys for start in (BUNDLE_START, 0)]

    def computed_at(self, worker: str, place: Place, number: int) -> Version | None:
        """Return the version that a worker had when it sent a push to a chunk; None if that was not seen."""
        if self._makes_again:
            # It may have been computed twice, from other versions.
            return None
        sight = self._sights[worker].get(place)
        return None if sight is None else sight.computed.get(number)

    # --- what is sent, and comes ---

    def sent(self, worker: str, server: str, request: int, message: Push | Pull) -> None:
        """A worker sends a push or a pull."""
        sights, asked = self._sights[worker], []
        is_push = type(message) in PUSHES
        for place in self.places(server, message):
            sight = sights[place]
            asked.append(sight)
            if not is_push:
                self._pushes[worker, server, request, place] = sight.sent
                continue
            number = message.sequence  # type: ignore[union-attr]
            # One that is sent again, because its connection has ended, was computed when it was sent first.
            sight.sent = max(number, sight.sent)
            newest = sight.computed
            if not sight.begun:
                # A process that has joined again makes those anew that count nowhere of the one before.
                sight.begun = number
                newest = sight.computed = {each: read for each, read in newest.items() if each < number}
            newest.setdefault(number, sight.known)
            newest.pop(number - MAX_OPEN_PUSHES, None)
        self._asked[worker, server, request] = asked

    def arrived(self, worker: str, server: str, request: int, message: m.Message) -> None:
        """A worker gets an answer, maybe to a push or a pull."""
        asked = self._asked.pop((worker, server, request), None)
        if asked is not None and type(message) is m.Value:
            for sight in asked:
                sight.known = max(message.version, sight.known)

    def ended(self, worker: str) -> None:
        """A worker's process is no more: what was under way need not have arrived."""
        for sight in self._sights[worker].values():
            sight.sent = sight.begun = 0

    # --- answers ---

    def pushed(self, server: str, worker: str, push: Push, payload: Payload | None, dropped: str) -> list[str]:
        """A server answers a push; return what is wrong with that.

        Args:
            server: who answers.
            worker: who gets the answer.
            push: what was asked.
            payload: the values.
            dropped: why the push is in no version, if the server says so.
        """
        number = push.sequence
        token, places = (worker, number), self.places(server, push)
        held = False
        for place in places:
            held = held or token in self._chunks.get(place, _NOTHING).holds
        if dropped:
            self._dropped.update((place, token) for place in places)
            return self._on_dropped(push, dropped, held=held) + self._got(worker, payload, {})
        found = self._got(worker, payload, dict.fromkeys(places, number))
        if not held and self._waits:
            found.append(f"push {number} of key {places[0][0]!r} is answered, but is in no version")
        return found

    def _on_dropped(self, push: Push, reason: str, *, held: bool) -> list[str]:
        found = []
        if self._drops is not None and reason not in self._drops:
            found.append(f"push {push.sequence} is dropped as {reason}, which {self._policy} does not do")
        if held:
            found.append(f"push {push.sequence} is dropped as {reason}, but was applied")
        return found

    def pulled(self, server: str, worker: str, request: int, pull: Pull, payload: Payload | None) -> list[str]:
        """A server answers a pull; return what is wrong with that."""
        places = self.places(server, pull)
        pushed = {place: self._pushes.pop((worker, server, request, place), 0) for place in places}
        return self._got(worker, payload, pushed)

    def _got(self, worker: str, payload: Payload | None, pushed: Mapping[Place, int]) -> list[str]:
        """Look at the versions that a worker is answered with, and at what it has pushed to each chunk before."""
        found: list[str] = []
        parts: Iterable[Payload | None] = payload.chunks if type(payload) is StoredChunks else (payload,)
        for part in parts:
            if type(part) is not StoredChunk:
                continue
            place, version = (part.key, part.start), part.version
            holdings, sight = self._chunks.get(place, _NOTHING), self._sights[worker][place]
            before, sight.read = sight.read, version
            number = pushed.get(place, 0) if self._waits else 0
            while self._dropped and (place, (worker, number)) in self._dropped:
                number -= 1
            if number < sight.begun:
                # Of what a process before has pushed it may have been dropped without anybody to be told so.
                number = 0
            wrong = []
            if version > holdings.version:
                wrong.append(", but not made")
            if version < before and not self._may_go_back:
                wrong.append(f" after {before}")
            if number and holdings.holds.get((worker, number), version + 1) > version:
                wrong.append(f", which does not hold its push {number}")
            if wrong:
                found += [
                    f"key {part.key!r} from element {part.start}: version {version} is sent{text}" for text in wrong
                ]
        return found


def _by_place() -> defaultdict[Place, _Sight]:
    return defaultdict(_Sight)
