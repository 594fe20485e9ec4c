"""Jobs that are started again when they fail: when they are done, what is lost, and what goes on."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from aiokv.errors import ConfigError
from sim import cli
from sim.compute import Constant, Exponential, step_times
from sim.faults import Bursts, Crash, Hang, HeartbeatLoss, Late, Link, Pause, Poison, Slow, Spot, Torn
from sim.job import simulate_job
from sim.origin import Origin, since
from sim.report import notes, summarise
from sim.scenario import parse_scenario
from sim.sections import ClusterSection, JobSection, TensorSection
from sim.timeline import Disturbance, Strike, draw_timeline

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sim.record import Job, Run
    from sim.scenario import Scenario

STEPS = 10
CRASH = Crash(node="server-0", at=6.5)
"""In the middle of the seventh step."""


@pytest.fixture
def run_job(make_scenario: Callable[..., Scenario]) -> Callable[..., Run]:
    """Return a function that runs a job of two workers with steps of a second, which is started again after five."""

    def run(*faults: Any, policy: str = "bsp", restarts: int = 3, **fields: Any) -> Run:
        settings = {name: fields.pop(name) for name in list(fields) if name in ClusterSection.__struct_fields__}
        cluster = ClusterSection(workers=2, restarts=restarts, restart_seconds=5.0, **settings)
        law = fields.pop("law", Constant(mean=1.0))
        return simulate_job(make_scenario(2, STEPS, law, fault=faults, cluster=cluster, **fields), policy, 1)

    return run


def job_of(run: Run) -> Job:
    assert run.job is not None
    return run.job


def test_a_job_goes_on_from_its_newest_checkpoint(run_job: Callable[..., Run]) -> None:
    run = run_job(CRASH, checkpoint_every=4)
    first, second = job_of(run).lives
    assert (first.end, first.made, first.kept, first.error) == (6.5, 12, 8, "server-0 crashed")
    # Six steps are left, and the crash is not repeated.
    assert (second.begin, second.end, second.done, second.made, second.error) == (11.5, 17.5, 8, 12, "")
    found = summarise(run).job
    assert (found.seconds, found.lives, found.lost_steps) == (17.5, 2.0, 4.0)
    assert found.useful == pytest.approx(20.0 / 35.0)


def test_without_a_checkpoint_a_job_begins_anew(run_job: Callable[..., Run]) -> None:
    found = summarise(run_job(CRASH)).job
    assert (found.seconds, found.lost_steps) == (21.5, 12.0)


def test_scenario_72_a_job_goes_on_from_what_its_workers_have_when_the_servers_are_lost(
    run_job: Callable[..., Run],
) -> None:
    run = run_job(CRASH, checkpoint_every=4, reseed=True)
    assert [(life.made, life.kept) for life in job_of(run).lives] == [(12, 12), (8, 8)]
    assert summarise(run).job.lost_steps == 0


@pytest.mark.parametrize(("slower", "kept"), [("worker-0", [2, 5]), ("worker-1", [5, 2])])
def test_workers_that_are_not_in_step_keep_their_own_counts_when_one_of_them_brings_its_weights(
    run_job: Callable[..., Run], slower: str, kept: list[int]
) -> None:
    run = run_job(Crash(node="server-0", at=5.5), policy="asp", slow={slower: 2.0}, reseed=True)
    assert [worker.steps.answered for worker in run.workers] == kept
    assert job_of(run).lives[0].kept == 7


def test_who_is_lost_with_the_servers_brings_nothing(run_job: Callable[..., Run]) -> None:
    """What is left then is in the checkpoints."""
    crashes = [Crash(node=f"worker-{rank}", at=6.5) for rank in range(2)]
    run = run_job(*crashes, CRASH, checkpoint_every=4, reseed=True)
    assert job_of(run).lives[0].kept == 8


def test_a_torn_checkpoint_is_passed_over(run_job: Callable[..., Run]) -> None:
    run = run_job(CRASH, Torn(node="server-0", at=4.5), checkpoint_every=2)
    assert [life.kept for life in job_of(run).lives] == [4, 16]


def test_a_job_goes_on_from_what_its_workers_have_saved(run_job: Callable[..., Run]) -> None:
    run = run_job(CRASH, job=JobSection(save_every=3))
    assert [life.kept for life in job_of(run).lives] == [12, 8]
    assert job_of(run).seconds == 15.5


def test_a_job_that_nothing_happens_to_is_started_once(run_job: Callable[..., Run]) -> None:
    run = run_job(checkpoint_every=4)
    assert (job_of(run).seconds, job_of(run).useful) == (10.0, 1.0)
    assert "bsp: the job was started once and done after 10 s; 0 steps" in "\n".join(notes({"bsp": [run]}))


def test_a_job_that_fails_too_often_is_never_done(run_job: Callable[..., Run]) -> None:
    run = run_job(Crash(node="worker-0", at=3.5, restart=0.1, times=9, every=8.0), restarts=2)
    assert [life.error for life in job_of(run).lives] == ["worker-0 crashed"] * 3
    assert summarise(run).job.seconds == math.inf
    assert "the job was started 3 times and never done" in "\n".join(notes({"bsp": [run]}))


def test_a_worker_that_fails_ends_a_life_too(run_job: Callable[..., Run]) -> None:
    run = run_job(Hang(node="worker-1", at=2.5), checkpoint_every=1, death_timeout=8.0)
    first = job_of(run).lives[0]
    # It is noticed when nothing was heard for so long.
    assert 8.0 < first.end < 2.5 + 8.0 + 2.0
    assert "rank 1" in first.error
    assert len(job_of(run).lives) == 2


def test_a_lost_worker_does_not_end_a_job_that_shrinks(run_job: Callable[..., Run]) -> None:
    crash = Crash(node="worker-1", at=2.5)
    assert [life.made for life in job_of(run_job(crash, on_worker_loss="shrink")).lives] == [STEPS + 2]
    # With the server goes all that is not in a checkpoint.
    both = job_of(run_job(crash, CRASH, on_worker_loss="shrink", checkpoint_every=1))
    assert [life.error for life in both.lives] == ["server-0 crashed", ""]


def test_workers_that_are_not_in_step_go_on_from_where_each_was(run_job: Callable[..., Run]) -> None:
    run = run_job(CRASH, policy="asp", slow={"worker-1": 2.0}, checkpoint_every=2)
    first, second = job_of(run).lives
    # When the fast worker made its third push, after which the first checkpoint is, the slow one had made one.
    assert (first.made, first.kept) == (6 + 3, 2 + 1)
    assert (second.done, second.made) == (3, 8 + 9)
    assert job_of(run).seconds == 11.5 + 18.0


def test_steps_take_in_a_later_life_what_they_would_have_taken(run_job: Callable[..., Run]) -> None:
    law = Exponential(mean=1.0)
    run = run_job(Crash(node="server-0", at=5.0), law=law, checkpoint_every=1, policy="asp")
    second = job_of(run).lives[1]
    times = [
        list(itertools.islice(step_times(law, factor=1.0, seed=1, worker=f"worker-{rank}"), STEPS)) for rank in (0, 1)
    ]
    left = [sum(column[count:]) for column in times for count in (range(STEPS))]
    assert second.done > 0
    assert any(second.end - second.begin == pytest.approx(rest) for rest in left)


def test_the_useful_share_is_that_of_renewals(make_scenario: Callable[..., Scenario]) -> None:
    """Exponential failures, but none while nothing runs: W / ((M + R) (e^((W + d) / M) - 1))."""
    work, cost, mtbf, restart = 10.0, 2.0, 50.0, 5.0
    job = JobSection(save_every=10, save_bandwidth=4000.0 / cost)
    scenario = make_scenario(
        1,
        500,
        Constant(mean=1.0),
        cluster=ClusterSection(workers=1, restarts=1000, restart_seconds=restart),
        fault=(Spot(node="worker-0", scale=mtbf, restart=restart),),
        job=job,
        tensor=(TensorSection(key="w", shape=(1000,)),),
    )
    shares = [job_of(simulate_job(scenario, "bsp", seed, check=False)).useful for seed in range(20)]
    expected = work / ((mtbf + restart) * math.expm1((work + cost) / mtbf))
    error = statistics.stdev(shares) / math.sqrt(len(shares))
    assert statistics.fmean(shares) == pytest.approx(expected, abs=3.0 * error)
    assert error < 0.05


# --- what goes on in a later life ---


def test_what_changes_the_pace_of_a_worker_goes_on(run_job: Callable[..., Run]) -> None:
    # The second life begins at 11.5 and has six steps: two as usual, four that take twice as long.
    run = run_job(CRASH, Slow(node="worker-0", factor=2.0, at=13.5), checkpoint_every=4)
    assert job_of(run).seconds == 11.5 + 2.0 + 8.0


def test_all_times_of_a_timeline_are_those_of_the_later_run(make_scenario: Callable[..., Scenario]) -> None:
    link = Link(node="worker-0", to="server-0", both=False, at=5.0, duration=30.0, loss=0.5)
    scenario = make_scenario(
        2,
        9,
        fault=(
            Crash(node="worker-0", at=3.0, restart=1.0, times=2, every=20.0),
            Pause(node="worker-1", at=4.0, duration=1.0),
            Pause(node="worker-1", at=30.0, duration=2.0),
            Late(node="server-0", at=12.0),
            Late(node="worker-1", at=2.0),
            HeartbeatLoss(node="worker-0", at=8.0, duration=5.0),
            Poison(node="worker-1", step=7),
            Torn(node="server-0", at=11.0),
            Bursts(node="worker-0", factor=2.0, gap=1.0, duration=1.0),
            link,
        ),
    )
    whole = draw_timeline(scenario, 1)
    later = since(whole, Origin(10.0, {"worker-0": 5, "worker-1": 4}), 1)
    assert later.strikes == [Strike(13.0, "worker-0", "crash"), Strike(20.0, "worker-1", "pause", 2.0)]
    assert later.starts == {"server-0": 2.0}
    assert later.deaf == {"worker-0": [(-2.0, 3.0)]}
    assert later.poisoned == {("worker-1", 3)}
    assert [torn.at for torn in later.torn["server-0"]] == [1.0]
    assert later.disturbances == [Disturbance("worker-0", "server-0", -5.0, 25.0, link)]
    assert later.paces["worker-1"].pauses == [(20.0, 22.0)]
    begun = [
        next(draw_timeline(scenario, 1).paces["worker-0"].bursts[0])[0],
        next(later.paces["worker-0"].bursts[0])[0],
    ]
    assert begun[0] - 10.0 == pytest.approx(begun[1])


# --- scenario files, and what is shown ---

TABLE = """\
steps = 6
policies = ["bsp", "asp"]
assertions = ["job_time < 20 s", "bsp.lost_steps == 4"]

[cluster]
workers = 2
restarts = 2
restart_seconds = 1
checkpoint_every = 1

[compute]
law = "constant"
mean = 1

[[fault]]
kind = "crash"
node = "server-0"
at = 3.5
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "[[fault]]",
            '[[change]]\nafter = 2\npolicy = "ssp:1"\n[[fault]]',
            "cluster.restarts: a job that is started again",
        ),
        ("[[fault]]", '[learning]\nworkload = "quadratic"\n[[fault]]', "cluster.restarts: losses are those of one run"),
        ("[[fault]]", "[stop]\ntime = 3\n[[fault]]", "cluster.restarts: a job is started again until it is done"),
        (
            "restarts = 2",
            'restarts = 2\non_worker_loss = "respawn"',
            "cluster.restarts: workers come back by themselves",
        ),
        ("restarts = 2\n", "", "'job_time' needs a job that is started again: set cluster.restarts"),
    ],
)
def test_what_does_not_go_with_restarts_is_named(old: str, new: str, expected: str) -> None:
    assert old in TABLE
    with pytest.raises(ConfigError) as caught:
        parse_scenario(TABLE.replace(old, new).encode(), "my.toml")
    assert expected in str(caught.value)


def test_the_command_shows_and_asserts_what_became_of_the_job(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(TABLE)
    result = CliRunner().invoke(cli.sim, ["run", str(path), "--json", "--out", str(tmp_path)])
    numbers = json.loads(result.stdout)["policies"]["bsp"]
    # The checkpoint of the second round is complete when all go on to the fourth.
    assert [life["kept"] for life in numbers["lives"]] == [4, 8]
    assert numbers["job"]["seconds"] == 8.5
    assert result.exit_code == 1
    assert "expected bsp.lost_steps == 4, got lost_steps = 2" in result.stderr
    shown = CliRunner().invoke(cli.sim, ["run", str(path), "--out", str(tmp_path)]).stdout
    assert "job done after (s)" in shown
    assert "starts of the job" in shown


def test_sweeps_compare_how_long_the_job_takes(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(TABLE)
    options = ["--set", "policy=bsp", "--set", "cluster.checkpoint_every=0,1", "--replications", "2", "--json"]
    rows = json.loads(CliRunner().invoke(cli.sim, ["sweep", str(path), *options]).stdout)
    assert [row["values"]["job_time"][0] for row in rows] == [10.5, 8.5]
