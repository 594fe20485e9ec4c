"""Keys and the update rule on a server: who creates them, who waits, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.core.stimuli import PeerLost
from aiokv.errors import (
    AlreadyInitializedError,
    CallTimeoutError,
    ConfigError,
    KeyUseError,
    PolicyError,
    ProtocolError,
    SpecMismatchError,
    UnknownKeyError,
    WorkerLostError,
)
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Like, Server


# --- init ---


def test_values_of_rank_0_become_version_0(server: Server, like: type[Like]) -> None:
    asked = server.init(value=7.0, shape=(2, 3), stop=6)
    assert asked.answer == m.Done()
    assert server.seen(ef.Install) == [like(ef.Install, key="w", start=0, dtype="float32", size=6)]
    assert server.value() == 7.0


def test_others_wait_for_rank_0(server: Server) -> None:
    early = server.init(rank=1)
    assert early.pending
    server.init(value=7.0)
    assert early.answer == m.Done()


def test_others_that_come_later_do_not_wait(server: Server) -> None:
    server.init()
    for rank in range(3):
        server.push(rank)
    assert server.init(rank=2).answer == m.Done(1)


def test_other_ranks_cannot_bring_values(server: Server) -> None:
    message = m.Init("w", (1,), "float32", 0, 1, "bsp", 5.0)
    asked = server.ask(1, message, 3.0)
    assert isinstance(asked.answer, ProtocolError)
    assert "only rank 0" in str(asked.answer)
    assert not server.seen(ef.Install)


def test_waiting_for_one_chunk_does_not_end_with_another(server: Server) -> None:
    second = server.init(rank=1, shape=(2,), start=1, stop=2)
    other = server.init("v", rank=1)
    server.init(shape=(2,), start=0, stop=1)
    assert second.pending
    assert other.pending
    server.init(shape=(2,), start=1, stop=2)
    assert second.answer == m.Done()


def test_second_init_by_rank_0_is_refused_and_keeps_the_value(server: Server) -> None:
    server.init(value=1.0)
    again = server.init(value=2.0)
    assert isinstance(again.error, AlreadyInitializedError)
    assert again.error.details == {"key": "w"}
    assert server.value() == 1.0


def test_scenario_29_second_init_with_the_same_value_is_no_error(server: Server) -> None:
    server.init(value=1.0)
    for rank in range(3):
        server.push(rank)
    assert server.init(value=1.0).answer == m.Done(1)
    assert server.value() == 4.0, "what it has become stays"


def test_value_without_a_digest_is_never_the_same(server: Server) -> None:
    server.init(value=1.0, digest=b"")
    assert isinstance(server.init(value=1.0, digest=b"").answer, AlreadyInitializedError)


@pytest.mark.parametrize("early", [True, False], ids=["before rank 0", "after rank 0"])
@pytest.mark.parametrize(
    ("changes", "error", "expected", "got"),
    [
        ({"shape": (6,)}, SpecMismatchError, "float32[2, 3]", "float32[6]"),
        ({"dtype": "float64"}, SpecMismatchError, "float32[2, 3]", "float64[2, 3]"),
        ({"policy": "asp"}, PolicyError, "bsp", "asp"),
    ],
)
def test_init_that_differs_is_refused_to_that_worker_only(
    server: Server, early: bool, changes: dict[str, Any], error: type, expected: str, got: str
) -> None:
    spec: dict[str, Any] = {"shape": (2, 3), "stop": 6}
    if not early:
        server.init(**spec)
    wrong, right = server.init(rank=1, **spec | changes), server.init(rank=2, **spec)
    if early:
        server.init(**spec)
    assert type(wrong.error) is error
    assert wrong.error.details == {"key": "w", "expected": expected, "got": got}
    assert right.answer == m.Done()


def test_init_of_another_shape_is_refused_at_once_wherever_it_begins(server: Server) -> None:
    # A bigger shape has chunks that this one does not have: nobody would ever create them.
    server.init(shape=(2, 3), stop=6)
    assert isinstance(server.init(rank=1, shape=(12,), start=6, stop=12).answer, SpecMismatchError)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"dtype": "complex64"}, SpecMismatchError),
        ({"shape": (-1,)}, SpecMismatchError),
        ({"shape": (1,) * 65}, SpecMismatchError),
        ({"stop": 2}, SpecMismatchError),
        ({"start": 1, "stop": 0}, SpecMismatchError),
        ({"start": -1, "stop": 0}, SpecMismatchError),
        ({"policy": "nope"}, PolicyError),
        ({"key": ""}, KeyUseError),
        ({"key": -1}, KeyUseError),
        ({"key": 2**63}, KeyUseError),
    ],
)
def test_rank_0_cannot_create_what_cannot_be(server: Server, changes: dict[str, Any], error: type) -> None:
    assert type(server.init(**changes).answer) is error
    assert not server.seen(ef.Install)
    assert server.init().answer == m.Done()


def test_init_with_other_bytes_than_the_chunk_has_names_both(server: Server) -> None:
    message = m.Init("w", (2,), "float64", 0, 2, "bsp", 5.0)
    asked = server.ask(0, message, 3.0)
    assert asked.error.details == {"key": "w", "expected": "16 bytes", "got": "8 bytes"}


@pytest.mark.parametrize("changes", [{"shape": (3,)}, {"dtype": "int32"}, {"policy": "asp"}])
def test_all_chunks_of_a_key_are_of_one_kind(server: Server, changes: dict[str, Any]) -> None:
    server.init(shape=(2,), start=0, stop=1)
    second: dict[str, Any] = {"shape": (2,), "start": 1, "stop": 2}
    asked = server.init(**second | changes)
    assert isinstance(asked.answer, SpecMismatchError | PolicyError)


def test_late_init_names_key_and_rank_0(server: Server) -> None:
    asked = server.init(rank=1, timeout=1.0)
    server.tick(1.0)
    assert type(asked.error) is CallTimeoutError
    assert asked.error.details == {"ranks": [0], "key": "w"}
    assert "0 (worker-0)" in str(asked.error)
    assert server.init().answer == m.Done()


def test_init_waits_in_vain_when_rank_0_is_lost(server: Server) -> None:
    early = server.init(rank=1)
    server.lose(0, "no heartbeat for 2.0 s")
    late = server.init(rank=2)
    for asked in (early, late):
        assert isinstance(asked.error, WorkerLostError)
        assert "0 (worker-0): no heartbeat for 2.0 s" in str(asked.error)
        assert asked.error.details["key"] == "w"


def test_init_waits_in_vain_when_rank_0_has_left(server: Server) -> None:
    early = server.init(rank=1)
    server.leave(0)
    late = server.init(rank=2)
    for asked in (early, late):
        assert isinstance(asked.error, UnknownKeyError)
        assert "0 (worker-0) left" in str(asked.error)


def test_key_outlives_rank_0(server: Server) -> None:
    server.init()
    server.leave(0)
    assert server.init(rank=1).answer == m.Done()


def test_init_of_a_worker_whose_connection_ended_is_forgotten(server: Server) -> None:
    gone, here = server.init(rank=1), server.init(rank=2)
    server.handle(PeerLost(gone.peer, "connection reset"))
    server.init()
    assert gone.pending
    assert here.answer == m.Done()


# --- keys ---


def test_str_and_int_keys_are_never_mixed(server: Server) -> None:
    server.init("a")
    asked = server.init(1)
    assert isinstance(asked.error, KeyUseError)
    assert asked.error.details == {"key": 1, "expected": "str", "got": "int"}
    assert isinstance(server.push(0, key=1).answer, KeyUseError)
    assert isinstance(server.pull(0, key=1).answer, KeyUseError)


def test_init_of_the_other_kind_of_key_does_not_wait(server: Server) -> None:
    server.init(1)
    assert isinstance(server.init("a", rank=1).answer, KeyUseError)


def test_init_that_was_refused_does_not_decide_the_kind_of_keys(server: Server) -> None:
    server.init("a", dtype="nope")
    assert server.init(1).answer == m.Done()


def test_scenario_24_wide_int_keys_are_not_cut(server: Server) -> None:
    # Scenario 24: in 32 bits these are the same key.
    server.init(2, value=1.0)
    server.init(2**32 + 2, value=2.0)
    assert (server.pull(0, key=2).payload, server.pull(0, key=2**32 + 2).payload) == (1.0, 2.0)


def test_push_of_an_unknown_key_is_refused_and_the_server_lives_on(server: Server) -> None:
    asked = server.push(0)
    assert isinstance(asked.error, UnknownKeyError)
    assert asked.error.details == {"key": "w"}
    assert not server.slots
    assert server.init().answer == m.Done()


@pytest.mark.parametrize("ask", ["push", "pull"])
@pytest.mark.parametrize(("changes", "got"), [({"shape": (6,)}, "float32[6]"), ({"dtype": "int32"}, "int32[2, 3]")])
def test_wrong_shape_or_dtype_names_key_expected_and_got(
    server: Server, ask: str, changes: dict[str, Any], got: str
) -> None:
    # Scenario 27: the key stays as it is.
    server.init(shape=(2, 3), stop=6)
    asked = getattr(server, ask)(0, **{"shape": (2, 3), "stop": 6} | changes)
    assert isinstance(asked.error, SpecMismatchError)
    assert asked.error.details == {"key": "w", "expected": "float32[2, 3]", "got": got}
    assert server.pull(1, shape=(2, 3), stop=6).answer == m.Value(0)


# --- time-outs ---


@pytest.mark.parametrize("timeout", [float("inf"), float("nan")])
@pytest.mark.parametrize("ask", ["init", "push", "pull", "attach"])
def test_wait_without_an_end_is_refused(server: Server, ask: str, timeout: float) -> None:
    server.init()
    arguments = (0,) if ask != "init" else ("v",)
    assert isinstance(getattr(server, ask)(*arguments, timeout=timeout).answer, ConfigError)


# --- reading what does not exist yet ---


def test_early_pull_waits_until_the_key_is_made(server: Server) -> None:
    early = [server.pull(rank) for rank in (1, 2)]
    other = server.pull(1, key="v")
    assert all(asked.pending for asked in early)
    server.init(value=7.0)
    assert [(asked.answer, asked.payload) for asked in early] == [(m.Value(0), 7.0)] * 2
    assert other.pending


def test_early_pull_of_a_key_in_a_bundle_waits_too(server: Server) -> None:
    early = server.pull(1, key="b", shape=(2,), stop=2)
    server.bundle_size = 3
    server.ask(0, m.InitBundle(("a", "b"), ((1,), (2,)), "float32", "bsp", 5.0, (), (b"1", b"2")), 4.0)
    assert early.answer == m.Value(0)


def test_early_pull_of_another_shape_is_refused_when_the_key_is_made(server: Server) -> None:
    early = server.pull(1, shape=(5,), stop=5)
    server.init()
    assert isinstance(early.answer, SpecMismatchError)


def test_early_pull_waits_until_its_deadline(server: Server) -> None:
    early = server.pull(1, timeout=0.5)
    server.tick(0.5)
    assert isinstance(early.error, UnknownKeyError)
    assert "key 'w' is not initialized, and nobody did it within 0.5 s" in str(early.error)
    server.init()


def test_early_pull_of_a_worker_that_is_gone_is_forgotten(server: Server) -> None:
    server.pull(1)
    server.handle(PeerLost(11, "connection reset"))
    assert not list(server.machine._exchanges)
    server.init()


@pytest.mark.parametrize("key", ["", -1, 2**63])
def test_early_pull_of_what_can_be_no_key_is_refused_at_once(server: Server, key: Any) -> None:
    assert isinstance(server.pull(1, key=key).answer, KeyUseError)
