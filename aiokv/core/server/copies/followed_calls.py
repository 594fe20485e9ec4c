"""Calls that count as a whole, on a standby: what its server has of them, and what was decided about them.

A lost worker brings nothing again. So its pushes have to be on the standby before its server says that they are there,
and a decision before anything is done with it: whoever has the place then lets the same calls count.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from aiokv.core.effects import Effect, StoredSlots, Widen, freed
from aiokv.core.keys import BUNDLE_START
from aiokv.core.records import Record, field
from aiokv.core.server.rounds.whole_call import Aside, WholeCall
from aiokv.core.server.rounds.whole_calls import REMEMBERED, identity
from aiokv.core.stimuli import Received
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from aiokv.core.server.answers import AnyPush
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.whole_call import CallName, Verdict
    from aiokv.core.server.rounds.whole_calls import WholeCalls
    from aiokv.types import Key, Rank

CALLS: Final = 4096
"""Of how many calls is told in one message what was decided."""

_KINDS: Final[tuple[type[AnyPush], ...]] = (m.Push, m.PushBundle, m.PushRows)


# --- what a server tells its standby ---


def pushes_of(call: WholeCall) -> Iterator[tuple[m.CopyPush, StoredSlots | None]]:
    """Yield the pushes of a call, without their numbers, and their payloads."""
    rank, incarnation, number = call.name
    for aside in call.pushes.values():
        message, received = aside.message, aside.received
        kind = _KINDS.index(type(message))
        head = (0, rank, incarnation, number, tuple(call.after), kind, msgspec.msgpack.encode(message))
        copy = m.CopyPush(*head, aside.keys, aside.dtype, received.nbytes, received.span)
        slot = received.slot
        yield copy, None if slot is None else StoredSlots([slot], received.nbytes)


def settled(known: Iterable[tuple[CallName, Verdict]]) -> Iterator[m.CopySettled]:
    """Yield what was decided about calls, in messages that are not too long, without their numbers."""
    calls = iter(known)
    while some := list(islice(calls, CALLS)):
        yield m.CopySettled(0, tuple((*name, verdict) for name, verdict in some))


def push_in(message: m.CopyPush) -> AnyPush:
    """Return the push that a worker had sent."""
    push: AnyPush = msgspec.msgpack.decode(message.push, type=_KINDS[message.kind])
    return push


def called(message: m.CopyPush) -> CallName:
    """Return the call that a push belongs to."""
    return message.rank, message.incarnation, message.call


# --- what the standby keeps of it ---


class Kept(Record, eq=False):
    """A push of a call, and those of its keys in whose value it is not yet."""

    received: Received
    push: AnyPush
    keys: dict[Key, None]

    def is_in(self, chunk: Chunk, rank: Rank) -> bool:
        """Tell whether it is in the value of a chunk that it is for, or is dropped."""
        is_for = isinstance(self.push, m.PushBundle) or self.push.start == chunk.start
        return is_for and chunk.pushed.get(rank, 0) >= self.push.sequence


class FollowedCall(Record, eq=False):
    """What is here of a call; of a push that is in all values only that it was here."""

    parts: int
    servers: int
    after: tuple[int, ...]
    pushes: dict[Hashable, Kept | None] = field(default_factory=dict)


class FollowedCalls:
    """The calls that a standby knows."""

    def __init__(self) -> None:
        self._calls: dict[CallName, FollowedCall] = {}
        self._known: OrderedDict[CallName, Verdict] = OrderedDict()
        self._places: dict[tuple[Rank, Key], dict[tuple[CallName, Hashable], None]] = {}
        """The pushes that are kept, by rank and key."""

    def pushed(self, received: Received) -> list[Effect]:
        """Keep a push; it may come twice."""
        copy = received.message
        assert isinstance(copy, m.CopyPush), "it is one"
        push = push_in(copy)
        assert push.whole is not None, "it belongs to a call"
        name = called(copy)
        call = self._calls.get(name)
        if call is None:
            call = self._calls[name] = FollowedCall(push.whole.parts, push.whole.servers, copy.after)
        which = identity(push)
        effects = self._drop(name, call, which)
        # What was decoded may have come in a higher precision.
        is_wide = received.slot is not None and received.nbytes != copy.nbytes
        if is_wide:
            effects.append(Widen(received.slot, copy.dtype))  # type: ignore[arg-type]
        kept = Received(received.peer, received.request, push, received.slot, copy.nbytes, copy.span)
        call.pushes[which] = Kept(kept, push, dict.fromkeys(copy.keys))
        for key in copy.keys:
            self._places.setdefault((copy.rank, key), {})[name, which] = None
        return effects

    def settled(self, message: m.CopySettled) -> list[Effect]:
        """Take in what was decided; of calls that do not count nothing is kept."""
        effects: list[Effect] = []
        for rank, incarnation, number, verdict in message.calls:
            name = (rank, incarnation, number)
            self._known[name] = verdict
            call = self._calls.pop(name, None) if verdict else None
            if call is not None:
                effects += [effect for which in list(call.pushes) for effect in self._drop(name, call, which)]
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return effects

    def _drop(self, name: CallName, call: FollowedCall, which: Hashable) -> list[Effect]:
        """Keep a push no longer, if it is here."""
        kept = call.pushes.get(which)
        if kept is None:
            return []
        for key in kept.keys:
            self._unplace((name[0], key), name, which)
        call.pushes[which] = None
        return freed(kept.received.slot)

    def _unplace(self, place: tuple[Rank, Key], name: CallName, which: Hashable) -> None:
        here = self._places[place]
        del here[name, which]
        if not here:
            del self._places[place]

    def made(self, chunk: Chunk, ranks: Iterable[Rank]) -> list[Effect]:
        """Keep no longer what ranks have pushed that is in the value of a chunk now, or is dropped."""
        effects: list[Effect] = []
        for rank in ranks:
            for name, which in list(self._places.get((rank, chunk.key), ())):
                kept = self._calls[name].pushes[which]
                assert kept is not None, "it would not be in its place"
                if kept.is_in(chunk, rank):
                    done = list(kept.keys) if chunk.start == BUNDLE_START else [chunk.key]
                    effects += self._done(name, which, done)
        return effects

    def deleted(self, key: Key) -> list[Effect]:
        """Keep nothing for a key that is no more."""
        effects: list[Effect] = []
        for place in [place for place in self._places if place[1] == key]:
            for name, which in list(self._places[place]):
                effects += self._done(name, which, [key])
        return effects

    def _done(self, name: CallName, which: Hashable, keys: list[Key]) -> list[Effect]:
        call = self._calls[name]
        kept = call.pushes[which]
        assert kept is not None, "it would not be in its place"
        for key in keys:
            del kept.keys[key]
            self._unplace((name[0], key), name, which)
        if kept.keys:
            return []
        call.pushes[which] = None
        if len(call.pushes) == call.parts and not any(call.pushes.values()):
            del self._calls[name]
        return freed(kept.received.slot)

    def take_over(self, whole: WholeCalls, now: float) -> list[Effect]:
        """Let all go on from here, on the server that this node is now."""
        effects: list[Effect] = []
        calls: list[WholeCall] = []
        for name, followed in self._calls.items():
            verdict = self._known.get(name)
            here = {which: kept for which, kept in followed.pushes.items() if kept is not None}
            if verdict is None and len(here) != followed.parts:
                # Its server has told nobody that it is there.
                effects += [effect for kept in here.values() for effect in freed(kept.received.slot)]
                continue
            call = WholeCall(name, followed.parts, followed.servers, verdict=verdict, asked=verdict is not None)
            call.after = dict.fromkeys(followed.after)
            for which, kept in here.items():
                call.pushes[which] = Aside(kept.received, kept.push, None, tuple(kept.keys))
                call.keys.update(kept.keys)
            calls.append(call)
        return effects + whole.resume(self._known, calls, now)
