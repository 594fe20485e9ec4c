"""Rules that can't be used where a key is cut into chunks."""

from __future__ import annotations

from typing import Any

import pytest

from aiokv.core.server.cuts import check_cut
from aiokv.errors import OptimizerError
from aiokv.optim import LAMB, SGD, GroupAdaGrad, Optimizer
from aiokv.policy import get_policy
from aiokv.types import TensorSpec

SPEC = TensorSpec((4, 3), "float32")


@pytest.mark.parametrize(
    ("rule", "start", "stop", "policy"),
    [
        (LAMB(), 0, 12, "asp"),
        (LAMB(), 0, 5, "bsp"),
        (SGD(), 0, 5, "asp"),
        (GroupAdaGrad(), 0, 12, "asp"),
        (GroupAdaGrad(), 3, 9, "bsp"),
        (GroupAdaGrad(), 0, 5, "sum"),
    ],
)
def test_rules_that_can_do_with_a_part(rule: Optimizer, start: int, stop: int, policy: str) -> None:
    check_cut(rule, "w", SPEC, start, stop, get_policy(policy))


@pytest.mark.parametrize(
    ("rule", "start", "stop", "policy", "words"),
    [
        (LAMB(), 0, 6, "asp", "'lamb' needs norms of all of key 'w'.*more than 48.*or use policy bsp"),
        (GroupAdaGrad(), 0, 5, "bsp", "key 'w' with rows of 3 elements is cut inside a row.* least 12 .* more than 48"),
        (GroupAdaGrad(), 5, 12, "bsp", "cut inside a row"),
    ],
)
def test_rules_that_can_not(rule: Optimizer, start: int, stop: int, policy: str, words: str) -> None:
    with pytest.raises(OptimizerError, match=words) as caught:
        check_cut(rule, "w", SPEC, start, stop, get_policy(policy))
    details: dict[str, Any] = caught.value.details
    assert details["key"] == "w"
