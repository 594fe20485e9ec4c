"""Rules that look at the weight a worker had read: which versions are kept for them, and which are dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.server.rounds.reads import MAX_ANSWERS, Reads
from aiokv.errors import UpdateRefusedError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Server


@pytest.fixture
def delayed(make_server: type[Server]) -> Server:
    """Two workers under asp, the rule dcasgd, and one key."""
    server = make_server(workers=2, policy="asp")
    server.init()
    server.ask(0, m.SetOptimizer("dcasgd", {}, "sum", 5.0))
    return server


def pushpull(server: Server, rank: int, read: int) -> None:
    answer = server.push(rank, read_version=read, want_value=True).answer
    assert isinstance(answer, m.Value)


def reads(server: Server) -> list[int | None]:
    """Return what each update is told its contributor had read."""
    return [apply.read for apply in server.seen(ef.Apply)]


def test_update_is_told_what_its_contributor_had_read(delayed: Server) -> None:
    for read in range(3):
        pushpull(delayed, 0, read)
    pushpull(delayed, 1, 0)
    assert reads(delayed) == [0, 1, 2, 0]


def delayed_under(make_server: type[Server], policy: str, workers: int = 3) -> Server:
    server = make_server(workers, policy)
    server.init()
    server.ask(0, m.SetOptimizer("dcasgd", {}, "sum", 5.0))
    return server


@pytest.mark.parametrize("policy", ["ringmaster:9", "k_batch_async:1"])
def test_a_decided_round_of_one_step_is_told_it_too(make_server: type[Server], policy: str) -> None:
    server = delayed_under(make_server, policy)
    for read in range(3):
        server.push(0, read_version=read, want_value=True)
    server.push(1, read_version=0)
    assert reads(server) == [0, 1, 2, 0]


def compensated(server: Server) -> list[tuple[int, float]]:
    """Return which version each compensated contribution was computed from, and with how much of the difference."""
    return [(effect.read, effect.lamda) for effect in server.seen(ef.Compensate)]


@pytest.mark.parametrize("policy", ["k_batch_async:2", "k_async:2"])
def test_each_step_of_a_sum_is_compensated_for_what_its_own_worker_had_read(
    make_server: type[Server], policy: str
) -> None:
    """The test's store adds sums to a value that begins at 0."""
    server = delayed_under(make_server, policy)
    for rank in (0, 1):
        server.push(rank, 2.0, read_version=0)
    server.pull(0, at_least=0)
    assert compensated(server) == [], "nothing was changed since"
    server.push(0, 3.0, read_version=1)
    server.push(2, 5.0, read_version=0)
    assert compensated(server) == [(0, 0.04)], "rank 0 has read what is there"
    # 4, and then 3 + (5 + 0.04 * 25 * (4 - 0)).
    assert server.values["w", 0][2] == pytest.approx(4.0 + 3.0 + 9.0)
    assert reads(server) == [0, 1], "the sum is compared with the value itself, so that nothing is counted twice"


def test_what_is_rescaled_later_is_compensated_for_less_and_what_is_scaled_before_as_it_is_then(
    make_server: type[Server],
) -> None:
    server = make_server(3, "k_batch_async:2")
    server.init()
    params = {"lamda": 0.5, "rescale_grad": 0.25}
    server.ask(0, m.SetOptimizer("dcasgd", params, "sum", 5.0, staleness_rate="1/(1+tau)"))
    for rank in (0, 1):
        server.push(rank, 2.0, read_version=0)
    server.pull(0, at_least=0)
    server.push(0, 3.0, read_version=1)
    server.push(2, 6.0, read_version=0)
    assert compensated(server) == [(0, 0.125)]
    # Half of 6, since it is one version old: 3 + (3 + 0.125 * 9 * 4).
    assert server.values["w", 0][2] == pytest.approx(4.0 + 3.0 + 7.5)


def test_the_median_is_that_of_compensated_steps(make_server: type[Server]) -> None:
    server = make_server(3, "k_batch_async:2")
    server.init()
    server.ask(0, m.SetOptimizer("dcasgd", {"lamda": 0.5}, "median", 5.0))
    for rank in (0, 1):
        server.push(rank, 2.0, read_version=0)
    server.pull(0, at_least=0)
    server.push(0, 3.0, read_version=1)
    server.push(2, 4.0, read_version=0)
    # 2, and then the middle of 3 and 4 + 0.5 * 16 * 2.
    assert server.values["w", 0][2] == pytest.approx(2.0 + 11.5)


def test_a_step_waits_with_its_sum_until_the_value_is_there_that_it_changes(make_server: type[Server]) -> None:
    server = delayed_under(make_server, "k_batch_async:2")
    server.hold = True
    for rank in (0, 1, 0, 2):
        server.push(rank, 2.0, read_version=0)
    assert compensated(server) == []
    server.finish()
    assert compensated(server) == [(0, 0.04)] * 2
    server.finish()
    assert server.values["w", 0][2] == pytest.approx(4.0 + 2 * (2.0 + 0.04 * 4.0 * 4.0))


def test_a_sum_that_was_begun_under_another_rule_stays_one(make_server: type[Server]) -> None:
    server = make_server(2, "sync_switch:1:10")
    server.init()
    server.push(0, 1.0)
    server.ask(0, m.SetOptimizer("dcasgd", {}, "sum", 5.0))
    server.push(1, 1.0)
    for rank in (0, 1):
        server.push(rank, 1.0, read_version=0)
    assert compensated(server) == [(0, 0.04)] * 2, "only of the second round"


def test_what_waits_for_its_turn_keeps_the_version_that_it_refers_to(make_server: type[Server]) -> None:
    server = delayed_under(make_server, "round_robin", workers=4)
    # Rank 3 has read what was there at first, and its turn is the last one.
    server.push(3, read_version=0)
    server.push(0, read_version=0, want_value=True)
    # What is to come of any rank refers to newer versions.
    for rank in (1, 2, 3):
        server.pull(rank, at_least=0)
    for rank in (3, 0, 1, 2):
        server.push(rank, read_version=1)
    assert reads(server) == [0, 1, 1, 0, 1]
    assert 0 not in server.kept["w", 0]


def test_versions_are_kept_while_a_rank_may_refer_to_them(delayed: Server) -> None:
    for read in range(5):
        pushpull(delayed, 0, read)
    # Rank 0 has read 4 and was sent 5; rank 1 has what was there at first.
    assert delayed.kept["w", 0] == [0, 4]
    pushpull(delayed, 1, 0)
    delayed.pull(1)
    pushpull(delayed, 1, 6)
    pushpull(delayed, 0, 5)
    assert delayed.kept["w", 0] == [5, 6, 7]


@pytest.mark.parametrize("end", ["leave", "lose"])
def test_nothing_is_kept_for_a_rank_that_is_gone(delayed: Server, end: str) -> None:
    for read in range(3):
        pushpull(delayed, 0, read)
    assert delayed.kept["w", 0] == [0, 2]
    getattr(delayed, end)(1)
    assert delayed.kept["w", 0] == [2]


def test_rank_that_only_pulls_does_not_fill_the_memory(delayed: Server) -> None:
    for read in range(3 * MAX_ANSWERS):
        pushpull(delayed, 0, read)
        delayed.pull(1)
    assert len(delayed.kept["w", 0]) < MAX_ANSWERS + 2


def test_sync_keeps_nothing(make_server: type[Server]) -> None:
    server = make_server(workers=2)
    server.init()
    server.ask(0, m.SetOptimizer("dcasgd", {}, "sum", 5.0))
    for read in range(3):
        for rank in range(2):
            server.push(rank, read_version=read)
    assert reads(server) == [None] * 3
    assert server.kept["w", 0] == []


def test_update_under_way_when_the_rule_is_set_keeps_nothing(make_server: type[Server]) -> None:
    server = make_server(workers=2, policy="asp")
    server.init()
    server.hold = True
    server.push(0)
    server.push(0)
    server.ask(0, m.SetOptimizer("dcasgd", {}, "sum", 5.0))
    server.push(1)
    server.push(0)
    for _ in range(4):
        server.finish()
    # Version 0 is gone, so who has read it is taken to have read the next one.
    assert reads(server) == [None, 1, 1, 1]


def test_update_that_was_not_made_gives_its_number_to_the_value_before(delayed: Server) -> None:
    pushpull(delayed, 0, 0)
    delayed.hold = True
    for rank in range(2):
        delayed.push(rank, read_version=1 - rank)
    (apply,) = delayed.applying
    delayed.applying.clear()
    assert apply.slot is not None
    del delayed.slots[apply.slot]
    delayed.values["w", 0][2] = delayed.values["w", 0][1]
    delayed.handle(st.Applied("w", 0, 2, UpdateRefusedError("too large", key="w", round=2)))
    delayed.finish()
    pushpull_later: Any = delayed.push(0, read_version=1)
    delayed.finish()
    assert not pushpull_later.pending
    assert reads(delayed) == [0, 1, 0, 2], "version 1 is called 2 now"


def test_waiting_push_refers_to_the_value_under_its_new_number(delayed: Server) -> None:
    pushpull(delayed, 0, 0)
    delayed.hold = True
    for _ in range(2):
        delayed.push(0, read_version=1)
    apply = delayed.applying.pop()
    assert apply.slot is not None
    del delayed.slots[apply.slot]
    delayed.values["w", 0][2] = delayed.values["w", 0][1]
    delayed.handle(st.Applied("w", 0, 2, UpdateRefusedError("too large", key="w", round=2)))
    assert reads(delayed) == [0, 1, 2]


def test_bundle_that_is_divided_keeps_what_it_has_kept(make_server: type[Server]) -> None:
    server = make_server(workers=2, policy="asp")
    server.ask(0, m.SetOptimizer("dcasgd", {}, "sum", 5.0))
    server.bundle_size = 2
    init = m.InitBundle(("a", "b"), ((1,), (1,)), "float32", "asp", 5.0, (), (b"a", b"b"))
    assert server.ask(0, init, 0.0).answer == m.Bundled(0)
    for number in (1, 2):
        server.ask(0, m.PushBundle(0, number, number - 1, True, 5.0), 1.0)
    # One of its keys alone, and the bundle's smallest version is what the others are told.
    server.push(0, key="a", sequence=3, read_version=2)
    server.ask(0, m.PullBundle(0, 2, 5.0))
    server.push(0, key="a", sequence=4, read_version=2)
    server.push(1, key="a", sequence=1, read_version=0)
    assert reads(server) == [0, 1, 2, 3, 0], "version 3 of the key is what was sent as 2"


def test_reading_never_goes_back() -> None:
    record = Reads(0)
    for version in (1, 2, 3):
        record.answered(0, version, version)
        record.answered(0, version, version)
    assert [record.read(0, named) for named in (2, 1, 3)] == [2, 2, 3]


def test_value_that_was_not_replaced_has_another_number_for_all_who_have_it() -> None:
    record = Reads(1)
    record.answered(0, 1, 1)
    record.answered(1, 2, 2)
    record.replaced(1, 3)
    assert [record.read(rank, 1) for rank in (0, 1, 2)] == [3, 3, 3]
    record.replaced(2, 4)
    assert record.read(1, 2) == 4
