"""What would help, against numbers by hand."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from sim import cli
from sim.advice import (
    advise,
    best_backups,
    break_even_servers,
    evict,
    knee,
    saturation_of,
    skew_of,
    step_matrix,
    transfers_of,
)
from sim.blame import alternatives, blame
from sim.cluster import simulate
from sim.compute import Constant, Exponential
from sim.faults import Crash, Join, Link, Pause, Slow, Spot
from sim.sections import ClusterSection, NetworkSection, ServerSection, TensorSection
from sim.timeline import draw_timeline

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sim.record import Run
    from sim.scenario import Scenario

PERSISTENT = {"a": [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0], "c": [2.0, 2.0, 2.0]}
INDEPENDENT = {
    "a": [2.0, 1.0, 1.0, 1.0],
    "b": [1.0, 2.0, 1.0, 1.0],
    "c": [1.0, 1.0, 2.0, 1.0],
    "d": [1.0, 1.0, 1.0, 2.0],
}


def test_the_same_slow_worker_in_every_step_is_persistent_skew() -> None:
    skew = skew_of(PERSISTENT)
    assert (skew.mean, skew.barrier, skew.slowest_mean) == pytest.approx((4 / 3, 2.0, 2.0))
    assert skew.slowest == "c"
    # Workers wait from 4/3 to 2, and equal batches would take all of that away.
    assert (skew.loss, skew.persistent, skew.slowest_share) == pytest.approx((1 / 3, 1.0, 1.0))
    assert skew.is_persistent


def test_another_slow_worker_in_every_step_is_independent_skew() -> None:
    skew = skew_of(INDEPENDENT)
    assert (skew.mean, skew.barrier) == (1.25, 2.0)
    # All have the same mean already.
    assert (skew.loss, skew.persistent) == pytest.approx((0.375, 0.0))
    assert not skew.is_persistent


def test_backups_are_as_many_as_make_most_gradients_a_second() -> None:
    backups = best_backups(INDEPENDENT)
    # 3 gradients in 1 s instead of 4 in 2 s.
    assert (backups.count, backups.step_s, backups.gradients_per_s, backups.excluded) == (1, 1.0, 3.0, 0.25)
    # With 10 s on top of each step they would not pay: 3 in 11 s instead of 4 in 12 s.
    assert best_backups(INDEPENDENT, overhead=10.0).count == 0


def test_backups_that_always_leave_out_the_same_worker_show_it() -> None:
    times = {name: [1.0] * 4 for name in "abc"} | {"d": [3.0] * 4}
    backups = best_backups(times)
    assert (backups.count, backups.gradients_per_s, backups.excluded) == (1, 3.0, 1.0)


def test_a_cluster_without_its_slowest_worker() -> None:
    eviction = evict(PERSISTENT, "c", overhead=0.5)
    assert (eviction.step_s, eviction.gradients_per_s) == pytest.approx((1.5, 2 / 1.5))


def test_the_knee_of_100_ms_thinking_and_5_ms_service_is_at_21_workers() -> None:
    assert knee(0.1, 0.005) == pytest.approx(21.0)
    assert break_even_servers(21, 0.1, 0.005) == 1
    assert break_even_servers(22, 0.1, 0.005) == 2
    # Of two servers each does half, so twice as many workers less one can think meanwhile.
    assert break_even_servers(41, 0.1, 0.005) == 2
    assert break_even_servers(42, 0.1, 0.005) == 3
    assert break_even_servers(41, 0.1, 0.0025, servers=2) == 2
    assert break_even_servers(4, 0.001, 10.0) == 4
    assert break_even_servers(1, 0.1, 10.0) == 1


@pytest.fixture
def run_with(make_scenario: Callable[..., Scenario]) -> Callable[..., Run]:
    def run(policy: str = "bsp", workers: int = 4, steps: int = 10, law: Any = None, **fields: Any) -> Run:
        law = law or Constant(mean=1.0)
        return simulate(make_scenario(workers, steps, law, warmup=2, **fields), policy, 1)

    return run


def test_a_run_gives_the_steps_that_all_workers_have_made(run_with: Callable[..., Run]) -> None:
    times = step_matrix(run_with(slow={"worker-3": 2.0}))
    assert [len(column) for column in times.values()] == [8] * 4
    assert times["worker-3"] == pytest.approx([2.0] * 8)


def test_saturation_is_that_of_the_busiest_server(run_with: Callable[..., Run]) -> None:
    server = ServerSection(apply=0.03, per_message=0.02)
    found = saturation_of(run_with("asp", server=server), think=1.0)
    assert found is not None
    assert found.bottleneck == "server-0's arithmetic"
    assert (found.service_s, found.knee) == pytest.approx((0.05, 21.0))
    assert found.most_steps_per_s == pytest.approx(4 / 1.05)
    assert saturation_of(run_with("asp"), think=1.0) is None


def test_the_traffic_of_a_round_is_compared_with_a_ring(run_with: Callable[..., Run]) -> None:
    """8 workers, 100 MB, 10 Gb/s: 640 ms to one server, 140 ms in a ring."""
    run = run_with(
        workers=8,
        steps=3,
        cluster=ClusterSection(workers=8, chunk_bytes=4 << 20),
        network=NetworkSection(bandwidth=1.25e9),
        tensor=(TensorSection(key="model", shape=(25_000_000,)),),
    )
    found = transfers_of(run)
    assert found is not None
    assert (found.round_s, found.ring_s) == pytest.approx((0.64, 0.14))
    # 64 / 14 = 4.6.
    assert found.servers_as_ring == 5
    assert transfers_of(run_with()) is None


def test_persistent_skew_is_advised_to_be_balanced(run_with: Callable[..., Run]) -> None:
    advice = advise(run_with(slow={"worker-3": 2.0}))
    assert advice.balance is not None
    # (1 + 1 + 1 + 2) / 4.
    assert advice.balance.step_s == pytest.approx(1.25)
    text = " ".join(advice.sentences)
    assert "batches in proportion to speed give steps of 1.25 s, 3.2 gradients a second (+60%)" in text
    assert "without worker-3 a step takes 1 s, 3 gradients a second (+50%)" in text
    assert "bounded staleness would not help" in text


def test_independent_skew_is_advised_backups(run_with: Callable[..., Run]) -> None:
    advice = advise(run_with(workers=16, steps=200, law=Exponential(mean=1.0)))
    text = " ".join(advice.sentences)
    assert "not waiting for the slowest 4 of 16" in text
    assert "batches" not in text


def test_under_asp_staleness_of_the_slow_worker_is_told(run_with: Callable[..., Run]) -> None:
    advice = advise(run_with("asp", slow={"worker-3": 2.0}))
    assert (advice.balance, advice.eviction, advice.backups) == (None, None, None)
    # (3.5 - 0.5) / 0.5.
    assert advice.sentences[0] == "nobody waits; gradients of worker-3 are about 6.0 versions stale, (R - r) / r"


def test_under_a_bound_those_who_wait_are_told_for_whom(run_with: Callable[..., Run]) -> None:
    # Each of the three fast workers waits for half of its time, less at the beginning: 37.5 % of all.
    advice = advise(run_with("ssp:1", steps=60, slow={"worker-3": 2.0}))
    assert (advice.balance, advice.eviction, advice.backups) == (None, None, None)
    waits, pace, *_ = advice.sentences
    assert re.fullmatch(r"workers wait 3[67]% of their time", waits)
    assert pace.startswith(
        "bounded staleness does not help for long: all end up at the pace of worker-3, which takes 2 s"
    )


def test_where_the_slowest_is_given_up_its_share_of_the_drops_is_told(run_with: Callable[..., Run]) -> None:
    advice = advise(run_with("backup:1", steps=60, slow={"worker-3": 2.5}))
    # It computes two and a half rounds long, so that each of its gradients is late while the others are there.
    assert any(
        re.fullmatch(r".* of the gradients are dropped, and of worker-3 \d+%", each) for each in advice.sentences
    )
    assert not any("batches" in each for each in advice.sentences)


def test_equal_workers_get_no_advice(run_with: Callable[..., Run]) -> None:
    assert advise(run_with()).sentences == ["stragglers cost 0.0% of a step: nothing to gain there"]


def test_who_is_to_blame_is_found_by_doing_without(run_with: Callable[..., Run]) -> None:
    run = run_with(
        slow={"worker-2": 3.0},
        fault=(Pause(node="worker-0", at=6.5, duration=2.0), Slow(node="worker-1", factor=1.5)),
        network=NetworkSection(latency=0.05),
    )
    causes = {cause.cause: cause for cause in blame(run)}
    assert next(iter(causes)) == "worker-2 computes 2.40 times as long"
    # Without it the next one decides, at 1.5 s and a round trip.
    assert causes["worker-2 computes 2.40 times as long"].step_s < 1.9
    assert causes["latency and loss of the network"].saved_s == pytest.approx(0.1)
    assert causes["slow of worker-1"].saved_s == pytest.approx(0.0)
    assert "pause of worker-0" in causes


def test_each_link_of_a_fault_is_judged_by_itself(run_with: Callable[..., Run]) -> None:
    # worker-1 is slow besides, so that its link alone decides when a round is made.
    bad = Link(node=("worker-0", "worker-1"), to="server-0", latency=0.5)
    causes = {cause.cause: cause for cause in blame(run_with(slow={"worker-1": 1.25}, fault=(bad,)))}
    assert causes["link between worker-0, worker-1 and server-0"].saved_s == pytest.approx(1.0)
    # Without it worker-0 decides: 1 s and 1 s on its link, where worker-1 needs 1.25 s and 1 s.
    assert causes["link between worker-1 and server-0"].saved_s == pytest.approx(0.25)
    assert causes["link between worker-0 and server-0"].saved_s == pytest.approx(0.0)


def test_who_joins_is_there_whatever_is_looked_at(run_with: Callable[..., Run]) -> None:
    cluster = ClusterSection(workers=2, max_workers=3)
    fault = (Join(node="worker-2", at=3.5), Slow(node="worker-2", factor=2.0))
    run = run_with(workers=2, cluster=cluster, fault=fault)
    assert [cause.cause for cause in blame(run)] == ["worker-2 computes 2.00 times as long", "slow of worker-2"]


def test_the_other_faults_strike_when_they_did(run_with: Callable[..., Run]) -> None:
    run = run_with(steps=3, fault=(Slow(node="worker-0", factor=2.0), Spot(node="workers", scale=50.0)))
    without = dict(alternatives(run))["slow of worker-0"]
    assert draw_timeline(without, run.seed).strikes == draw_timeline(run.scenario, run.seed).strikes != []


def test_what_ends_workers_comes_first(run_with: Callable[..., Run]) -> None:
    run = run_with(slow={"worker-2": 3.0}, fault=(Crash(node="worker-0", at=5.0),))
    assert next(cause.cause for cause in blame(run)) == "crash of worker-0"


def test_the_command_says_what_would_help(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(
        'steps = 10\n[cluster]\nworkers = 3\n[compute]\nlaw = "constant"\nmean = 0.5\n[slow]\nworker-2 = 2.0\n'
    )
    result = CliRunner().invoke(cli.sim, ["advise", str(path)])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("small under bsp: a step takes 1 s\n")
    assert "worker-2 computes" in result.stdout
    result = CliRunner().invoke(cli.sim, ["advise", str(path), "--policy", "asp", "--json"])
    document = json.loads(result.stdout)
    assert document["policy"] == "asp"
    assert document["causes"][0]["cause"] == "worker-2 computes 2.00 times as long"
