"""Which contributions a standby does not have yet, and the rounds that wait for them."""

from __future__ import annotations

from aiokv.core.server.copies.copied_contributions import CopiedContributions
from aiokv.core.server.rounds.chunk import Chunk
from aiokv.core.server.rounds.updates import Contribution, Update
from aiokv.policy import get_policy
from aiokv.types import TensorSpec

PLACE = ("w", 0)


def chunk_of(key: str) -> Chunk:
    """Return a chunk under a policy by which workers go on before their push is in a value."""
    return Chunk(key, 0, 3, TensorSpec((6,), "float32"), get_policy("k_batch_sync:2"), f"key {key!r}")


CHUNK = chunk_of("w")


def part_of(rank: int, sequence: int) -> Contribution:
    """Return a contribution."""
    return Contribution(rank, sequence, 0, sequence, 7, rank)


def update_of(*parts: Contribution) -> Update:
    """Return an update of contributions."""
    update = Update(1)
    for part in parts:
        update.add(part)
    return update


def test_a_round_waits_until_all_of_it_is_there() -> None:
    contributions = CopiedContributions()
    first, second, later = part_of(0, 1), part_of(1, 1), part_of(0, 2)
    for number, part in enumerate((first, second, later), 1):
        contributions.add(PLACE, part)
        contributions.sent(PLACE, part.rank, part.sequence, number)
    update = update_of(first, second)
    assert not contributions.has_all(CHUNK, update)
    contributions.acknowledged(1)
    assert contributions.take() == [CHUNK], "it looks again"
    assert not contributions.has_all(CHUNK, update)
    contributions.acknowledged(2)
    assert contributions.take() == [CHUNK]
    assert contributions.take() == []
    assert contributions.has_all(CHUNK, update), "though a later push is missing"
    assert not contributions.has_all(CHUNK, update_of(later))


def test_a_push_that_was_never_told_of_is_not_waited_for() -> None:
    """It is the one that closes the round: its worker waits for the value."""
    assert CopiedContributions().has_all(CHUNK, update_of(part_of(0, 1)))


def test_what_is_sent_again_is_waited_for_again() -> None:
    contributions = CopiedContributions()
    part = part_of(0, 1)
    contributions.add(PLACE, part)
    contributions.sent(PLACE, 0, 1, 1)
    assert not contributions.has_all(CHUNK, update_of(part))
    contributions.send_again()
    contributions.acknowledged(1)
    assert contributions.take() == [], "the message with that number was another one's"
    contributions.copied(PLACE, [part])
    contributions.sent(PLACE, 0, 1, 9)
    contributions.acknowledged(9)
    assert contributions.take() == [CHUNK]


def test_what_is_in_the_value_that_is_sent_is_waited_for_no_longer() -> None:
    contributions = CopiedContributions()
    made, left = part_of(0, 1), part_of(1, 1)
    for part in (made, left):
        contributions.add(PLACE, part)
    assert not contributions.has_all(CHUNK, update_of(made))
    contributions.copied(PLACE, [left])
    assert contributions.take() == [CHUNK]
    assert contributions.has_all(CHUNK, update_of(made))
    assert not contributions.has_all(CHUNK, update_of(left))
    contributions.sent(PLACE, left.rank, left.sequence, 1)
    contributions.copied(PLACE, [])
    assert contributions.take() == [CHUNK]
    contributions.acknowledged(1)
    assert contributions.take() == [], "it has gone on"


def test_chunks_wait_for_their_own_contributions_only() -> None:
    contributions = CopiedContributions()
    part, other = part_of(0, 1), chunk_of("v")
    contributions.add(PLACE, part)
    assert contributions.has_all(other, update_of(part))
    assert not contributions.has_all(CHUNK, update_of(part))


def test_nothing_waits_for_a_chunk_that_is_no_more() -> None:
    contributions = CopiedContributions()
    contributions.add(PLACE, part_of(0, 1))
    assert not contributions.has_all(CHUNK, update_of(part_of(0, 1)))
    contributions.forget(PLACE)
    contributions.give_up()
    assert contributions.take() == []


def test_all_rounds_go_on_without_a_standby() -> None:
    contributions = CopiedContributions()
    part = part_of(0, 1)
    contributions.add(PLACE, part)
    assert not contributions.has_all(CHUNK, update_of(part))
    contributions.give_up()
    assert contributions.take() == [CHUNK]
    assert contributions.has_all(CHUNK, update_of(part))
