"""What servers count of contributions."""

from __future__ import annotations

from aiokv.core.server.rounds.tallies import EXACT, Tallies


def test_each_staleness_has_its_own_count_and_large_ones_are_put_together() -> None:
    tallies = Tallies()
    for staleness in (0, 5, 5, EXACT - 1, EXACT, EXACT + 1, 2 * EXACT - 1, 2 * EXACT, 5000):
        tallies.applied([3], [staleness])
    counts = tallies.answer().ranks[3].staleness
    assert counts == {0: 1, 5: 2, 1023: 1, 1024: 3, 2048: 1, 4096: 1}


def test_who_pushes_and_never_reads_fills_no_memory() -> None:
    tallies = Tallies()
    for version in range(100_000):
        tallies.applied([0], [version])
    tally = tallies.answer().ranks[0]
    assert tally.applied == sum(tally.staleness.values()) == 100_000
    assert len(tally.staleness) < EXACT + 20
