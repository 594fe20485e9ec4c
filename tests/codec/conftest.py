"""The codecs that are tested, and who computes."""

from __future__ import annotations

import pytest

from aiokv.codec import QSGD, BFloat16, Codec, Float8, Float16, OneBit, RandomK, TopK, TwoBit

CODECS: list[Codec] = [
    OneBit(threshold=0.0),
    OneBit(threshold=0.5),
    TwoBit(threshold=0.5),
    TwoBit(threshold=1e-7),
    Float16(),
    BFloat16(),
    Float8(),
    TopK(fraction=0.1),
    TopK(k=3),
    RandomK(fraction=0.3, seed=1),
    QSGD(levels=1),
    QSGD(levels=7, seed=2),
    QSGD(levels=127),
    QSGD(levels=300),
]


@pytest.fixture(scope="session", params=CODECS, ids=lambda codec: repr(codec).replace("error_feedback=True, ", ""))
def codec(request: pytest.FixtureRequest) -> Codec:
    """Every codec, with error feedback."""
    found: Codec = request.param
    return found


@pytest.fixture(scope="session", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """Who computes."""
    return str(request.param)
