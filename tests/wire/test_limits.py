"""Limits: the documented defaults, and no nonsense."""

from __future__ import annotations

import math
from typing import Any

import pytest

from aiokv.errors import ConfigError
from aiokv.wire.limits import Limits


def test_the_defaults_are_the_documented_ones() -> None:
    limits = Limits()
    assert (limits.max_control_bytes, limits.max_payload_bytes) == (1_048_576, 67_108_864)
    assert (limits.max_handshake_bytes, limits.handshake_seconds) == (4096, 5.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_control_bytes", 0),
        ("max_control_bytes", 2**32),
        ("max_control_bytes", 1024.0),
        ("max_payload_bytes", 0),
        ("max_payload_bytes", 2**63),
        ("max_payload_bytes", True),
        ("max_handshake_bytes", 255),
        ("max_handshake_bytes", "4096"),
        ("handshake_seconds", 0),
        ("handshake_seconds", -1.0),
        ("handshake_seconds", math.inf),
        ("handshake_seconds", math.nan),
        ("handshake_seconds", True),
        ("handshake_seconds", "5"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be .*, got {value!r}"):
        Limits(**{name: value})


def test_the_largest_lengths_that_fit_the_header_are_allowed() -> None:
    limits = Limits(max_control_bytes=2**32 - 1, max_payload_bytes=2**63 - 1, max_handshake_bytes=256)
    assert limits.max_payload_bytes == 2**63 - 1
