"""What an open update waits for, and in which order it is summed, with many members."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from aiokv.core.effects import Fold
from aiokv.core.roster import Roster
from aiokv.core.server.rounds.chunk import Chunk
from aiokv.core.server.rounds.updates import Contribution, Update
from aiokv.policy import BSP
from aiokv.types import TensorSpec
from aiokv.wire import messages as m

if TYPE_CHECKING:
    import random


class Counting(BSP):
    """A round policy that counts how often it is asked."""

    asked = 0

    def expected(self, *, version: int, members: list[int]) -> list[int]:  # type: ignore[override]
        """Return all members."""
        self.asked += 1
        return members


def view(states: list[str], epoch: int = 1) -> Roster:
    """Return workers with these states."""
    entries = tuple(m.WorkerEntry(rank, f"worker-{rank}", 1, state) for rank, state in enumerate(states))
    return Roster(m.View(epoch, entries, (), 1.0, 1, 1, 10.0))


def make_chunk(policy: BSP) -> Chunk:
    """Return a chunk of four elements."""
    return Chunk("w", 0, 4, TensorSpec((4,), "float32"), policy, "key 'w'")


@given(st.lists(st.sampled_from(["alive", "left", "lost"]), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_missing_ranks_and_sum_are_the_same_in_every_order_of_arrival(states: list[str], order: random.Random) -> None:
    chunk, update, roster = make_chunk(BSP()), Update(1), view(states)
    members = [rank for rank, state in enumerate(states) if state != "left"]
    arrivals = list(range(len(states)))
    order.shuffle(arrivals)
    folds: list[Fold] = []
    here: set[int] = set()
    for rank in arrivals:
        chunk.expect(update, roster)
        missing = [member for member in members if member not in here]
        assert update.missing() == missing
        assert update.first_missing() == (missing[0] if missing else None)
        assert [other for other in range(len(states)) if update.waits_for(other)] == missing
        here.add(rank)
        if not update.is_past(rank):
            update.add(Contribution(rank, 1, 0, 1, 100 + rank, rank))
            folds += [fold for fold in chunk.fold(update, update.first_missing(), None) if isinstance(fold, Fold)]
            assert update.folded == sorted(update.folded)
    assert update.first_missing() is None
    assert update.accumulator == 100 + update.folded[0]
    assert [fold.source for fold in folds] == [100 + rank for rank in update.folded[1:]]
    assert set(members) <= set(update.folded)


def test_policy_is_asked_once_for_an_update_and_a_view() -> None:
    policy = Counting()
    chunk, update, roster = make_chunk(policy), Update(1), view(["alive"] * 100)
    for rank in range(99, -1, -1):
        chunk.expect(update, roster)
        update.add(Contribution(rank, 1, 0, 1, rank, rank))
    assert policy.asked == 1
    chunk.expect(update, view(["alive"] * 100, epoch=2))
    assert policy.asked == 2


def test_members_of_a_group_are_in_order() -> None:
    roster = view(["alive", "left", "lost", "alive"])
    assert roster.members_of((1, 2, 3)) == [2, 3]
    assert roster.members_of(()) == [0, 2, 3]


@given(st.permutations(range(60)), st.lists(st.integers(0, 60), max_size=5))
def test_places_are_taken_in_order_however_many_there_are(arrivals: list[int], ends: list[int]) -> None:
    update, waiting = Update(1), set(arrivals[:50])
    for place in arrivals[:50]:
        update.add(Contribution(place, 1, 0, 1, None, place))
    for end in sorted(ends):
        ready = sorted(place for place in waiting if place < end)
        assert update.take(end) == ready
        waiting -= set(ready)
    # What comes later still finds its place among the rest.
    for place in arrivals[50:]:
        update.add(Contribution(place, 1, 0, 1, None, place))
    assert update.take(None) == sorted(waiting | set(arrivals[50:]))
    assert update.take(None) == []
