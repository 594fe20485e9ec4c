"""What policies promise is looked after: each test spoils a good run in one way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sim.checks import find_violations
from sim.cluster import simulate
from sim.compute import Constant
from sim.promises import Promises
from sim.record import DropRecord, UpdateRecord
from sim.sections import ClusterSection, TensorSection

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.record import Run
    from sim.scenario import Scenario

HERE = "key 'weights' from element 0: "


@pytest.fixture
def run_of(make_scenario: Callable[..., Scenario]) -> Callable[[str], Run]:
    """Return a function that runs three workers, one of them slow, under a policy; nothing is wrong with the run."""

    def run(policy: str) -> Run:
        made = simulate(make_scenario(3, 8, Constant(mean=1.0), slow={"worker-2": 4.5}), policy, 1)
        assert find_violations(made) == []
        return made

    return run


def take_out(update: UpdateRecord, place: int) -> None:
    for column in (update.ranks, update.staleness):
        column.pop(place)
    update.tokens = [token for index, token in enumerate(update.tokens) if index != place]


def put_in(update: UpdateRecord, rank: int, number: int) -> None:
    update.ranks.append(rank)
    update.staleness.append(0)
    update.tokens = [*update.tokens, (f"worker-{rank}", number)]


@pytest.mark.parametrize("policy", ["k_sync:2", "backup:1", "k_async:2", "k_batch_async:2", "k_batch_sync:2"])
def test_a_round_of_too_few(run_of: Callable[[str], Run], policy: str) -> None:
    run = run_of(policy)
    take_out(run.updates[1], 0)
    assert f"{HERE}version 2 holds 1 gradients, {policy} wants 2" in find_violations(run)


@pytest.mark.parametrize("policy", ["k_sync:2", "backup:1", "k_async:2", "asp", "ssp:1", "round_robin", "ringmaster:9"])
def test_a_round_of_too_many(run_of: Callable[[str], Run], policy: str) -> None:
    run = run_of(policy)
    size = len(run.updates[0].ranks)
    put_in(run.updates[0], 2, 9)
    assert f"{HERE}version 1 holds {size + 1} gradients, {policy} wants {size}" in find_violations(run)


def test_a_quorum_of_fewer_than_k(run_of: Callable[[str], Run]) -> None:
    run = run_of("quorum:2:0.5")
    take_out(run.updates[1], 0)
    assert f"{HERE}version 2 holds 1 gradients, quorum:2:0.5 wants 2 to 3" in find_violations(run)


def test_no_more_than_one_gradient_after_the_switch(run_of: Callable[[str], Run]) -> None:
    run = run_of("sync_switch:0.25:8")
    assert [len(update.ranks) for update in run.updates[:3]] == [3, 3, 1]
    put_in(run.updates[2], 2, 9)
    assert f"{HERE}version 3 holds 2 gradients, sync_switch:0.25:8 wants 1" in find_violations(run)


def test_two_gradients_of_a_worker_in_a_round(run_of: Callable[[str], Run]) -> None:
    run = run_of("k_sync:2")
    update = run.updates[0]
    update.ranks[1], update.tokens = 0, [update.tokens[0], ("worker-0", 9)]
    assert f"{HERE}version 1 holds two gradients of a worker: ranks [0, 0]" in find_violations(run)


@pytest.mark.parametrize(("policy", "staleness"), [("k_sync:2", 1), ("quorum:2:0.5", 1), ("ringmaster:3", 3)])
def test_a_gradient_that_is_too_old(run_of: Callable[[str], Run], policy: str, staleness: int) -> None:
    run = run_of(policy)
    run.updates[3].staleness[0] = staleness
    (name, number) = run.updates[3].tokens[0]
    text = f"push {number} of {name} was applied at staleness {staleness}, {policy} drops such"
    assert text in find_violations(run)


def test_a_stale_gradient_before_the_switch(run_of: Callable[[str], Run]) -> None:
    run = run_of("sync_switch:1:8")
    run.updates[3].staleness[0] = 1
    assert f"{HERE}version 4 has gradients of staleness [1, 0, 0]" in find_violations(run)


def test_a_worker_that_goes_on_too_far_ahead(run_of: Callable[[str], Run]) -> None:
    run = run_of("asp")
    run.policy = "ssp:3"
    # When the slow one pushes for the second time, at 9 s, the others have made all their eight pushes.
    assert f"{HERE}rank 0 has made 6 pushes, the slowest 1" in find_violations(run)
    promises, ranks = Promises(run), [0, 1, 2]
    for update in run.updates[:6]:
        promises.on_update(update, ranks)
    assert [update.ranks[0] for update in run.updates[:6]] == [0, 1] * 3
    assert promises.on_step(run.workers[0], 3) == []
    assert promises.on_step(run.workers[0], 4) == [f"{HERE}worker-0 goes on after push 4, 4 ahead of the slowest"]


def test_a_turn_that_is_left_out(run_of: Callable[[str], Run]) -> None:
    run = run_of("round_robin")
    one, other = run.updates[3], run.updates[4]
    one.ranks, other.ranks = other.ranks, one.ranks
    one.tokens, other.tokens = other.tokens, one.tokens
    assert f"{HERE}version 4 holds a gradient of rank [1], it is the turn of 0" in find_violations(run)


def test_a_drop_where_there_is_none(run_of: Callable[[str], Run]) -> None:
    run = run_of("k_async:2")
    run.drops.append(DropRecord(9.0, "weights", 0, ("worker-2", 9), "late", 0, "server-0"))
    run.dropped["worker-2", 9] = "late"
    assert "push 9 of worker-2 was dropped as late; k_async:2 drops none as that" in find_violations(run)


def test_a_gradient_that_is_applied_and_dropped(run_of: Callable[[str], Run]) -> None:
    run = run_of("k_sync:2")
    put_in(run.updates[-1], *(2, run.drops[0].token[1]))
    found = find_violations(run)
    assert f"{HERE}push 1 of worker-2 was applied, but dropped elsewhere as late" in found
    assert "push 1 of worker-2 was dropped as late, but applied elsewhere" in found


@pytest.mark.parametrize(("policy", "reason"), [("k_sync:2", "late"), ("ringmaster:4", "stale")])
def test_a_gradient_that_is_dropped_although_it_is_fresh(
    run_of: Callable[[str], Run], policy: str, reason: str
) -> None:
    run = run_of(policy)
    run.drops[0].read = run.updates[-1].version
    assert f"push 1 of worker-2 was dropped as {reason}, at staleness 0 at most" in find_violations(run)


def test_a_drop_for_two_reasons(run_of: Callable[[str], Run]) -> None:
    run = run_of("k_sync:2")
    run.drops[0].reason = "stale"
    assert "push 1 of worker-2 was dropped as stale, elsewhere for another reason" in find_violations(run)


def test_an_early_answer_of_which_nothing_is_left(run_of: Callable[[str], Run]) -> None:
    run = run_of("k_batch_async:4")
    (name, number) = run.updates[0].tokens[0]
    run.updates[0].tokens = [(name, number + 100), *run.updates[0].tokens[1:]]
    assert f"{HERE}push {number} of {name} was answered, but is in no update" in find_violations(run)


# --- one decision for all keys ---


@pytest.fixture
def spread(make_scenario: Callable[..., Scenario]) -> Run:
    """Return a run with two keys on two servers, whose rounds are those of the first two workers."""
    tensors = (TensorSection(key="a", shape=(4,)), TensorSection(key="b", shape=(4,)))
    cluster = ClusterSection(workers=3, servers=2)
    scenario = make_scenario(3, 8, Constant(mean=1.0), slow={"worker-2": 4.5}, cluster=cluster, tensor=tensors)
    run = simulate(scenario, "k_sync:2", 1)
    assert find_violations(run) == []
    return run


def test_a_round_that_differs_from_key_to_key(spread: Run) -> None:
    second = next(update for update in spread.updates if update.key == "b" and update.version == 2)
    take_out(second, 1)
    put_in(second, 2, 1)
    here, there = [("worker-0", 2), ("worker-2", 1)], [("worker-0", 2), ("worker-1", 2)]
    text = f"key 'b' from element 0: version 2 holds {here}, elsewhere it is {there}"
    assert text in find_violations(spread)


def test_rounds_in_another_order(spread: Run) -> None:
    second, third = (next(u for u in spread.updates if u.key == "b" and u.version == version) for version in (2, 3))
    second.tokens, third.tokens = third.tokens, second.tokens
    assert any("is made of a round that was before the last one elsewhere" in text for text in find_violations(spread))
