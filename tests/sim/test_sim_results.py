"""What a run leaves: sentences that are checked, files, traces and pages."""

from __future__ import annotations

import csv
import json
import math
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import ConfigError
from sim.assertions import broken_assertions, parse_assertion
from sim.cluster import simulate
from sim.compute import Constant
from sim.faults import Pause
from sim.files import write_files
from sim.intervals import batch_half_width, half_width, student
from sim.page import page
from sim.perfetto import trace
from sim.report import summarise, worker_rows
from sim.sections import ClusterSection, NetworkSection
from sim.split import Split, shares

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sim.record import Run
    from sim.scenario import Scenario


@pytest.fixture
def runs(make_scenario: Callable[..., Scenario]) -> dict[str, list[Run]]:
    scenario = make_scenario(3, 12, network=NetworkSection(latency=0.1, bandwidth=1e5))
    return {policy: [simulate(scenario, policy, 1)] for policy in ("bsp", "asp")}


# --- assertions ---


@pytest.mark.parametrize(
    ("text", "bound"),
    [("p95_step < 80 ms", 0.08), ("mean_step<=1.5s", 1.5), ("utilisation > 95 %", 0.95), ("staleness_max == 7", 7.0)],
)
def test_a_bound_may_have_a_unit(text: str, bound: float) -> None:
    assert parse_assertion(text, []).bound == pytest.approx(bound)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p95_step", "expected a sentence like"),
        ("p95_stp < 1", "no result 'p95_stp'; did you mean 'p95_step'"),
        ("p95_step < 1 hour", "no unit 'hour'"),
        ("ssp.p95_step < 1", "the policies of this scenario are bsp, asp, got 'ssp'"),
        ("p95_step < 1-", "expected a number after '<'"),
    ],
)
def test_a_sentence_that_says_nothing_is_explained(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_assertion(text, ["bsp", "asp"])


def test_what_is_not_true_is_said_with_the_value(runs: dict[str, list[Run]]) -> None:
    summaries = {policy: summarise(each[0]) for policy, each in runs.items()}
    assert broken_assertions(["staleness_max >= 0", "bsp.staleness_max == 0"], summaries) == []
    [broken] = broken_assertions(["staleness_max == 0"], summaries)
    assert broken.startswith("asp: expected staleness_max == 0, got staleness_max = ")


def test_nothing_is_true_of_a_value_that_is_not_there() -> None:
    assert not parse_assertion("p95_step < 1 h", []).holds(math.nan)


# --- where the time went ---


def test_a_step_on_a_network_is_split_by_hand(make_scenario: Callable[..., Scenario]) -> None:
    # 4096 bytes of parameters and 64 of head at 41600 bytes/s: 0.1 s each way, and twice 0.2 s of latency.
    network = NetworkSection(latency=0.2, bandwidth=41_600.0)
    # Heartbeats would share the card.
    cluster = ClusterSection(workers=1, heartbeat=50.0, death_timeout=55.0)
    scenario = make_scenario(1, 10, Constant(mean=1.0), network=network, cluster=cluster)
    [row] = worker_rows(simulate(scenario, "bsp", 1))
    assert row["busy_s"] == pytest.approx(10.0)
    assert row["communicate_s"] == pytest.approx(6.0)
    assert row["wait_s"] == pytest.approx(0.0, abs=1e-9)


def test_who_is_stopped_while_it_waits_is_down(make_scenario: Callable[..., Scenario]) -> None:
    # In each round worker-1 computes for 1 s and waits for another one; its answer of the first one comes at 2 s.
    pause = Pause(node="worker-1", at=1.25, duration=1.5)
    scenario = make_scenario(2, 3, Constant(mean=1.0), slow={"worker-0": 2.0}, fault=(pause,))
    first, second = worker_rows(simulate(scenario, "bsp", 1))
    assert (first["busy_s"], first["wait_s"], first["down_s"]) == pytest.approx((6.0, 0.0, 0.0))
    # 0.25 s before it is stopped; then it is 0.75 s behind the others, and waits as much less.
    assert (second["busy_s"], second["wait_s"], second["down_s"]) == pytest.approx((3.0, 1.5, 1.5))


def test_shares_add_up_to_one(runs: dict[str, list[Run]]) -> None:
    for policy in runs:
        assert shares(runs[policy][0]).total == pytest.approx(1.0)
    assert Split(1.0, 2.0, 3.0, 4.0, 5.0, 6.0).total == 21.0


# --- intervals ---


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (5, 2.571), (15, 2.131), (30, 2.042), (120, 1.980)])
def test_quantiles_of_student_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert student(degrees) == pytest.approx(quantile, abs=1e-3)


def test_an_interval_by_hand() -> None:
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3))
    assert math.isnan(half_width([1.0]))
    assert math.isnan(batch_half_width([1.0] * 19, max))
    assert batch_half_width([1.0, 2.0] * 10, max) == 0.0


# --- files ---


def events(run: Run, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(trace(run))["traceEvents"] if event["ph"] == phase]


def test_every_gradient_has_an_arrow_from_push_over_apply_to_pull(runs: dict[str, list[Run]]) -> None:
    run = runs["bsp"][0]
    starts, middles, ends = (events(run, phase) for phase in "stf")
    assert len(starts) == len(middles) == len(ends) == 3 * 12
    for start, middle, end in zip(starts, middles, ends, strict=True):
        assert start["id"] == middle["id"] == end["id"]
        assert start["ts"] <= middle["ts"] <= end["ts"]
        assert (start["pid"], middle["pid"], end["pid"]) == (1, 2, 1)


def test_every_arrow_begins_and_ends_within_a_slice(runs: dict[str, list[Run]]) -> None:
    run = runs["asp"][0]
    slices = [(e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events(run, "X")]
    for arrow in (*events(run, "s"), *events(run, "t"), *events(run, "f")):
        assert any(
            (pid, tid) == (arrow["pid"], arrow["tid"]) and begin - 1e-3 <= arrow["ts"] <= end + 1e-3
            for pid, tid, begin, end in slices
        )


def test_arrows_bind_to_push_apply_and_pull(runs: dict[str, list[Run]]) -> None:
    """As viewers bind them: to the slice of the track that has begun last, events of one moment in their order."""
    newest: dict[tuple[int, int], str] = {}
    bound: dict[str, set[str]] = {"s": set(), "t": set(), "f": set()}
    every = [event for event in json.loads(trace(runs["bsp"][0]))["traceEvents"] if event["ph"] != "M"]
    for event in sorted(every, key=lambda event: event["ts"]):
        if event["ph"] == "X":
            newest[event["pid"], event["tid"]] = event["name"]
        else:
            bound[event["ph"]].add(newest[event["pid"], event["tid"]])
    assert bound == {"s": {"push and pull"}, "t": {"apply weights"}, "f": {"push and pull"}}


def test_tables_hold_what_happened(runs: dict[str, list[Run]], tmp_path: Path) -> None:
    paths = write_files(runs, tmp_path, tmp_path / "test.png", "<html></html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(p.rpartition("/")[2] for p in paths)

    def read(table: str) -> list[dict[str, str]]:
        with (tmp_path / f"test-{table}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    assert len(read("steps")) == 2 * 3 * 12
    assert [row["version"] for row in read("updates") if row["policy"] == "bsp"] == [str(i) for i in range(1, 13)]
    assert {row["worker"] for row in read("workers")} == {"worker-0", "worker-1", "worker-2"}
    pushed = next(row for row in read("links") if (row["source"], row["target"]) == ("worker-0", "server-0"))
    # 12 pushes of 1024 float32, the init of the root, and heads.
    assert int(pushed["sent_bytes"]) == 13 * 4096 + 64 * int(pushed["messages"])
    document = json.loads((tmp_path / "test.json").read_bytes())
    assert document["policies"]["asp"]["workers"][0]["steps"] == 12


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in {"src", "href"}]
        if tag not in {"img", "meta"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_needs_nothing_else(runs: dict[str, list[Run]]) -> None:
    parsed = Page()
    content = page(runs)
    parsed.feed(content)
    assert parsed.open == []
    assert len(parsed.links) == 7
    assert all(link.startswith("data:image/png;base64,") for link in parsed.links)
    assert runs["bsp"][0].digest in content
