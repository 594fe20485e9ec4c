"""Simulated workers that join and leave while others train."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from aiokv.core.worker.push_counts import PushCounts
from aiokv.errors import ConfigError
from sim.checks import find_violations
from sim.cluster import simulate
from sim.compute import Constant
from sim.faults import Crash, Join, Leave, Slow
from sim.progress import lacking_progress
from sim.scenario import Scenario, parse_scenario
from sim.sections import ChangeSection, ClusterSection, JobSection, NetworkSection, TensorSection

if TYPE_CHECKING:
    from sim.record import Run, WorkerRecord

STEPS = 10
SHAPES = {"big": (40,), "small": (3,)}


def elastic(*faults: Any, policy: str = "bsp", **cluster: Any) -> Run:
    """Run two workers that take steps of a second, and those that the faults bring."""
    settings: dict[str, Any] = {"workers": 2, "servers": 2, "max_workers": 4, "chunk_bytes": 64, "split_bytes": 32}
    job, change = cluster.pop("job", JobSection()), cluster.pop("change", ())
    keys = cluster.pop("tensors", ("big", "small"))
    scenario = Scenario(
        policies=(policy,),
        steps=STEPS,
        cluster=ClusterSection(**{**settings, **cluster}),
        compute=Constant(mean=1.0),
        network=NetworkSection(latency=0.01),
        tensor=tuple(TensorSection(key=key, shape=SHAPES[key]) for key in keys),
        fault=faults,
        job=job,
        change=change,
    )
    run = simulate(scenario, policy, 1)
    assert find_violations(run) == []
    return run


def worker(run: Run, number: int) -> WorkerRecord:
    """Return what a worker has done."""
    return run.worker_by_name[f"worker-{number}"]


def rounds_of(run: Run, key: str = "big", start: int = 0) -> list[list[int]]:
    """Return the ranks in each version of a chunk."""
    return [update.ranks for update in run.updates if (update.key, update.start) == (key, start)]


def test_scenario_65_a_worker_is_admitted_at_the_next_boundary_and_no_round_is_lost() -> None:
    """It asks during the fourth step, so the rounds from the fifth or sixth on are those of three workers."""
    run = elastic(Join(node="worker-2", at=3.5))
    [since] = run.since["worker-2"]
    assert since in (4, 5)
    for key, start in dict.fromkeys((update.key, update.start) for update in run.updates):
        assert rounds_of(run, str(key), start) == [[0, 1]] * since + [[0, 1, 2]] * (STEPS - since)
    assert [len(worker(run, number).steps) for number in range(3)] == [STEPS, STEPS, STEPS - since]
    assert lacking_progress(run) == []


def test_the_others_wait_for_its_first_step_only() -> None:
    """A step takes a second, and one of theirs has begun when the newcomer begins with its first."""
    alone, joined = elastic(), elastic(Join(node="worker-2", at=3.5))
    assert joined.elapsed - alone.elapsed < 1.2


def test_two_come_one_after_the_other() -> None:
    run = elastic(Join(node="worker-2", at=2.5), Join(node="worker-3", at=2.6))
    sizes = Counter(map(len, rounds_of(run)))
    assert sorted(sizes) == [2, 3, 4]
    assert sum(sizes.values()) == STEPS
    assert run.since["worker-2"] < run.since["worker-3"]


def test_a_worker_leaves_behind_its_open_round_and_nobody_waits_for_it() -> None:
    run = elastic(Leave(node="worker-1", after=4))
    assert rounds_of(run) == [[0, 1]] * 4 + [[0]] * (STEPS - 4)
    assert worker(run, 1).left
    assert run.elapsed == pytest.approx(elastic().elapsed, abs=0.2)


def test_below_the_minimum_the_job_waits_for_who_joins() -> None:
    """It goes on with the fifth round as soon as another one counts; that one was started ten seconds later."""
    run = elastic(Leave(node="worker-1", after=4), Join(node="worker-2", at=14.5), min_workers=2)
    assert rounds_of(run) == [[0, 1]] * 4 + [[0, 2]] * (STEPS - 4)
    assert run.elapsed > 14.5 + STEPS - 4


def test_a_worker_that_was_evicted_joins_again() -> None:
    crash = Crash(node="worker-1", at=3.5, restart=1.0)
    run = elastic(crash, on_worker_loss="shrink", death_timeout=3.0, heartbeat=0.5)
    sizes = [len(ranks) for ranks in rounds_of(run)]
    assert sizes == [2] * 3 + [1] * (len(sizes) - 3 - sizes[3:].count(2)) + [2] * sizes[3:].count(2)
    assert 2 in sizes[4:]
    assert lacking_progress(run) == []


@pytest.mark.parametrize("policy", ["asp", "ssp:1"])
def test_without_rounds_it_begins_at_once(policy: str) -> None:
    run = elastic(Join(node="worker-2", at=3.5), policy=policy)
    mine = [update for update in run.updates if update.ranks == [2] and update.key == "small"]
    assert len(mine) == len(worker(run, 2).steps) >= STEPS - 6


@pytest.mark.parametrize("policy", ["k_async:3", "k_sync:3", "quorum:3:9.0", "backup:0"])
def test_where_one_server_decides_rounds_are_of_all_who_are_there(policy: str) -> None:
    """It asks during the fourth step, makes three, and leaves; no round waits for it afterwards, and none is lost."""
    leaves = Leave(node="worker-2", after=3, planned=True)
    run = elastic(Join(node="worker-2", at=3.5), leaves, policy=policy)
    rounds = rounds_of(run)
    # One of the others may be late for the first round with it.
    first = rounds.index(next(ranks for ranks in rounds if 2 in ranks))
    assert rounds == [[0, 1]] * first + [[0, 1, 2]] * 3 + [[0, 1]] * (STEPS - first - 3)
    assert first in (3, 4, 5)
    for key, start in dict.fromkeys((update.key, update.start) for update in run.updates):
        assert rounds_of(run, str(key), start) == rounds
    assert lacking_progress(run) == []


@pytest.mark.parametrize("at", [1.5, 3.5, 4.4, 6.5])
def test_it_joins_in_the_phase_that_is_in_force(at: float) -> None:
    """The first half of the steps is in step; behind it each push is an update of its own."""
    half = STEPS // 2
    run = elastic(Join(node="worker-2", at=at), policy=f"sync_switch:0.5:{STEPS}")
    [since] = run.since["worker-2"]
    rounds, early = rounds_of(run), min(since, half)
    assert rounds[:half] == [[0, 1]] * early + [[0, 1, 2]] * (half - early)
    alone = len(worker(run, 2).steps) - (half - early)
    assert Counter(map(tuple, rounds[half:])) == {(0,): half, (1,): half, (2,): alone}
    assert lacking_progress(run) == []


@pytest.mark.parametrize("at", [1.5, 3.5, 4.4, 6.5])
@pytest.mark.parametrize("policies", [("bsp", "asp"), ("asp", "bsp"), ("asp", "k_async:3")])
def test_policies_change_while_workers_come_and_go(at: float, policies: tuple[str, str]) -> None:
    """After half of its steps each worker asks for the other one, and who comes later than that is told."""
    first, second = policies
    half = STEPS // 2
    change = (ChangeSection(after=half, policy=second),)
    run = elastic(Join(node="worker-2", at=at), policy=first, change=change)
    [since] = run.since["worker-2"]
    together = sum(len(ranks) > 1 for ranks in rounds_of(run))
    assert together == half
    taken = sum(len(ranks) for ranks in rounds_of(run))
    assert taken == 2 * STEPS + len(worker(run, 2).steps)
    assert len(worker(run, 2).steps) == STEPS - since
    assert lacking_progress(run) == []


@pytest.mark.parametrize("at", [0.5, 1.5, 3.5, 4.4, 6.5])
def test_who_joins_where_all_take_turns_is_at_the_same_step_as_the_others_when_they_meet(at: float) -> None:
    run = elastic(Join(node="worker-2", at=at), policy="round_robin", job=JobSection(barrier_every=1))
    [since] = run.since["worker-2"]
    rounds = [rank for ranks in rounds_of(run) for rank in ranks]
    assert rounds == [0, 1] * since + [2, 0, 1] * (STEPS - since)
    assert lacking_progress(run) == []


def test_barriers_open_with_those_who_count() -> None:
    run = elastic(Join(node="worker-2", at=3.5), job=JobSection(barrier_every=1))
    assert lacking_progress(run) == []


def test_one_that_dies_while_it_joins_holds_nobody_up() -> None:
    for at in (3.5, 3.6, 4.5, 5.1):
        run = elastic(
            Join(node="worker-2", at=3.4), Crash(node="worker-2", at=at), on_worker_loss="shrink", death_timeout=5.0
        )
        assert [len(worker(run, number).steps) for number in range(2)] == [STEPS, STEPS]


TEXT = """
policies = ["bsp"]
steps = 5
[cluster]
workers = 2
max_workers = 3
[compute]
law = "constant"
mean = 1.0
[[tensor]]
key = "w"
shape = [4]
[[fault]]
kind = "join"
node = "worker-2"
at = 2.5
"""


def test_a_file_says_who_joins() -> None:
    scenario = parse_scenario(TEXT.encode(), "my.toml")
    assert scenario.workers == ["worker-0", "worker-1", "worker-2"]
    assert msgspec.structs.replace(scenario, fault=()).workers == ["worker-0", "worker-1"]


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("max_workers = 3\n", "", "cluster.max_workers: expected 3, for that many workers are there, got 0"),
        ('node = "worker-2"', 'node = "worker-7"', "fault[0].node: expected worker-2, in the order in which they come"),
        ('["bsp"]', '["closed"]', "policies: nobody can join a running job with closed"),
        ("max_workers = 3", "max_workers = 3\nrestarts = 1", "cluster.restarts: the workers are the same"),
    ],
)
@pytest.mark.usefixtures("closed_policy")
def test_a_file_that_can_not_be(before: str, after: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_scenario(TEXT.replace(before, after).encode(), "my.toml")
    assert problem in str(caught.value)


def test_a_worker_that_plans_to_leave_is_in_no_round_after_the_same_one_of_all_keys() -> None:
    """By then nobody can be beyond the step after its fourth, so it makes one more, or two."""
    run = elastic(Leave(node="worker-1", after=4, planned=True))
    last = run.until["worker-1"]
    assert 5 <= last <= 6
    assert len(run.workers[1].steps) == last
    assert run.workers[1].left
    rounds = {(update.key, update.start, update.version): update.ranks for update in run.updates}
    assert all((1 in ranks) == (version <= last) for (_, _, version), ranks in rounds.items())


@pytest.mark.parametrize("at", [3.6, 3.605, 3.61, 3.615, 3.62, 3.63, 3.65, 4.5])
def test_a_newcomer_waits_for_a_scheduler_that_is_started_again(at: float) -> None:
    """The scheduler ends when it has heard nothing of the newcomer yet, while it lets it in, or afterwards."""
    run = elastic(Join(node="worker-2", at=3.6), Crash(node="scheduler", at=at, restart=1.5))
    assert lacking_progress(run) == []
    assert worker(run, 2).error is None
    assert len(run.since["worker-2"]) == 1


@pytest.mark.parametrize("at", [4.0, 4.5])
def test_after_a_restart_of_the_scheduler_a_newcomer_counts_where_it_was_said(at: float) -> None:
    """One of the others has asked by then who makes the next step, and the slow one does so afterwards."""
    join, crash = Join(node="worker-2", at=3.6), Crash(node="scheduler", at=at, restart=1.5)
    run = elastic(join, crash, Slow(node="worker-1", factor=2.0), policy="ssp:3")
    assert run.since["worker-2"] == elastic(join, Slow(node="worker-1", factor=2.0), policy="ssp:3").since["worker-2"]
    assert lacking_progress(run) == []


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_who_takes_a_place_after_two_servers_were_lost_is_told_the_clock_of_its_step(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """The copy that the second one leaves was made when there were fewer steps."""
    told: list[tuple[int, int]] = []
    go_on = PushCounts.go_on

    def listen(counts: PushCounts, pushes: Any) -> int:
        told.append((step := go_on(counts, pushes), counts.clock))
        return step

    monkeypatch.setattr(PushCounts, "go_on", listen)
    crashes = [Crash(node=name, at=at, restart=0.5) for name, at in (("server-1", 2.5), ("server-0", 7.2))]
    mode = {"on_worker_loss": "shrink", "min_workers": 2, "respawn_timeout": 6.0, "max_workers": 0}
    times = {"heartbeat": 0.5, "death_timeout": 3.0}
    lost = Crash(node="worker-1", at=8.5, restart=1.0)
    elastic(*crashes, lost, policy=policy, tensors=("small",), servers=3, replication=2, **mode, **times)
    assert told == [(0, 0), (0, 0), (7, 7)]
