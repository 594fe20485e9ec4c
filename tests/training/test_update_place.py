"""Where the update of a training step is made, by MXNet's rules."""

from __future__ import annotations

from typing import Any

import pytest

from aiokv.errors import ConfigError
from aiokv.training.update_place import Place, place_of_update


@pytest.mark.parametrize(
    ("store", "wanted", "options", "place"),
    [
        ("dist_sync", None, {}, Place.SERVERS),
        ("dist_sync", True, {}, Place.SERVERS),
        ("dist_sync", False, {}, Place.WORKERS),
        ("bsp", None, {"by_name": False}, Place.SERVERS),
        ("dist_async", None, {}, Place.SERVERS),
        ("dist_async", True, {}, Place.SERVERS),
        ("asp", None, {"by_name": False}, Place.SERVERS),
        ("dist_sync", None, {"largest": (16 << 20) + 1}, Place.SERVERS),
        ("local", None, {}, Place.ALONE),
        ("local", False, {}, Place.ALONE),
        ("local", True, {}, Place.SERVERS),
        ("local", None, {"by_name": False}, Place.SERVERS),
        ("local", None, {"devices": 2}, Place.SERVERS),
        ("local", None, {"devices": 2, "largest": 16 << 20}, Place.SERVERS),
        ("local", None, {"devices": 2, "largest": (16 << 20) + 1}, Place.WORKERS),
        ("local", True, {"devices": 2, "largest": (16 << 20) + 1}, Place.SERVERS),
        (None, None, {}, Place.ALONE),
        (None, False, {}, Place.ALONE),
    ],
)
def test_where_the_update_is_made(store: str | None, wanted: bool | None, options: Any, place: Place) -> None:
    """The table of MXNet's Trainer."""
    assert place_of_update(store, wanted, **options) is place


@pytest.mark.parametrize(
    ("store", "wanted", "complaint"),
    [
        ("dist_async", False, "with store 'dist_async' updates are made on the servers"),
        ("asp", False, "with store 'asp' updates are made on the servers"),
        (None, True, "there is no store"),
    ],
)
def test_where_the_update_can_not_be_made(store: str | None, wanted: bool, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        place_of_update(store, wanted)
