"""Initializers as data: what they may be."""

from __future__ import annotations

from typing import Any

import pytest

from aiokv.errors import ConfigError
from aiokv.initializers import Normal, Uniform, Zeros, make_initializer


def test_initializers_by_name() -> None:
    assert make_initializer({}, "int8") == make_initializer({"name": "zeros"}, "int8") == Zeros()
    assert make_initializer({"name": "normal", "scale": 2, "seed": 3}, "float16") == Normal(scale=2, seed=3)
    assert make_initializer({"name": "uniform"}, "float64") == Uniform()


@pytest.mark.parametrize(
    ("data", "dtype", "reason"),
    [
        ({"name": "nope"}, "float32", "known: normal, uniform, zeros"),
        ({"name": 3}, "float32", "unknown initializer 3"),
        ({"name": "zeros", "scale": 1.0}, "float32", "its parameters are: none"),
        ({"name": "normal", "sigma": 1.0}, "float32", "its parameters are: scale, seed"),
        ({"name": "normal", "scale": 0}, "float32", "scale must be a finite number > 0, got 0"),
        ({"name": "normal", "scale": True}, "float32", "scale"),
        ({"name": "uniform", "scale": "1"}, "float32", "scale"),
        ({"name": "uniform", "scale": float("inf")}, "float32", "scale"),
        ({"name": "uniform", "seed": -1}, "float32", "seed must be a whole number"),
        ({"name": "uniform", "seed": 2**63}, "float32", "seed"),
        ({"name": "uniform", "seed": 1.0}, "float32", "seed"),
        ({"name": "uniform", "seed": True}, "float32", "seed"),
        ({"name": "normal"}, "int32", "makes floats, but the dtype is int32"),
    ],
)
def test_what_can_not_be_is_refused(data: dict[str, Any], dtype: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_initializer(data, dtype)
