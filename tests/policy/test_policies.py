"""Policies by name: their texts, and what is said about wrong ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.errors import PolicyError
from aiokv.policy import ChunkPolicy, Policy, RoundPolicy, get_policy, policy_class, policy_names

TEXTS = {
    "bsp": "bsp",
    "asp": "asp",
    "sum": "sum",
    "ssp:3": "ssp:3",
    "ssp:staleness=3": "ssp:3",
    "essp:0": "essp:0",
    "dssp:1:4": "dssp:1:4",
    "dssp:upper=4:lower=1": "dssp:1:4",
    "pssp:2:1": "pssp:2:1",
    "pbsp:2": "pbsp:2",
    "backup:2": "backup:2",
    "k_sync:4": "k_sync:4",
    "k_batch_sync:4": "k_batch_sync:4",
    "k_async:4": "k_async:4",
    "k_batch_async:4": "k_batch_async:4",
    "quorum:3:0.5": "quorum:3:0.5:0",
    "quorum:3:deadline=.25:strikes=2": "quorum:3:0.25:2",
    "ringmaster:8": "ringmaster:8",
    "round_robin": "round_robin",
    "sync_switch:0.2:1000": "sync_switch:0.2:1000",
    "adasync:2": "adasync:2",
}


@pytest.mark.parametrize(("text", "written"), TEXTS.items())
def test_policy_is_made_from_its_text_and_gives_it_back(text: str, written: str) -> None:
    policy = get_policy(text)
    assert str(policy) == written
    assert get_policy(written) == policy
    assert policy.name == text.split(":", maxsplit=1)[0]


def test_every_policy_has_a_text_here() -> None:
    assert {text.split(":")[0] for text in TEXTS} == set(policy_names())


@pytest.mark.parametrize("name", policy_names())
def test_policy_says_how_it_decides(name: str) -> None:
    cls = policy_class(name)
    assert issubclass(cls, ChunkPolicy) != issubclass(cls, RoundPolicy)
    assert cls.decides == issubclass(cls, RoundPolicy)


@given(st.integers(1, 2**40), st.floats(0.0, 1e9))
def test_options_survive_their_text(k: int, deadline: float) -> None:
    text = f"quorum:{k}:{deadline!r}"
    assert get_policy(str(get_policy(text))) == get_policy(text)


@pytest.mark.parametrize("name", ["", "BSP", "nope"])
def test_unknown_policy_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(PolicyError, match=f"unknown policy '{name}'; known: adasync, asp, backup, bsp") as caught:
        get_policy(name)
    assert caught.value.details == {"expected": ", ".join(policy_names()), "got": name}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("ssp", "staleness is not given; it is written ssp:staleness="),
        ("quorum:3", "deadline is not given; it is written quorum:k=:deadline=:strikes=0"),
        ("ssp:x", "staleness must be a whole number, got 'x'"),
        ("ssp:1.5", "staleness must be a whole number, got '1.5'"),
        ("quorum:3:soon", "deadline must be a number, got 'soon'"),
        ("ssp:1:2", "there are too many options"),
        ("bsp:1", "there are too many options"),
        ("quorum:deadline=1:3", "one without a name follows one with a name"),
        ("ssp:lead=1", "unknown option 'lead'"),
        ("ssp:1:staleness=2", "twice the option 'staleness'"),
        ("ssp:-1", "staleness must be at least 0, got -1"),
        ("quorum:3:nan", "deadline must be at least 0, got nan"),
        ("quorum:3:inf", "deadline must be at least 0, got inf"),
        ("quorum:0:1", "k must be at least 1, got 0"),
        ("dssp:3:2", "upper must be at least 3, got 2"),
        ("sync_switch:1.5:10", "fraction must be from 0 to 1, got 1.5"),
    ],
)
def test_wrong_option_is_named(text: str, what: str) -> None:
    with pytest.raises(PolicyError) as caught:
        get_policy(text)
    assert what in str(caught.value)


def test_policy_has_to_answer_all_questions() -> None:
    class Half(ChunkPolicy):
        """A policy that does not say for whom it waits."""

        name = "half"

        def version_of(self, *, sequence: int, newest: int) -> int:
            """Return anything."""
            return 1

    with pytest.raises(TypeError, match="expected"):
        Half()  # type: ignore[abstract]


@pytest.mark.parametrize("text", ["ringmaster:3", "k_sync:1", "k_async:1", "k_batch_sync:1", "k_batch_async:1"])
def test_nobody_waits_for_others_where_each_step_makes_a_round(text: str) -> None:
    assert get_policy(text).per_step


@pytest.mark.parametrize("text", ["k_sync:2", "k_async:2", "backup:1", "quorum:1:0.5", "round_robin", "bsp", "asp"])
def test_steps_make_rounds_together_or_each_chunk_its_own(text: str) -> None:
    assert not get_policy(text).per_step


@pytest.mark.parametrize(("text", "in_step"), [("bsp", True), ("sum", True), ("asp", False), ("k_sync:2", False)])
def test_all_updates_are_in_step_or_none(text: str, *, in_step: bool) -> None:
    assert [get_policy(text).is_in_step(version) for version in (1, 100)] == [in_step] * 2


@pytest.mark.parametrize("text", ["bsp", "ssp:1", "pbsp:1", "round_robin", "sync_switch:0.5:10"])
def test_workers_wait_for_all_others_by_their_steps(text: str) -> None:
    assert get_policy(text).meets(1)


@pytest.mark.parametrize("text", ["asp", "k_sync:2", "ringmaster:3", "sync_switch:0:10"])
def test_workers_wait_for_nobody_or_for_whoever_comes(text: str) -> None:
    assert not get_policy(text).meets(1)


@pytest.mark.parametrize("text", ["bsp", "asp", "sum", "sync_switch:0.5:10"])
def test_small_keys_are_bundled_only_where_chunks_need_nothing_else(text: str) -> None:
    assert get_policy(text).is_plain


@pytest.mark.parametrize("text", ["ssp:1", "pbsp:1", "k_sync:2", "ringmaster:3", "round_robin"])
def test_keys_stay_alone_where_rounds_are_decided_or_reads_held_back(text: str) -> None:
    policy: Policy = get_policy(text)
    assert not policy.is_plain
