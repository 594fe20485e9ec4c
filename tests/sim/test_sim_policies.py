"""Whole runs under every policy, with all checks on, and small ones that can be worked out by hand."""

from __future__ import annotations

import csv
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from aiokv.errors import ConfigError
from aiokv.policy import policy_names
from sim import cli
from sim.assertions import parse_assertion
from sim.cluster import simulate
from sim.compute import Constant, Exponential
from sim.fates import Fate, fates
from sim.faults import Pause, Slow
from sim.report import summarise, worker_rows
from sim.scenario import parse_scenario
from sim.sections import ClusterSection, JobSection, NetworkSection, TensorSection
from sim.split import split

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sim.record import Run
    from sim.scenario import Scenario

POLICIES = (
    *("bsp", "sum", "asp", "ssp:3", "essp:2", "dssp:1:4", "pbsp:2", "pssp:2:1", "backup:2", "k_sync:6"),
    *("k_batch_sync:4", "k_async:4", "k_batch_async:4", "adasync:2", "quorum:6:0.5:3", "ringmaster:8"),
    *("round_robin", "sync_switch:0.2:30"),
)
TENSORS = (TensorSection(key="large", shape=(40_000,)), TensorSection(key="small", shape=(4,)))


def test_every_policy_is_among_them() -> None:
    assert {policy.partition(":")[0] for policy in POLICIES} == set(policy_names())


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_policy_promises_holds_in_a_cluster_that_is_disturbed(
    make_scenario: Callable[..., Scenario], policy: str, servers: int, cancel: bool
) -> None:
    scenario = make_scenario(
        8,
        30,
        cluster=ClusterSection(workers=8, servers=servers),
        network=NetworkSection(latency=0.02, jitter=0.05, bandwidth=1e6),
        job=JobSection(cancel=cancel),
        tensor=TENSORS,
        fault=(Pause(node="worker-1", at=3.0, duration=2.0), Slow(node="worker-2", factor=3.0)),
    )
    run = simulate(scenario, policy, 1)
    for name, fate in fates(run).items():
        assert fate.steps == 30, f"computed is applied, dropped and in flight together, for {name}"
        # What batches are not full at the end stays on the servers.
        assert fate.open == 0 or policy.startswith("k_batch")


# --- by hand: two workers take 1 s, the third one longer ---


def three(make_scenario: Callable[..., Scenario], steps: int, slow: float, *, cancel: bool = False) -> Scenario:
    return make_scenario(3, steps, Constant(mean=1.0), slow={"worker-2": slow}, job=JobSection(cancel=cancel))


def rows(run: Run) -> dict[str, tuple[int, int, int, int]]:
    """Return how many gradients of each worker were applied, late, stale and abandoned."""
    return {row["worker"]: (row["applied"], row["late"], row["stale"], row["cancelled"]) for row in worker_rows(run)}


@pytest.mark.parametrize("policy", ["k_sync:2", "backup:1", "quorum:2:0"])
def test_slow_worker_is_late_until_the_others_have_left(make_scenario: Callable[..., Scenario], policy: str) -> None:
    run = simulate(three(make_scenario, 8, 4.5), policy, 1)
    # The two are done after 8 s. At 4.5 and 9 s the third one has read what is older than the last round.
    fast = {"worker-0": (8, 0, 0, 0), "worker-1": (8, 0, 0, 0)}
    assert rows(run) == fast | {"worker-2": (6, 2, 0, 0)}
    assert {drop.token for drop in run.drops} == {("worker-2", 1), ("worker-2", 2)}
    assert split(run, run.workers[2]).lost == 9.0
    assert summarise(run).dropped.late == pytest.approx(2 / 24)


def test_rounds_wait_for_a_slow_worker_until_it_is_evicted(make_scenario: Callable[..., Scenario]) -> None:
    run = simulate(three(make_scenario, 8, 4.5), "quorum:2:1:2", 1)
    # Two rounds last 1 s and the deadline. What the slow one brings at 4.5, 9 and 13.5 s was computed from the first
    # values, the second round and the seventh at most; then it is alone.
    assert [update.time for update in run.updates] == [2, 4, 5, 6, 7, 8, 9, 10, 18, 22.5, 27, 31.5, 36]
    assert [drop.reason for drop in run.drops] == ["evicted"] * 3
    assert [row["evicted"] for row in worker_rows(run)] == [0, 0, 3]
    assert summarise(run).dropped.evicted == summarise(run).dropped.total == pytest.approx(3 / 24)


def test_slow_worker_begins_anew_with_each_round_when_it_is_to_cancel(make_scenario: Callable[..., Scenario]) -> None:
    run = simulate(three(make_scenario, 8, 4.5, cancel=True), "k_sync:2", 1)
    assert rows(run)["worker-2"] == (0, 0, 0, 8)
    assert [step.end - step.start for step in run.workers[2].steps] == [1.0] * 8
    assert not run.drops
    assert split(run, run.workers[2]).lost == 8.0
    assert summarise(run).dropped.cancelled == pytest.approx(8 / 24)


def test_a_policy_that_drops_nothing_lets_nobody_cancel(make_scenario: Callable[..., Scenario]) -> None:
    plain, other = (simulate(three(make_scenario, 8, 4.5, cancel=cancel), "k_async:2", 1) for cancel in (False, True))
    assert plain.digest == other.digest


def test_a_fast_worker_fills_rounds_of_batches_alone(make_scenario: Callable[..., Scenario]) -> None:
    job = JobSection(cancel=True)
    run = simulate(make_scenario(2, 8, Constant(mean=1.0), slow={"worker-1": 3.0}, job=job), "k_batch_sync:2", 1)
    # When the fast one has left after 8 s, the other one has four steps of 3 s left.
    made = [(update.time, update.ranks) for update in run.updates]
    assert made == [*((time, [0, 0]) for time in (2.0, 4.0, 6.0, 8.0)), (14.0, [1, 1]), (20.0, [1, 1])]
    assert rows(run) == {"worker-0": (8, 0, 0, 0), "worker-1": (4, 0, 0, 4)}


def test_gradient_is_dropped_as_stale_from_r_newer_updates_on(make_scenario: Callable[..., Scenario]) -> None:
    run = simulate(three(make_scenario, 12, 2.5), "ringmaster:4", 1)
    # In each 2.5 s the others make 4 or 6 updates, until 12 s.
    assert [drop.time for drop in run.drops] == [2.5, 5.0, 7.5, 10.0, 12.5]
    assert rows(run)["worker-2"] == (7, 0, 5, 0)


def test_who_is_too_far_ahead_is_held_back(make_scenario: Callable[..., Scenario]) -> None:
    run = simulate(three(make_scenario, 6, 4.0), "ssp:1", 1)
    # After its second push at 2 s a fast worker is two ahead of the slow one until 4 s, then it makes a step each 4 s.
    waits = [step.end - step.computed for step in run.workers[0].steps]
    assert waits == [0.0, 2.0, 3.0, 3.0, 3.0, 3.0]
    assert [row["held_s"] for row in worker_rows(run)] == [sum(waits), sum(waits), 0.0]
    assert summarise(run).held == pytest.approx(2 * sum(waits) / sum(w.ended - w.begun for w in run.workers))


def test_reads_that_are_held_back_side_by_side_count_once(make_scenario: Callable[..., Scenario]) -> None:
    one, many = (
        simulate(make_scenario(3, 6, Constant(mean=1.0), slow={"worker-2": 4.0}, tensor=tensors), "ssp:1", 1)
        for tensors in (TENSORS[1:], TENSORS)
    )
    assert many.held == one.held


def test_a_worker_that_is_stopped_abandons_its_step_when_it_goes_on(make_scenario: Callable[..., Scenario]) -> None:
    scenario = make_scenario(
        3,
        4,
        Constant(mean=1.0),
        slow={"worker-2": 1.5},
        job=JobSection(cancel=True),
        fault=(Pause(node="worker-2", at=0.5, duration=1.0),),
    )
    first = simulate(scenario, "k_sync:2", 1).workers[2].steps[0]
    assert (first.start, first.computed, first.paused, first.cancelled) == (0.0, 1.5, 1.0, True)


def test_layers_that_are_pushed_one_by_one_cannot_be_abandoned() -> None:
    text = b'steps = 3\n[cluster]\nworkers = 2\n[compute]\nlaw = "constant"\nmean = 1.0\n'
    text += b"[job]\noverlap = true\ncancel = true\n"
    with pytest.raises(ConfigError, match=r"x\.toml, line 9: job\.cancel: .*overlap = false"):
        parse_scenario(text, "x.toml")


def test_steps_of_which_keys_belong_to_groups_cannot_be_abandoned() -> None:
    text = b'steps = 3\n[cluster]\nworkers = 2\n[compute]\nlaw = "constant"\nmean = 1.0\n'
    text += b'[job]\ncancel = true\n[[tensor]]\nkey = "w"\nshape = [4]\ngroup = [0]\n'
    with pytest.raises(ConfigError, match=r"x\.toml, line 8: job\.cancel: .*leave the groups out"):
        parse_scenario(text, "x.toml")


# --- what is told ---


def test_staleness_and_fates_are_counted_for_each_worker(make_scenario: Callable[..., Scenario]) -> None:
    run = simulate(make_scenario(2, 3, Constant(mean=1.0), slow={"worker-1": 2.5}), "asp", 1)
    # Pushes come at 1, 2.5, 2, 3, 5 and 7.5 s.
    found = fates(run)
    assert found["worker-0"] == Fate(applied=3, dropped=Counter(cancelled=0), staleness=Counter({0: 2, 1: 1}))
    assert found["worker-1"] == Fate(applied=3, dropped=Counter(cancelled=0), staleness=Counter({2: 1, 1: 1, 0: 1}))


FILE = """
policies = ["bsp", "ssp:3", "quorum:2:0.5"]
steps = 12
assertions = ["ssp:3.staleness_max <= 20", "quorum:2:0.5.dropped >= 0 %", "held < 100 %"]
[cluster]
workers = 3
[compute]
law = "exponential"
mean = 1.0
[slow]
worker-2 = 3.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    return path


def test_run_names_policies_with_their_options_in_all_that_it_writes(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(cli.sim, ["run", str(file), "--json", "--out", str(out)])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    assert list(document["policies"]) == ["bsp", "ssp:3", "quorum:2:0.5"]
    quorum = document["policies"]["quorum:2:0.5"]
    assert 0 < quorum["dropped"]["late"] < 1
    assert sum(worker["late"] for worker in quorum["workers"]) == round(36 * quorum["dropped"]["late"])
    assert document["policies"]["ssp:3"]["held"] > 0
    assert document["policies"]["ssp:3"]["staleness_by_worker"].keys() == {"worker-0", "worker-1", "worker-2"}
    names = {path.name for path in out.iterdir()}
    assert {"mine-ssp-3.trace.json", "mine-quorum-2-0.5.trace.json", "mine-staleness.csv"} <= names
    with (out / "mine-drops.csv").open(newline="") as table:
        drops = list(csv.DictReader(table))
    assert {drop["policy"] for drop in drops} == {"quorum:2:0.5"}
    assert {drop["reason"] for drop in drops} == {"late"}
    page = (out / "mine.html").read_text()
    assert "What became of each worker's gradients." in page


def test_sweep_compares_policies_with_options(file: Path) -> None:
    settings = ["--set", "policy=bsp,ssp:3,backup:2", "--replications", "2"]
    result = CliRunner().invoke(cli.sim, ["sweep", str(file), *settings, "--json"])
    assert result.exit_code == 0, result.output
    assert [row["setting"] for row in json.loads(result.stdout)] == ["policy=bsp", "policy=ssp:3", "policy=backup:2"]


def test_a_sentence_may_be_about_a_policy_with_options() -> None:
    sentence = parse_assertion("quorum:2:0.5.p95_step < 80 ms", ["quorum:2:0.5"])
    assert (sentence.policy, sentence.metric) == ("quorum:2:0.5", "p95_step")


def test_equal_seeds_give_equal_runs_under_a_policy_that_cancels(make_scenario: Callable[..., Scenario]) -> None:
    scenario = make_scenario(4, 20, Exponential(mean=1.0), job=JobSection(cancel=True))
    assert simulate(scenario, "k_sync:3", 5).digest == simulate(scenario, "k_sync:3", 5).digest
