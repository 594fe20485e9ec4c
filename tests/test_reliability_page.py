"""The page about reliability names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))
SCENARIOS = (
    1,
    2,
    4,
    5,
    6,
    11,
    14,
    15,
    16,
    17,
    21,
    36,
    38,
    39,
    40,
    41,
    42,
    51,
    52,
    54,
    56,
    57,
    62,
    63,
    64,
    65,
    67,
    72,
    80,
)
"""The numbers of the situations that faults and attacks bring about."""


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_named_test_is_there(path: str, name: str) -> None:
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_each_situation_has_a_test_of_its_number() -> None:
    assert len(NAMED) > 15
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    there = {int(number) for text in texts for number in re.findall(r"def test_scenario_(\d+)_", text)}
    assert [number for number in SCENARIOS if number not in there] == []
