"""What is sent later than it was wanted leaves in its order."""

from __future__ import annotations

import functools

from aiokv.net.outbox import Held, Row


def test_messages_leave_in_the_order_in_which_they_were_wanted() -> None:
    row, left = Row(), list[str]()
    leave = {name: row.enter(peer) for name, peer in (("a1", 1), ("a2", 1), ("b1", 2), ("a3", 1))}
    for name in ("a2", "b1", "a1", "a3"):
        leave[name](functools.partial(left.append, name))
    assert left == ["b1", "a1", "a2", "a3"]


def test_what_is_held_is_done_once_when_it_is_known_and_free() -> None:
    for free_first in (True, False):
        held, done = Held(), list[int]()
        give = functools.partial(held.give, functools.partial(done.append, 1))
        first, second = (held.let_go, give) if free_first else (give, held.let_go)
        first()
        assert not done
        second()
        assert done == [1]
