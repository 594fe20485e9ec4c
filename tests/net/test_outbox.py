"""What is sent later than it was wanted leaves in its order."""

from __future__ import annotations

import functools

from aiokv.net.outbox import Held, Outbox


def test_messages_leave_in_the_order_in_which_they_were_wanted() -> None:
    outbox, left = Outbox(), list[str]()
    leave = {name: outbox.enter(peer) for name, peer in (("a1", 1), ("a2", 1), ("b1", 2), ("a3", 1))}
    for name in ("a2", "b1", "a1", "a3"):
        leave[name](functools.partial(left.append, name))
    assert left == ["b1", "a1", "a2", "a3"]


def test_what_is_held_is_done_once_when_it_is_known_and_free() -> None:
    for free_first in (True, False):
        held, done = Held(), list[int]()
        steps = [held.let_go, functools.partial(held.give, functools.partial(done.append, 1))]
        steps[not free_first]()
        assert not done
        steps[free_first]()
        assert done == [1]
