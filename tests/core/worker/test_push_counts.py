"""How often a worker has pushed, where somebody else pushed before."""

from __future__ import annotations

from aiokv.core.worker.known_keys import KnownKeys
from aiokv.core.worker.push_counts import PushCounts


def test_keys_of_a_loaded_file_that_are_made_later_are_as_far_behind_as_they_were() -> None:
    counts = PushCounts(KnownKeys("bsp"))
    counts.resume(7, {"first": 5, "second": 3})
    assert [counts.counted("first"), counts.counted("second"), counts.counted("new")] == [7, 5, 0]
    assert counts.next_clock(["second"]) == 7, "no step is made twice"
    assert counts.next_clock(["first"]) == 8
