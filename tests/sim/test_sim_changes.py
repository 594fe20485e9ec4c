"""Scenarios whose policy changes at a step, and that each policy is held to its promises while it is in force."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import ConfigError
from sim.checks import find_violations
from sim.cluster import simulate
from sim.compute import Constant
from sim.learning import curve_of
from sim.random_scenarios import random_scenario
from sim.report import notes
from sim.scenario import parse_scenario
from sim.sections import ChangeSection, LearningSection, NetworkSection, TensorSection

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.record import Run
    from sim.scenario import Scenario

POLICIES = ("bsp", "asp", "ssp:1", "backup:1", "k_batch_async:2", "ringmaster:2", "round_robin", "adasync:1")

TABLE = """\
steps = 20

[cluster]
workers = 3

[compute]
law = "constant"
mean = 1

[[change]]
after = 5
policy = "ssp:3"
"""


@pytest.fixture
def changing(make_scenario: Callable[..., Scenario]) -> Callable[..., Run]:
    """Return a function that runs three workers, one of which takes three times as long; all take eight steps."""

    def run(policy: str, *changes: tuple[int, str], **fields: Any) -> Run:
        change = tuple(ChangeSection(after=after, policy=each) for after, each in changes)
        scenario = make_scenario(3, 8, Constant(mean=1.0), slow={"worker-2": 3.0}, change=change, **fields)
        made = simulate(scenario, policy, 1)
        assert [worker.error for worker in made.workers] == [None] * 3
        assert find_violations(made) == []
        return made

    return run


def ends(run: Run) -> list[float]:
    return [worker.steps[-1].end for worker in run.workers]


def test_from_the_change_on_nobody_waits_for_the_slow_worker(changing: Callable[..., Run]) -> None:
    # Four rounds of three seconds each, then four steps of a second each for those who are fast.
    run = changing("bsp", (4, "asp"))
    assert ends(run) == pytest.approx([16.0, 16.0, 24.0])
    assert [len(update.ranks) for update in run.updates] == [3] * 4 + [1] * 12


def test_the_fast_wait_until_the_slow_one_has_come_as_far(changing: Callable[..., Run]) -> None:
    run = changing("asp", (4, "bsp"))
    assert run.workers[0].steps[3].end == pytest.approx(12.0)
    assert run.workers[0].steps[3].waiting == pytest.approx(8.0)
    assert ends(run) == pytest.approx([24.0] * 3)
    assert [len(update.ranks) for update in run.updates] == [1] * 12 + [3] * 4


def test_leads_are_counted_from_the_change_on(changing: Callable[..., Run]) -> None:
    # ssp:1 lets a worker begin its third step when the slowest has made one: three seconds after the change.
    run = changing("bsp", (4, "ssp:1"))
    assert [step.end - 12.0 for step in run.workers[0].steps[4:]] == pytest.approx([1.0, 3.0, 6.0, 9.0])


def test_a_policy_may_change_more_than_once(changing: Callable[..., Run]) -> None:
    run = changing("bsp", (2, "asp"), (4, "bsp"))
    assert [len(update.ranks) for update in run.updates] == [3] * 2 + [1] * 6 + [3] * 4


def test_a_change_to_the_policy_that_is_in_force_is_none(changing: Callable[..., Run]) -> None:
    assert changing("asp", (4, "asp")).digest == changing("asp").digest


@pytest.mark.parametrize("second", POLICIES)
@pytest.mark.parametrize("first", POLICIES)
def test_every_policy_can_follow_every_other_one(changing: Callable[..., Run], first: str, second: str) -> None:
    # Two tensors go together, and a third one lies on both servers.
    tensors = (TensorSection(key="a", shape=(3,)), TensorSection(key="b", shape=(5,)))
    large = TensorSection(key="c", shape=(400_000,))
    network = NetworkSection(latency=0.001)
    run = changing(first, (4, second), tensor=(*tensors, large), network=network, uneven={"worker-1": 3})
    assert [len(worker.steps) for worker in run.workers] == [8, 3, 8]


def test_the_loss_is_that_of_all_updates_also_when_a_bundle_is_divided(changing: Callable[..., Run]) -> None:
    tensors = (TensorSection(key="a", shape=(1,)), TensorSection(key="b", shape=(1,)))
    learning = LearningSection(workload="quadratic", params={"learning_rate": 0.1})
    run = changing("bsp", (4, "backup:0"), tensor=tensors, learning=learning)
    # x becomes 0.9 x in each of eight rounds.
    assert curve_of(run).losses == pytest.approx([0.81**n / 2.0 for n in range(9)])


# --- what is looked after ---


def test_a_round_that_mixes_policies_is_found(changing: Callable[..., Run]) -> None:
    run = changing("bsp", (4, "k_sync:3"))
    run.updates[3].tokens = [*run.updates[3].tokens[:2], ("worker-2", 5)]
    assert any("gradients of before and after a change" in text for text in find_violations(run))


def test_a_gradient_of_a_policy_that_is_over_is_found(changing: Callable[..., Run]) -> None:
    run = changing("asp", (4, "ssp:3"))
    run.updates[11], run.updates[12] = run.updates[12], run.updates[11]
    run.updates[11].version, run.updates[12].version = 12, 13
    found = find_violations(run)
    assert any("holds gradients of policy asp, which is not in force any longer" in text for text in found)


@pytest.mark.parametrize(("place", "policy"), [(1, "bsp"), (5, "k_sync:3")])
def test_a_round_of_too_few_is_found_under_either_policy(changing: Callable[..., Run], place: int, policy: str) -> None:
    run = changing("bsp", (4, "k_sync:3"))
    update = run.updates[place]
    update.ranks.pop()
    update.staleness.pop()
    update.tokens = update.tokens[:-1]
    assert any(f"version {place + 1} holds 2 gradients, {policy} wants 3" in text for text in find_violations(run))


# --- scenario files ---


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("ssp:3", "spp:3", "my.toml, line 12: change[0].policy: unknown policy 'spp'"),
        ("ssp:3", "sum", "my.toml, line 12: change[0].policy: keys of policy sum keep it"),
        ("after = 5", "after = 20", "my.toml, line 11: change[0].after: expected 1 to 19, got 20"),
        ("steps = 20", 'steps = 20\npolicies = ["sum"]', "my.toml, line 13: change[0].policy: keys of policy sum"),
        ("workers = 3", 'workers = 3\non_worker_loss = "respawn"', "my.toml, line 5: cluster.on_worker_loss:"),
        (
            "workers = 3",
            'workers = 3\non_worker_loss = "shrink"\nrespawn_timeout = 1.0\nmin_workers = 2',
            "my.toml, line 7: cluster.min_workers:",
        ),
        ("[[change]]", "[job]\ncancel = true\n\n[[change]]", "my.toml, line 11: job.cancel:"),
        (
            "[[change]]",
            '[[change]]\nafter = 7\npolicy = "bsp"\n[[change]]',
            "my.toml, line 14: change[1].after: expect",
        ),
    ],
)
def test_a_change_that_can_not_be_is_named(old: str, new: str, expected: str) -> None:
    assert old in TABLE
    with pytest.raises(ConfigError) as caught:
        parse_scenario(TABLE.replace(old, new).encode(), "my.toml")
    assert expected in str(caught.value)


def test_the_report_says_what_the_policy_becomes() -> None:
    scenario = parse_scenario(TABLE.encode(), "my.toml")
    runs = {policy: [simulate(scenario, policy, 0)] for policy in scenario.policies}
    assert "after 5 steps of a worker its policy becomes ssp:3" in notes(runs)


def test_random_scenarios_change_their_policies() -> None:
    changes = [scenario.change for seed in range(300) if (scenario := random_scenario(seed)).change]
    assert {len(change) for change in changes} == {1, 2}
    assert all(change.after < 8 for each in changes for change in each)
