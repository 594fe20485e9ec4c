"""Which place a worker gets and what becomes of that of one which is gone: the tables of `docs/elastic.md`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.scheduler.places import Place, place_of, state_of_gone, state_of_leaver
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Asked, Scheduler

MODES = ("fail", "shrink", "respawn")

PLACES = [
    # the name's member, modes, is there room: what a worker gets where workers may join
    (None, MODES, True, Place.NEW),
    (None, MODES, False, Place.FULL),
    ("left", MODES, True, Place.RETURN),
    ("left", MODES, False, Place.FULL),
    ("evicted", MODES, True, Place.RETURN),
    ("evicted", MODES, False, Place.FULL),
    ("joining", MODES, False, Place.RETURN),
    ("away", ("respawn",), False, Place.SUCCESSION),
    ("away", MODES, True, Place.SUCCESSION),
    ("away", ("fail", "shrink"), False, Place.FULL),
    ("alive", ("respawn",), False, Place.SUCCESSION),
    ("alive", ("fail", "shrink"), True, Place.TAKEN),
    ("finished", MODES, True, Place.TAKEN),
    ("lost", MODES, True, Place.TAKEN),
]

FIXED = [
    # the same where nobody may join
    (None, MODES, Place.FULL),
    ("left", MODES, Place.TAKEN),
    ("evicted", MODES, Place.TAKEN),
    ("away", MODES, Place.SUCCESSION),
    ("alive", ("respawn",), Place.SUCCESSION),
    ("alive", ("fail", "shrink"), Place.TAKEN),
]


@pytest.mark.parametrize(("state", "modes", "has_room", "place"), PLACES)
def test_places_where_workers_may_join(state: str | None, modes: tuple[str, ...], has_room: bool, place: Place) -> None:
    in_use = 2 if has_room else 3
    assert {place_of(state, on_worker_loss=mode, in_use=in_use, most=3) for mode in modes} == {place}


@pytest.mark.parametrize(("state", "modes", "place"), FIXED)
def test_places_where_nobody_may_join(state: str | None, modes: tuple[str, ...], place: Place) -> None:
    assert {place_of(state, on_worker_loss=mode, in_use=2, most=0) for mode in modes} == {place}


@pytest.mark.parametrize(
    ("state", "mode", "others", "gone"),
    [
        ("alive", "fail", 5, "lost"),
        ("alive", "shrink", 2, "evicted"),
        ("alive", "shrink", 1, "away"),
        ("alive", "shrink", 0, "evicted"),
        ("alive", "respawn", 5, "away"),
        ("away", "shrink", 1, "lost"),
        ("away", "respawn", 1, "lost"),
        ("finished", "fail", 1, "left"),
        ("joining", "fail", 1, "evicted"),
    ],
)
def test_state_of_a_worker_that_is_gone(state: str, mode: str, others: int, gone: str) -> None:
    assert state_of_gone(state, on_worker_loss=mode, others=others, least=2) == gone


@pytest.mark.parametrize(
    ("state", "early", "others", "gone"),
    [
        ("alive", True, 2, "left"),
        ("alive", True, 1, "away"),
        ("alive", True, 0, "left"),
        ("alive", False, 1, "left"),
        ("finished", True, 1, "left"),
        ("joining", True, 1, "left"),
    ],
)
def test_state_of_a_worker_that_leaves(state: str, early: bool, others: int, gone: str) -> None:
    assert state_of_leaver(state, early=early, others=others, least=2) == gone


@given(
    state=hs.sampled_from([None, "alive", "finished", "left", "lost", "evicted", "away", "joining"]),
    mode=hs.sampled_from(MODES),
    in_use=hs.integers(0, 5),
    most=hs.integers(0, 5),
)
def test_nobody_comes_beyond_the_limit_and_no_member_is_driven_out(
    state: str | None, mode: str, in_use: int, most: int
) -> None:
    place = place_of(state, on_worker_loss=mode, in_use=in_use, most=most)
    if place is Place.NEW or (place is Place.RETURN and state != "joining"):
        assert in_use < most
    if place is Place.SUCCESSION:
        assert state == "away" or (mode, state) == ("respawn", "alive"), "a member has lost its place"


WORKERS = ("worker-0", "worker-1", "worker-2", "worker-3", "worker-4")
LEAST, DECLARED, MOST = 2, 3, 4


class Members(RuleBasedStateMachine):
    """Workers that come, go and die in any order, against the rules; nodes answer at once what the scheduler asks."""

    scheduler: Scheduler
    mode: str

    def __init__(self) -> None:
        super().__init__()
        scheduler = self.scheduler
        self.lives: dict[str, int] = {}
        self.here: dict[str, Asked] = {}
        """Workers whose connection is open."""
        self.handled = 0
        scheduler.form("server-0", *WORKERS[:DECLARED])
        for name in WORKERS[:DECLARED]:
            self.lives[name] = 1
            self.here[name] = next(iter(scheduler.asked.values()))

    @property
    def view(self) -> m.View:
        """The last view."""
        return self.scheduler.views["server-0"][-1]

    @property
    def states(self) -> dict[str, str]:
        """The states of all workers that the view has."""
        return {entry.name: entry.state for entry in self.view.workers}

    @property
    def over(self) -> bool:
        """Whether the job is over."""
        return self.scheduler.machine._cluster.is_over

    def play(self) -> None:
        """Let everybody answer what the scheduler asks: nobody is beyond what it asks for."""
        while self.handled < len(self.scheduler.effects):
            effect = self.scheduler.effects[self.handled]
            self.handled += 1
            if isinstance(effect, ef.Send) and isinstance(effect.message, m.Boundary) and effect.message.clock:
                clock, peer = effect.message.clock, effect.peer
                answers = [m.BoundaryClock(clock, 0), m.Passed(clock)]
                for answer in answers[: 1 if peer == self.scheduler.peers["server-0"] else 2]:
                    if peer in self.scheduler.machine._members.by_peer:
                        self.scheduler.handle(st.Received(peer, 0, answer))

    @rule(name=hs.sampled_from(WORKERS))
    def come(self, name: str) -> None:
        """Let a process of a name register."""
        if name in self.here or self.over:
            return
        before = self.states
        used = {"alive", "lost", "joining", *(["away"] if self.mode == "respawn" else [])}
        room = sum(state in used for state in before.values()) < MOST
        self.lives[name] = self.lives.get(name, 0) + 1
        asked = self.scheduler.register(name, again=name in self.scheduler.peers, incarnation=self.lives[name])
        if asked.pending:
            self.here[name] = asked
            assert room or before.get(name) == "away"
            assert self.states[name] in {"joining", "alive"}
        else:
            assert not room or before.get(name) in {"alive", "finished", "lost"}
        self.play()

    @rule(name=hs.sampled_from(WORKERS))
    def enter(self, name: str) -> None:
        """Let a worker say that it is ready to count."""
        if name in self.here and not self.over and self.states[name] in {"joining", "alive"}:
            was_joining = self.states[name] == "joining"
            asked = self.scheduler.ask(name, m.Enter(50.0))
            self.play()
            if was_joining and self.mode == "respawn" and "away" in self.states.values():
                assert asked.pending, "who is away has to agree too, or its successor"
                return
            assert isinstance(asked.answer, m.Entered), "everybody was past the boundary"
            entry = next(entry for entry in self.view.workers if entry.name == name)
            assert (entry.state, entry.since) == ("alive", asked.answer.clock)
            assert entry.since > 0 or not was_joining

    @rule(name=hs.sampled_from(WORKERS))
    def leave(self, name: str) -> None:
        """Let a worker leave in good order, before its work is done."""
        if name in self.here and not self.over:
            before = self.states
            del self.here[name]
            self.scheduler.ask(name, m.Leave(early=True))
            others = sum(state in {"alive", "away"} for other, state in before.items() if other != name)
            keeps = before[name] == "alive" and 0 < others < LEAST
            assert self.states[name] == ("away" if keeps else "left")
            self.play()

    @rule(name=hs.sampled_from(WORKERS))
    def die(self, name: str) -> None:
        """Let a worker's process end."""
        if name in self.here and not self.over:
            del self.here[name]
            self.scheduler.drop(name)
            self.play()

    @invariant()
    def never_more_than_may_be(self) -> None:
        """As many places are in use as may be, and ranks are those of the beginning, and then the next ones."""
        used = [entry for entry in self.view.workers if entry.state in {"alive", "lost", "joining"}]
        assert len(used) <= MOST
        assert [entry.rank for entry in self.view.workers] == list(range(len(self.view.workers)))
        assert (self.view.declared or len(self.view.workers)) == DECLARED

    @invariant()
    def goes_on_with_enough_only(self) -> None:
        """Rounds are never those of fewer than the minimum: then a place is kept, and they wait for it."""
        states = list(self.states.values())
        counted = sum(state in {"alive", "away", "lost"} for state in states)
        if self.mode != "fail" and not self.over and "alive" in states:
            assert counted >= LEAST or "finished" in states


@pytest.mark.parametrize("mode", MODES)
def test_any_sequence_of_joins_and_losses(make_scheduler: type[Scheduler], mode: str) -> None:
    limits: dict[str, Any] = {"min_workers": LEAST, "max_workers": MOST, "respawn_timeout": 1000.0}

    class Chosen(Members):
        def __init__(self) -> None:
            self.mode = mode
            self.scheduler = make_scheduler(workers=DECLARED, servers=1, on_worker_loss=mode, **limits)
            super().__init__()

    run_state_machine_as_test(Chosen, settings=settings(max_examples=60, stateful_step_count=25))
