"""Who has landed for which chunk: contributions to keys that are sent together come under a number."""

from __future__ import annotations

from typing import Any

from aiokv.core.effects import Send
from aiokv.core.keys import BUNDLE_START
from aiokv.net.arrivals import Arrivals
from aiokv.wire import messages as m
from aiokv.wire.receiver import Frame


class Store:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def arrived(self, *what: Any, encoded: bool) -> None:
        self.told.append((*what, encoded))


def arrivals() -> tuple[Arrivals, Store]:
    store = Store()
    return Arrivals(store), store  # type: ignore[arg-type]


def push_bundle(bundle: int, codec: int = 0) -> m.PushBundle:
    return m.PushBundle(bundle, 1, 0, want_value=False, timeout=1.0, codec=codec)


INIT = m.InitBundle(("a", "b"), ((1,), (2,)), "float32", "bsp", 1.0)


def test_a_push_names_its_chunk() -> None:
    arrived, store = arrivals()
    for codec in (0, 5):
        push = m.Push("w", (9,), "float32", 3, 6, 1, 0, want_value=False, timeout=1.0, codec=codec)
        arrived.received(7, Frame(1, push, 11, 12))
    assert store.told == [(11, "w", 3, False), (11, "w", 3, True)]


def test_a_bundle_stands_under_its_first_key() -> None:
    arrived, store = arrivals()
    arrived.received(7, Frame(1, INIT, 10, 12))
    arrived.received(8, Frame(1, push_bundle(4), 11, 12))
    assert store.told == [], "nobody has said that it has this number"
    arrived.answered(Send(7, 1, m.Bundled(4)))
    arrived.received(8, Frame(2, push_bundle(4, codec=5), 12, 12))
    assert store.told == [(12, "a", BUNDLE_START, True)]


def test_who_is_gone_is_not_answered() -> None:
    arrived, store = arrivals()
    arrived.received(7, Frame(1, INIT, 10, 12))
    arrived.gone(7)
    # Another connection has the number of the one before.
    arrived.answered(Send(7, 1, m.Bundled(4)))
    arrived.received(7, Frame(2, push_bundle(4), 12, 12))
    assert store.told == []
