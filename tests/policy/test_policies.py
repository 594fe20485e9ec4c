"""Policies by name."""

from __future__ import annotations

import pytest

from aiokv.errors import PolicyError
from aiokv.policy import ASP, BSP, Policy, Sum, get_policy


@pytest.mark.parametrize(("name", "cls"), [("bsp", BSP), ("asp", ASP), ("sum", Sum)])
def test_policy_is_found_by_its_name(name: str, cls: type[Policy]) -> None:
    policy = get_policy(name)
    assert type(policy) is cls
    assert policy.name == name


@pytest.mark.parametrize("name", ["", "BSP", "nope"])
def test_unknown_policy_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(PolicyError) as caught:
        get_policy(name)
    assert caught.value.details == {"expected": "asp, bsp, sum", "got": name}
    assert f"unknown policy {name!r}; known: asp, bsp, sum" in str(caught.value)


def test_policy_has_to_answer_all_questions() -> None:
    class Half(Policy):
        """A policy that does not say for whom an update waits."""

        name = "half"

        def version_of(self, *, sequence: int, newest: int) -> int:
            """Return anything."""
            return 1

    with pytest.raises(TypeError, match="expected"):
        Half()  # type: ignore[abstract]
