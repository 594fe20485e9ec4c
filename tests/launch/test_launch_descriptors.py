"""A node may have as many file descriptors as its connections need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.launch import descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator

resource = pytest.importorskip("resource", reason="Windows has no limit of file descriptors")


@pytest.fixture
def hard() -> Iterator[int]:
    """The hard limit of this process, whose soft one is 512 meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    yield hard if hard != resource.RLIM_INFINITY else 1 << 30
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def soft_limit() -> int:
    """Return what this process may have now."""
    return int(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def test_limit_is_raised_as_far_as_it_is_needed(hard: int) -> None:
    assert hard > 1000, "the tests need a hard limit of more than 1000 file descriptors"
    assert descriptors.make_room(600) == 0
    assert soft_limit() == 600 + descriptors.SPARE


def test_limit_that_is_high_enough_stays(hard: int) -> None:
    assert descriptors.make_room(100) == 0
    assert soft_limit() == 512


def test_what_is_missing_is_said_when_the_system_has_no_more(hard: int) -> None:
    missing = descriptors.make_room(hard)
    assert missing == hard + descriptors.SPARE - soft_limit()
    assert missing > 0
