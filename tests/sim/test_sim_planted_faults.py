"""Bugs that are put into the state machines on purpose, and the check that notices each of them.

The machines' own checks are off: what they do is judged from outside. Each bug has to show within 1,000 seeds of the
fuzzer; most do within a few dozen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from aiokv.core.deadlines import Deadlines
from aiokv.core.effects import Apply, Effect, Fold, Log, Send, freed
from aiokv.core.roster import Roster
from aiokv.core.scheduler.barriers import Barriers
from aiokv.core.scheduler.cluster import Cluster
from aiokv.core.scheduler.membership import Membership
from aiokv.core.scheduler.turnover import Turnover
from aiokv.core.server.answers import Answers
from aiokv.core.server.coordinator import Coordinator
from aiokv.core.server.rounds.chunk import Chunk
from aiokv.core.server.rounds.making import Making
from aiokv.core.server.rounds.rounds import Rounds
from aiokv.core.server.rounds.steps import Steps
from aiokv.core.server.rounds.whole_calls import WholeCalls
from aiokv.core.server.worker_links import WorkerLinks
from aiokv.core.worker.calls import Calls
from aiokv.core.worker.directory import Directory
from aiokv.core.worker.replies import Replies
from aiokv.core.worker.session import Session
from aiokv.policy.kofn import FirstK
from aiokv.policy.ssp import Lead
from aiokv.wire import messages as m
from sim.fuzz import first_finding

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.effects import Effect

SEEDS = range(1000)

SHOWN_BY = {
    "a call counts when one server has it": 686,
    "who is ahead may lead by one push more": 307,
    "somebody else is taken for finished": 154,
    "requests are counted instead of ranks": 115,
    "who has finished is waited for": 108,
    "a lost worker's last pushes count one by one": 93,
    "the last of a group is not waited for": 56,
}
"""Seeds that are tried first, to save time: with few others these bugs show."""


@pytest.fixture(autouse=True)
def _no_checks_from_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine in (Coordinator, Membership, Session):
        monkeypatch.setattr(machine, "validate", lambda self: None)


def every(count: int) -> Callable[[], bool]:
    """Return a function that says yes every so many times."""
    calls = 0

    def now() -> bool:
        nonlocal calls
        calls += 1
        return calls % count == 0

    return now


# --- servers: what an update is made of ---


def count_requests_instead_of_ranks(original: Any) -> Any:
    def expect(self: Chunk, update: Any, roster: Roster) -> Any:
        original(self, update, roster)
        if len(update.waiters) + len(self.pulls) >= len(update.expected):
            update.expected = ()

    return expect


def forget_a_duplicate(original: Any) -> Any:
    def check_push(self: Rounds, chunk: Chunk, message: Any, rank: int) -> Any:
        if message.sequence == chunk.pushed.get(rank):
            chunk.pushed[rank] -= 1
        return original(self, chunk, message, rank)

    return check_push


def send_pushes_twice(original: Any) -> Any:
    """As a worker does that tries again."""

    def send(self: Calls, call: Any, parts: Any) -> Any:
        effects = original(self, call, parts)
        for part in parts:
            if isinstance(part.message, m.Push | m.PushBundle):
                again = structs.replace(part.message, want_value=False)
                effects.append(Send(part.peer, self.requests.ask(call, part.peer), again, part.sends, part.priority))
        return effects

    return send


def drop_a_contribution(original: Any) -> Any:
    unlucky = every(5)

    def push(self: Rounds, received: Any, message: Any, rank: int, chunks: list[Chunk], now: float) -> Any:
        if not unlucky():
            return original(self, received, message, rank, chunks, now)
        for chunk in chunks:
            chunk.pushed[rank] = message.sequence
        return [Send(received.peer, received.request, m.Done(chunks[0].version))]

    return push


def apply_twice(original: Any) -> Any:
    def settle(self: Rounds, chunk: Chunk, update: Any) -> Any:
        effects = original(self, chunk, update)
        again = [structs.replace(effect, slot=None) for effect in effects if isinstance(effect, Apply)]
        return effects + again

    return settle


def use_a_version_again(original: Any) -> Any:
    def apply(self: Making, chunk: Chunk, update: Any, roster: Roster) -> Any:
        made = original(self, chunk, update, roster)
        made.version = max(1, chunk.version) if chunk.version == 2 else made.version
        return made

    return apply


def ignore_the_last_of_a_group(original: Any) -> Any:
    def members_of(self: Roster, group: Any) -> Any:
        members = original(self, group)
        return members[:-1] if group and len(members) > 1 else members

    return members_of


def ignore_groups(original: Any) -> Any:
    return lambda self, group: self.members


def fold_in_the_order_of_arrival(original: Any) -> Any:
    def fold(self: Chunk, update: Any, first_missing: Any, rate: Any, lamda: float = 0.0) -> Any:
        effects: list[Effect] = []
        for rank, part in update.contributions.items() if first_missing is None else ():
            update.folded.append(rank)
            slot, part.slot = part.slot, None
            if update.accumulator is None:
                update.accumulator = slot
            else:
                effects.append(Fold(update.accumulator, slot, self.spec.dtype))
        return effects

    return fold


def count_staleness_from_one(original: Any) -> Any:
    def apply(self: Making, chunk: Chunk, update: Any, roster: Roster) -> Any:
        made = original(self, chunk, update, roster)
        made.staleness = [number + 1 if number else 0 for number in made.staleness]
        return made

    return apply


# --- policies that look at who comes first, or who is ahead ---


def let_them_lead_by_one_more(original: Any) -> Any:
    def init(self: Lead, lead: int) -> None:
        original(self, lead + 1)

    return init


def close_rounds_early(original: Any) -> Any:
    def init(self: FirstK, size: Any, **options: Any) -> None:
        original(self, lambda members, number: max(1, size(members, number) - 1), **options)

    return init


def take_what_is_late(original: Any) -> Any:
    def init(self: FirstK, size: Any, *, distinct: bool, fresh: bool) -> None:
        original(self, size, distinct=distinct, fresh=False)

    return init


def drop_what_is_in_time(original: Any) -> Any:
    unlucky = every(9)

    def judge(self: Steps, chunk: Chunk, contribution: Any, waiter: Any, verdict: Any, now: float) -> Any:
        if unlucky():
            # It is answered as usual.
            waits = self._answers.is_parked(waiter)
            return [*freed(contribution.slot), *(self._answers.advance([waiter], now) if waits else [])]
        return original(self, chunk, contribution, waiter, verdict, now)

    return judge


# --- servers: who is answered ---


def answer_before_applying(original: Any) -> Any:
    def settle(self: Rounds, chunk: Chunk, update: Any) -> Any:
        effects = original(self, chunk, update)
        if chunk.applying and update.version == chunk.version + 1:
            for waiter in [waiter for waiter in update.waiters if waiter.left == 1]:
                del update.waiters[waiter]
                effects.insert(0, self._answers._answer(waiter, 0.0))
        return effects

    return settle


def forget_a_waiter(original: Any) -> Any:
    unlucky = every(7)

    def answer(self: Answers, waiter: Any, now: float) -> Any:
        effect = original(self, waiter, now)
        return Log("info", "") if unlucky() else effect

    return answer


def read_what_is_older_than_the_own_push(original: Any) -> Any:
    def pull(self: Rounds, received: Any, message: Any, rank: int, chunks: list[Chunk], now: float) -> Any:
        return original(self, received, structs.replace(message, at_least=0), rank, chunks, now)

    return pull


def let_deadlines_pass(original: Any) -> Any:
    return lambda self, entry, time: original(self, entry, time + 100.0)


def accept_whoever_is_lost(original: Any) -> Any:
    return lambda self, peer, roster: self._ranks[peer]


def stay_in_the_first_epoch(original: Any) -> Any:
    return lambda self, view, now: original(self, view, now) if not self._answers.roster.epoch else []


# --- the scheduler ---


def open_barriers_early(original: Any) -> Any:
    return lambda self, place, roster: original(self, place, roster)[1:]


def finish_somebody_else(original: Any) -> Any:
    def finish(self: Turnover, peer: int, request: int, told: int, now: float) -> Any:
        workers = list(self._members.workers.values())
        other = workers[(workers.index(self._cluster.worker(peer)) + 1) % len(workers)]
        return [
            structs.replace(effect, peer=peer) if isinstance(effect, Send) and effect.request == request else effect
            for effect in original(self, other.peer, request, told, now)
        ]

    return finish


def forget_who_has_finished(original: Any) -> Any:
    return lambda self, peer, request, told, now: [Send(peer, request, m.Done())]


def be_hasty(original: Any) -> Any:
    def init(self: Membership, plan: Any, **life: Any) -> Any:
        original(self, replace(plan, death_timeout=plan.death_timeout / 4), **life)

    return init


def use_an_epoch_again(original: Any) -> Any:
    def publish(self: Cluster, now: float) -> Any:
        self.epoch -= self.epoch == 2
        return original(self, now)

    return publish


# --- workers ---


def be_content_with_the_first_answer(original: Any) -> Any:
    def advance(self: Replies, call: Any, *answer: Any) -> Any:
        effects = original(self, call, *answer)
        return effects or self._calls.complete(call)

    return advance


def forget_the_own_pushes(original: Any) -> Any:
    def exchange(self: Any, *arguments: Any) -> Any:
        parts = original(self, *arguments)
        for part in parts:
            if isinstance(part.message, m.Pull | m.PullBundle):
                part.message.at_least = max(0, part.message.at_least - 1)
        return parts

    return exchange


def push_each_by_itself(original: Any) -> Any:
    return lambda self, parts: None


def count_what_is_on_one_server(original: Any) -> Any:
    def gather(self: WholeCalls, message: Any, *others: Any) -> Any:
        return original(self, structs.replace(message, servers=min(1, message.servers)), *others)

    return gather


def wait_for_who_is_evicted(original: Any) -> Any:
    return property(lambda self: sorted(entry.rank for entry in self._entries if entry.state != "left"))


Places = dict[tuple[type, str], "Callable[[Any], Any]"]

PLANTS: dict[str, tuple[Places, str]] = {
    "requests are counted instead of ranks": (
        {(Chunk, "expect"): count_requests_instead_of_ranks},
        "was made without worker-",
    ),
    "one of two equal pushes is forgotten": (
        {(Rounds, "_check_push"): forget_a_duplicate, (Calls, "send_on"): send_pushes_twice},
        "was applied twice",
    ),
    "a contribution is dropped": ({(Rounds, "push"): drop_a_contribution}, "is answered, but is in no version"),
    "an update is applied twice": ({(Rounds, "_settle"): apply_twice}, r"update 2 made version 1"),
    "a version is used again": ({(Making, "_apply"): use_a_version_again}, "update 3 made version 2"),
    "the last of a group is not waited for": (
        {(Roster, "members_of"): ignore_the_last_of_a_group},
        "was made without worker-",
    ),
    "a group's updates wait for everybody": ({(Roster, "members_of"): ignore_groups}, "RoundTimeoutError"),
    "sums are made in the order of arrival": (
        {(Chunk, "fold"): fold_in_the_order_of_arrival},
        "was summed in the order",
    ),
    "staleness is off by one": ({(Making, "_apply"): count_staleness_from_one}, "says staleness|but has staleness"),
    "who is ahead may lead by one push more": (
        {(Lead, "__init__"): let_them_lead_by_one_more},
        "ahead of the slowest|the slowest",
    ),
    "rounds are closed with one worker less": (
        {(FirstK, "__init__"): close_rounds_early},
        r"holds \d gradients, .* wants",
    ),
    "a late gradient is taken": ({(FirstK, "__init__"): take_what_is_late}, "staleness"),
    "an accepted gradient vanishes": (
        {(Steps, "_judge"): drop_what_is_in_time},
        "answered, but is in no (version|update)",
    ),
    "who pushes is answered before the update is made": (
        {(Rounds, "_settle"): answer_before_applying},
        "answered, but is in no version|which does not hold its push",
    ),
    "a waiter is never answered": ({(Answers, "_answer"): forget_a_waiter}, "was never answered"),
    "a pull does not wait for the own push": (
        {(Rounds, "pull"): read_what_is_older_than_the_own_push},
        "which does not hold its push",
    ),
    "a worker forgets that it has pushed": (
        {(Directory, "exchange"): forget_the_own_pushes},
        "which does not hold its push",
    ),
    "a deadline passes": (
        {(Deadlines, "add"): let_deadlines_pass},
        "too late|never answered|longer than it may|did not end in time",
    ),
    "what a lost worker pushes is accepted": (
        {(WorkerLinks, "rank_of"): accept_whoever_is_lost},
        "although the worker (was|is) known to be lost",
    ),
    "an old epoch is accepted": (
        {(Coordinator, "_viewed"): stay_in_the_first_epoch},
        "although the worker (was|is) known to be lost|RoundTimeoutError",
    ),
    "a barrier opens early": ({(Barriers, "_absent"): open_barriers_early}, "opens without worker-"),
    "somebody else is taken for finished": (
        {(Turnover, "finish"): finish_somebody_else},
        "was made without worker-|opens without worker-",
    ),
    "who has finished is waited for": (
        {(Turnover, "finish"): forget_who_has_finished},
        "(Round|Barrier)TimeoutError",
    ),
    "a lost worker's last pushes count one by one": (
        {(Calls, "_bind_together"): push_each_by_itself},
        "is missing, but is in other chunks",
    ),
    "a call counts when one server has it": (
        {(WholeCalls, "_gather"): count_what_is_on_one_server},
        "is missing, but is in other chunks",
    ),
    "who is evicted is waited for": ({(Roster, "members"): wait_for_who_is_evicted}, "RoundTimeoutError"),
    "nodes are given up too early": ({(Membership, "__init__"): be_hasty}, "is called lost, but was heard"),
    "an epoch is used twice": ({(Cluster, "publish"): use_an_epoch_again}, "two views of epoch"),
    "a call is over with its first answer": (
        {(Replies, "_advance"): be_content_with_the_first_answer},
        "was answered, but is in no update",
    ),
}
"""What is planted where, and what is said about it."""


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places, expected = PLANTS[name]
    for (owner, attribute), plant in places.items():
        monkeypatch.setattr(owner, attribute, plant(getattr(owner, attribute)))
    first = [SHOWN_BY[name]] if name in SHOWN_BY else []
    assert first_finding([*first, *SEEDS], expected) is not None
