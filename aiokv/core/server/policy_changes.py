"""Another policy for keys that are there, from one step of all workers on.

Each worker asks every server, behind all that it has pushed of the keys. From then on their policy waits for it no
longer, as if it had finished: so what is open ends. When all ranks of a key's group have asked, and all that they have
pushed is made or dropped, the server goes over to the new policy. What was asked stays so when the call ends otherwise.

A rank that joins meanwhile is one of them if it counts in a round before the change. If it begins with a later one it
is told the policy that is in force then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Effect, Refuse, Send
from aiokv.core.records import Record, field
from aiokv.core.server.cuts import check_cut
from aiokv.core.waiting import Wait
from aiokv.errors import BarrierTimeoutError, KeyDeletedError, MembershipError, PolicyError
from aiokv.policy import get_policy
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from aiokv.core.deadlines import Deadlines
    from aiokv.core.roster import Roster
    from aiokv.core.rules import Rules
    from aiokv.core.server.answers import Answers
    from aiokv.core.server.catalog import Catalog, Entry
    from aiokv.core.server.parked import RequestName
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.deciding import Deciding
    from aiokv.core.server.rounds.making import Making
    from aiokv.core.server.rounds.rounds import Rounds
    from aiokv.core.server.rounds.steps import Steps
    from aiokv.core.stimuli import Received
    from aiokv.errors import AiokvError
    from aiokv.types import Key, Peer, Rank


class Change(Record, eq=False):
    """What the ranks in `asked` want of a key, behind a `clock`; `calls` wait for it."""

    key: Key
    entry: Entry
    chunks: list[Chunk]
    policy: str
    clock: int = 0
    asked: dict[Rank, None] = field(default_factory=dict)
    calls: dict[RequestName, None] = field(default_factory=dict)

    def absent(self, roster: Roster) -> list[Rank]:
        """Return the ranks that have not asked, ascending."""
        group = self.entry.group
        coming = [rank for rank, since in roster.newcomers.items() if since < self.clock]
        here = {*roster.members_of(group), *(rank for rank in coming if not group or rank in group)}
        return sorted(here.difference(self.asked))

    @property
    def is_idle(self) -> bool:
        """Whether all that was pushed under the policy before is made or dropped."""
        return all(chunk.is_idle for chunk in self.chunks)


class Asking(Record, eq=False):
    """A call that waits until all of its `keys` have their new policy."""

    policy: str
    waits: float
    keys: dict[Key, None]


class PolicyChanges:
    """The part of a `Coordinator` that lets keys go over to other policies.

    Args:
        catalog: the server's keys.
        rounds: who makes their versions.
        steps: who puts contributions into decided rounds.
        deciding: who decides these.
        answers: who holds reads back.
        making: how updates are made.
        rules: by which rule.
        deadlines: where calls that wait are entered, under peer and request id.
        divide_all: makes chunks of their own of keys, or lets a request wait.
    """

    def __init__(
        self,
        catalog: Catalog,
        rounds: Rounds,
        steps: Steps,
        deciding: Deciding,
        answers: Answers,
        making: Making,
        rules: Rules,
        deadlines: Deadlines[RequestName],
        divide_all: Callable[[Received, Iterable[Key]], tuple[list[Effect], bool]],
    ) -> None:
        self._catalog = catalog
        self._rounds = rounds
        self._steps = steps
        self._deciding = deciding
        self._answers = answers
        self._making = making
        self._rules = rules
        self._deadlines = deadlines
        self._divide_all = divide_all
        self._changes: dict[Key, Change] = {}
        self._calls: dict[RequestName, Asking] = {}
        self.ending: dict[Key, None] = {}
        """Keys of which only what was pushed is waited for."""
        self.on_change: Callable[[Chunk], None] | None = None
        """Is told of every chunk that has gone over."""

    def __contains__(self, name: RequestName) -> bool:
        return name in self._calls

    def __iter__(self) -> Iterator[RequestName]:
        return iter(self._calls)

    @property
    def _roster(self) -> Roster:
        return self._answers.roster

    # --- requests ---

    def asked(self, received: Received, message: m.SetPolicy, rank: Rank, now: float) -> list[Effect]:
        """Take note that a rank wants keys to have another policy, and answer when they have it.

        Raises:
            PolicyError: it can't be, another rank wants another one, or a key's policy is not what the rank says.
            MembershipError: a key belongs to other ranks.
            OptimizerError: the update rule can't update a key under it.
        """
        here = {key: entry for key in message.keys if (entry := self._catalog.entry(key)) is not None}
        self._check(message, here, rank)
        if message.trial:
            return [Send(received.peer, received.request, m.Done())]
        effects, divided = self._divide_all(received, here)
        if not divided:
            return effects
        chunks: dict[Key, list[Chunk]] = {key: [] for key in here}
        policy = get_policy(message.policy)
        for (key, _), chunk in self._catalog.chunks.items():
            # If a standby has taken a place in the middle of it, only some chunks of a key may have gone over.
            if key in chunks and (chunk.policy != policy or message.policy == message.old):
                chunks[key].append(chunk)
        named = (received.peer, received.request)
        group = (message.old, message.group)
        if message.policy == message.old:
            self._withdraw(list(here), rank)
            self._deciding.stay(group, rank)
        else:
            self._enter(named, message, here, chunks, rank)
            left = self._deciding.leave(group, message.keys, rank, self._roster, now)
            effects += self._steps.decided(left, now)
        changed = [chunk for some in chunks.values() for chunk in some]
        effects += self._rounds.advance(changed, now)
        if named not in self._calls:
            return [*effects, Send(*named, m.Done())]
        self._deadlines.add(named, now + message.timeout)
        return effects + self._refuse_lost([key for key in here if key in self._changes])

    def _check(self, message: m.SetPolicy, here: dict[Key, Entry], rank: Rank) -> None:
        policy = get_policy(message.policy)
        if policy.keeps_sum or get_policy(message.old).keeps_sum:
            text = f"policy {message.old} can't become {message.policy}: the update rule is not for keys of policy sum"
            raise PolicyError(text, expected="another policy than sum", got=message.policy)
        for key, entry in here.items():
            if entry.group != message.group or (entry.group and rank not in entry.group):
                text = f"key {key!r} belongs to ranks {list(entry.group) or 'all'}, not {list(message.group) or 'all'}"
                raise MembershipError(text, ranks=[rank], key=key)
            if entry.policy not in (message.old, message.policy):
                text = f"key {key!r} is kept under policy {entry.policy}, not {message.old}"
                raise PolicyError(text, key=key, expected=entry.policy, got=message.old)
            if entry.policy != message.policy or message.policy == message.old:
                # Otherwise the rank asks again for what it has got: the answer was lost.
                self._check_others(message, key, rank)
        for chunk in self._catalog.chunks.values():
            if chunk.key in here and chunk.is_dense:
                check_cut(self._rules.current, chunk.key, chunk.spec, chunk.start, chunk.stop, policy)

    def _check_others(self, message: m.SetPolicy, key: Key, rank: Rank) -> None:
        change = self._changes.get(key)
        if change is None or message.policy in (change.policy, message.old):
            return
        members = self._roster.members_of(message.group)
        others = [other for other in change.asked if other != rank and other in members]
        if others:
            text = (
                f"key {key!r}: rank {self._roster.label(rank)} asks for policy {message.policy}, "
                f"but rank {self._roster.labels(others)} for {change.policy}; nothing has changed"
            )
            raise PolicyError(text, key=key, expected=change.policy, got=message.policy)

    def _enter(
        self,
        named: RequestName,
        message: m.SetPolicy,
        here: dict[Key, Entry],
        chunks: dict[Key, list[Chunk]],
        rank: Rank,
    ) -> None:
        """Take note of who asks, for the keys that have not got the policy yet."""
        wanted = {key: entry for key, entry in here.items() if entry.policy != message.policy}
        for key, entry in wanted.items():
            change = self._changes.get(key)
            if change is None:
                change = self._changes[key] = Change(key, entry, chunks[key], message.policy)
            change.policy, change.clock = message.policy, max(change.clock, message.clock)
            change.asked[rank] = None
            change.calls[named] = None
            for chunk in change.chunks:
                chunk.leave(rank)
            self._look(change)
        if wanted:
            self._calls[named] = Asking(message.policy, message.timeout, dict.fromkeys(wanted))

    def _look(self, change: Change) -> None:
        """See whether all have asked."""
        if not change.absent(self._roster):
            self.ending[change.key] = None

    def _withdraw(self, keys: list[Key], rank: Rank) -> None:
        """Take note that a rank asks for no other policy any longer."""
        for key in keys:
            change = self._changes.get(key)
            if change is None or rank not in change.asked:
                continue
            del change.asked[rank]
            self.ending.pop(key, None)
            for chunk in change.chunks:
                chunk.stay(rank)
            if not change.asked and not change.calls:
                del self._changes[key]

    def switched(self, peer: Peer, request: int, message: m.Switched) -> list[Effect]:
        """Take note that keys have left the group of a policy on all servers."""
        self._deciding.left((message.old, message.group), message.keys)
        return [Send(peer, request, m.Done())]

    # --- going over ---

    def go_on(self, now: float) -> list[Effect]:
        """Let the keys go over of which all is made; to be called after whatever has happened while some are ending."""
        effects: list[Effect] = []
        for key in list(self.ending):
            if self._changes[key].is_idle:
                del self.ending[key]
                effects += self._go_over(self._changes.pop(key), now)
        return effects

    def _go_over(self, change: Change, now: float) -> list[Effect]:
        change.entry.policy = change.policy
        effects: list[Effect] = []
        for chunk in change.chunks:
            effects += self._making.forget_reads(chunk)
            effects += self._answers.let_go(chunk, now)
            chunk.former = None if chunk.rounds is None else chunk.rounds.decisions
            # It is idle, so nobody waits and nothing is to be freed.
            self._steps.remove(chunk)
            chunk.follow(get_policy(change.policy))
            self._rounds.begin(chunk)
            if chunk.rounds is not None:
                chunk.rounds.decisions.catch_up(change.asked, change.clock)
            effects += self._answers.release(chunk, now)
            if self.on_change is not None:
                self.on_change(chunk)
        for name in change.calls:
            call = self._calls[name]
            del call.keys[change.key]
            if not call.keys:
                self._end(name)
                effects.append(Send(*name, m.Done()))
        return effects

    def roster_changed(self) -> list[Effect]:
        """Look again at who has asked, because the members are others."""
        for change in self._changes.values():
            self._look(change)
        return self._refuse_lost(list(self._changes))

    # --- calls that end otherwise ---

    def _end(self, name: RequestName) -> None:
        for key in self._calls.pop(name).keys:
            del self._changes[key].calls[name]
        self._deadlines.discard(name)

    def _refuse(self, change: Change, error: AiokvError) -> list[Effect]:
        names = list(change.calls)
        for name in names:
            self._end(name)
        return [Refuse(*name, error) for name in names]

    def _refuse_lost(self, keys: list[Key]) -> list[Effect]:
        effects: list[Effect] = []
        for key in keys if self._roster.lost else []:
            change = self._changes[key]
            lost = [rank for rank in change.absent(self._roster) if rank in self._roster.lost]
            if lost:
                error = self._roster.loss(lost, f"set_policy {change.policy!r} of key {key!r}", key)
                effects += self._refuse(change, error)
        return effects

    def deleted(self) -> list[Effect]:
        """Refuse the calls that wait for keys which are no more."""
        effects: list[Effect] = []
        for key in [key for key in self._changes if key not in self._catalog]:
            change = self._changes[key]
            error = KeyDeletedError(f"key {key!r} was deleted while the call was pending", key=key)
            effects += self._refuse(change, error)
            del self._changes[key]
            self.ending.pop(key, None)
        return effects

    def expire(self, name: RequestName) -> Effect:
        """Refuse a call whose time has come, and say who has not asked."""
        wait = self.wait(name)
        self._end(name)
        return Refuse(*name, BarrierTimeoutError(f"{wait.late}; it stays asked", ranks=wait.ranks, key=wait.key))

    def wait(self, name: RequestName) -> Wait:
        """Return for what a call waits."""
        call = self._calls[name]
        change = self._changes[next(iter(call.keys))]
        absent = change.absent(self._roster)
        reason = f"rank {self._roster.labels(absent)} did not call it" if absent else "what was pushed is not made"
        return Wait(f"set_policy {call.policy!r} of key {change.key!r}", reason, call.waits, absent, change.key)

    def forget_peer(self, peer: Peer) -> None:
        """Nobody is there any longer to answer; what was asked stays so."""
        for name in [name for name in self._calls if name[0] == peer]:
            self._end(name)
