"""Memory that is lent and used again, and launches for all tensors of a call. Only collected where CUDA is, or the
simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda

from aiokv.arrays import bytes_of
from aiokv.kernels import devices_for
from aiokv.kernels.cuda import launch, pools
from aiokv.kernels.cuda.pools import Memory, Packed, Pool, rounded

if TYPE_CHECKING:
    import pytest


def new_pool() -> tuple[Pool, list[int]]:
    """Return a pool of the host's memory, and the lengths that it allocates."""
    allocated: list[int] = []

    def allocate(nbytes: int) -> Any:
        allocated.append(nbytes)
        return np.zeros(nbytes, np.uint8)

    return Pool(allocate), allocated


@given(st.integers(0, 1 << 40))
def test_lengths_are_at_most_an_eighth_longer_than_what_is_wanted(nbytes: int) -> None:
    length = rounded(nbytes)
    assert nbytes <= length <= max(4096, nbytes * 9 / 8)
    assert rounded(length) == length


def test_memory_comes_back_when_nobody_refers_to_it() -> None:
    pool, allocated = new_pool()
    lease: Any = pool.lend(5000)
    view = bytes_of(np.asarray(lease)[:4096].view(np.float32).reshape(32, 32)[3:])
    del lease
    assert pool.idle_bytes == 0
    del view
    assert pool.idle_bytes == 5120
    kept = [pool.lend(5100), pool.lend(5000)]
    assert allocated == [5120, 5120]
    del kept


def test_no_more_is_kept_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MAX_IDLE_BYTES", 10_000)
    pool, _ = new_pool()
    leases = [pool.lend(4096) for _ in range(4)]
    del leases
    assert pool.idle_bytes == 2 * 4096


def test_what_is_packed_starts_at_whole_vectors_and_is_copied_together() -> None:
    memory = Memory(lambda nbytes: cuda.device_array(nbytes, np.uint8), lambda nbytes: np.empty(nbytes, np.uint8))
    packed = Packed(memory, [(3, "float32"), (0, "uint8"), (1, "float64"), (5, "uint8")])
    first = packed.tensors[0].address
    assert [tensor.address - first for tensor in packed.tensors] == [0, 16, 16, 32]
    assert [(array.size, array.dtype.name) for array in packed.read()] == [
        (3, "float32"),
        (0, "uint8"),
        (1, "float64"),
        (5, "uint8"),
    ]


def test_all_tensors_of_a_call_are_summed_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    run = launch.run

    def record(kernel: Any, table: Any, *arguments: Any, **more: Any) -> None:
        ends = table.parts.copy_to_host()[:, (0, 3)]
        launched.append([int(ends[ends[:, 0] == tensor, 1].max(initial=0)) for tensor in range(len(sizes))])
        run(kernel, table, *arguments, **more)

    monkeypatch.setattr(launch, "run", record)
    sizes = [5, 40, 0, 1, 33]
    lists = [[np.full(size, n, np.float32) for n in (1, 2)] for size in sizes]
    (device,) = devices_for("cuda")[:1]
    found = device.sum_lists(lists)
    assert launched == [sizes]
    assert [total.tolist() for total in found] == [[3] * size for size in sizes]


def test_lists_of_different_lengths_and_dtypes_are_told_apart() -> None:
    (device,) = devices_for("cuda")[:1]
    lists = [
        [np.full((2, 3), 1, "float16")] * 3,
        [np.full(4, 1, "float64")] * 2,
        [np.full(4, 2, "float32")] * 9,
        [np.full((), 5, "float16")] * 2,
    ]
    found = device.sum_lists(lists)
    assert [(total.shape, total.dtype.name) for total in found] == [
        ((2, 3), "float16"),
        ((4,), "float64"),
        ((4,), "float32"),
        ((), "float16"),
    ]
    assert [float(total.max()) for total in found] == [3, 2, 18, 10]


class Event:
    """One that has not happened before somebody waits for it."""

    waited: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, stream: Any = 0) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        assert self.recorded
        self.waited.append(self.recorded)


def test_page_locked_memory_is_written_when_the_copy_from_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the fifth copy of an array of which four may be under way; small ones are not staged."""
    monkeypatch.setattr(launch, "new_event", Event)
    monkeypatch.setattr(Event, "waited", [])
    room = launch.Room()
    for n in range(6):
        rows = np.full((40, 1000), n)
        assert room.put("rows", rows, 0).copy_to_host().tolist() == rows.tolist()
        assert room.put("small", rows[:3], 0).copy_to_host().tolist() == rows[:3].tolist()
        assert len(Event.waited) == max(0, n - 3)
    # The same once more: nothing is copied.
    assert room.put("rows", np.full((40, 1000), 5), 0).copy_to_host().max() == 5
    assert len(Event.waited) == 2
