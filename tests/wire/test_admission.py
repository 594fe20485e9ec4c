"""The door's rules by hand arithmetic: how many, how many strangers, and how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from aiokv.wire.admission import BURST_SECONDS, MAX_ADDRESSES, Admission

if TYPE_CHECKING:
    from aiokv.errors import OverloadedError


def door(*, connections: int = 100, handshakes: int = 100, rate: float = 100.0) -> Admission:
    return Admission(max_connections=connections, max_handshakes=handshakes, rate=rate)


def refused_by(error: OverloadedError | None) -> str:
    return "" if error is None else str(error.details["limit"])


def test_no_more_strangers_than_allowed_and_one_that_proves_itself_makes_room() -> None:
    admission = door(handshakes=2)
    assert [refused_by(admission.enter("a", 0.0)) for _ in range(3)] == ["", "", "max_handshakes"]
    admission.authenticated()
    assert refused_by(admission.enter("a", 0.0)) == ""
    assert (admission.open, admission.handshakes) == (3, 2)


def test_no_more_connections_than_allowed_whoever_they_belong_to() -> None:
    admission = door(connections=2)
    for _ in range(2):
        assert admission.enter("a", 0.0) is None
        admission.authenticated()
    error = admission.enter("b", 0.0)
    assert error is not None
    assert error.details == {"limit": "max_connections", "expected": 2, "got": 2, "address": "b"}
    assert "has 2 connections, and takes no more (max_connections = 2)" in error.message
    assert error.retriable
    admission.leave(authenticated=True)
    assert admission.enter("b", 0.0) is None


def test_a_stranger_that_leaves_makes_room() -> None:
    admission = door(handshakes=1)
    admission.enter("a", 0.0)
    admission.leave(authenticated=False)
    assert (admission.open, admission.handshakes) == (0, 0)
    assert admission.enter("a", 0.0) is None


def test_an_address_may_open_ten_seconds_worth_at_once_and_then_so_many_a_second() -> None:
    admission = door(connections=1000, handshakes=1000, rate=2.0)
    burst = [refused_by(admission.enter("a", 5.0)) for _ in range(21)]
    assert burst == [""] * 20 + ["connection_rate"]
    # Another address has its own.
    assert admission.enter("b", 5.0) is None
    # Half a second is worth one.
    assert [refused_by(admission.enter("a", 5.5)) for _ in range(2)] == ["", "connection_rate"]
    # A day is worth no more than the burst.
    assert sum(admission.enter("a", 86400.0) is None for _ in range(30)) == 20


def test_a_slow_rate_lets_one_in_at_least() -> None:
    admission = door(rate=0.01)
    assert [refused_by(admission.enter("a", 0.0)) for _ in range(2)] == ["", "connection_rate"]


def test_what_is_refused_takes_no_room() -> None:
    admission = door(handshakes=1, rate=1.0)
    for _ in range(100):
        admission.enter("a", 0.0)
    assert (admission.open, admission.handshakes) == (1, 1)


def test_only_so_many_addresses_are_remembered_and_the_quietest_is_forgotten() -> None:
    admission = door(connections=10_000, handshakes=10_000, rate=0.1)
    for number in range(MAX_ADDRESSES):
        admission.enter(f"host-{number}", 0.0)
    admission.enter("host-0", 0.0)
    admission.enter("new", 0.0)
    assert admission.addresses == MAX_ADDRESSES
    # host-0 was the last but one, so it is remembered; host-1 had been quiet for longest.
    assert refused_by(admission.enter("host-0", 0.0)) == "connection_rate"
    assert refused_by(admission.enter("host-1", 0.0)) == ""


@given(st.lists(st.floats(0, 5), max_size=60), st.floats(0.1, 20))
def test_never_more_than_the_burst_and_what_time_brings(pauses: list[float], rate: float) -> None:
    admission = door(connections=1000, handshakes=1000, rate=rate)
    now, entered = 0.0, 0
    for pause in pauses:
        now += pause
        entered += admission.enter("a", now) is None
        assert entered <= max(1.0, rate * BURST_SECONDS) + now * rate + 1e-6
