"""Where the sums of lists are made, and that their bits are the same wherever that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aiokv.arrays import sending
from aiokv.codec import make_codec
from aiokv.errors import KeyUseError, SpecMismatchError
from aiokv.kernels import get_backend
from aiokv.kernels.foreign import OnDevice
from aiokv.list_sums import Merger, Resident, least_loaded, sum_in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = NDArray[Any]


class Simulated:
    """A device that sums as the reference does, and says what it was given."""

    def __init__(self) -> None:
        self.summed: list[int] = []
        """How many arrays each sum was made of."""
        self.fetched = 0

    def sum_lists(self, lists: Sequence[Sequence[Any]], squares: list[float | None] | None = None, /) -> list[Array]:
        self.summed += [len(arrays) for arrays in lists]
        return [sum_in_order([np.asarray(array) for array in arrays], get_backend("reference")) for arrays in lists]

    def fetch(self, arrays: Sequence[Any], /) -> list[Array]:
        self.fetched += len(arrays)
        return [np.asarray(array).copy() for array in arrays]

    def encodes(self, codec: Any, dtype: str, /) -> bool:
        return dtype == "float32"

    def keep_sums(self, lists: Sequence[Sequence[Any]], squares: list[float | None] | None = None, /) -> list[Array]:
        return [total.reshape(-1) for total in self.sum_lists(lists, squares)]


class OnGPU:
    """An array as libraries have it whose memory is on a device."""

    def __init__(self, array: Array, number: int = 0) -> None:
        self._array, self._number = array, number
        self.shape, self.dtype = array.shape, array.dtype

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return self._array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self._array.__array_interface__)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._number


def total_of(merging: Merger, key: Any, arrays: Sequence[Any]) -> Array:
    found: Array = merging.sum([key], [arrays])[0]
    return found


def merger(count: int) -> tuple[Merger, list[Simulated]]:
    devices: Any = [Simulated() for _ in range(count)]
    return Merger(get_backend("reference"), devices), devices


def test_scenario_73_each_new_key_goes_to_the_device_with_the_fewest_bytes() -> None:
    """40 goes to the first, 20 and 10 to the second, which has fewer then, and so on."""
    merging, devices = merger(2)
    for key, size in (("a", 10), ("b", 5), ("c", 2), ("d", 4), ("e", 1)):
        total_of(merging, key, [np.ones(size, np.float32)] * 2)
    assert merging.places == {"a": 0, "b": 1, "c": 1, "d": 1, "e": 0}
    assert merging.loads == [44, 44]
    assert [len(device.summed) for device in devices] == [2, 3]
    total_of(merging, "a", [np.ones(10, np.float32)] * 2)
    assert [len(device.summed) for device in devices] == [3, 3]
    assert merging.loads == [44, 44]


@given(sizes=st.lists(st.integers(1, 1000), max_size=40), count=st.integers(1, 8))
def test_scenario_73_no_device_has_more_than_one_buffer_too_many(sizes: list[int], count: int) -> None:
    loads = [0] * count
    for size in sizes:
        loads[least_loaded(loads)] += size
    assert max(loads) - min(loads) <= max(sizes, default=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_scenario_73_sums_on_devices_have_the_bits_of_the_host(dtype: str) -> None:
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal((3, 7)).astype(dtype) for _ in range(2)]
    on_host = total_of(Merger(get_backend("reference")), "w", arrays)
    merging, _ = merger(2)
    assert total_of(merging, "w", arrays).tobytes() == on_host.tobytes()


def test_low_precisions_take_as_much_room_as_their_sums() -> None:
    merging, _ = merger(1)
    total_of(merging, "w", [np.ones(10, np.float16)] * 2)
    assert merging.loads == [40]


def test_whole_numbers_are_summed_in_the_hosts_memory() -> None:
    merging, devices = merger(1)
    assert total_of(merging, "w", [np.array([1, 2]), np.array([3, 4])]).tolist() == [4, 6]
    assert not devices[0].summed


def test_arrays_on_a_device_are_read_where_the_sum_is_made() -> None:
    """A single one is its own sum, and is copied from where it lies."""
    merging, devices = merger(2)
    first, second = (np.full((2, 2), n, np.float32) for n in (1, 2))
    arguments = sending({"one": OnGPU(first), "two": [OnGPU(first), second], "host": second}, None)
    arguments.merge(merging)
    assert [source.tolist() for source in arguments.sources] == [[[1, 1]] * 2, [[3, 3]] * 2, [[2, 2]] * 2]
    assert [(device.summed, device.fetched) for device in devices] == [([2], 1), ([], 0)]


def test_whole_numbers_on_a_device_are_summed_in_the_hosts_memory() -> None:
    merging, devices = merger(1)
    arguments = sending("w", [OnGPU(np.array([1, 2])), OnGPU(np.array([3, 4]))])
    arguments.merge(merging)
    assert [source.tolist() for source in arguments.sources] == [[4, 6]]
    assert (devices[0].summed, devices[0].fetched) == ([], 2)


def test_sums_that_a_device_can_encode_stay_there_until_they_are_wanted_in_the_hosts_memory() -> None:
    merging, devices = merger(2)
    parts = [OnGPU(np.full((2, 2), n, np.float32), number=1) for n in (1, 2)]
    arguments = sending({"sum": parts, "double": np.ones(2), "none": OnGPU(np.ones(0, np.float32))}, None)
    arguments.merge(merging, make_codec("2bit", {}))
    kept = arguments.sources[0]
    assert isinstance(kept, Resident)
    assert (kept.shape, kept.dtype, kept.size) == ((2, 2), np.dtype("float32"), 4)
    assert kept.device is merging.devices[0]
    assert not any(isinstance(source, Resident) for source in arguments.sources[1:])
    arguments.bring()
    assert arguments.sources[0].tolist() == [[3, 3]] * 2
    assert (kept.values, devices[0].fetched) == (None, 2)


def test_what_a_device_can_not_encode_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    merging, _ = merger(1)
    for _ in range(2):
        for dtype in ("float32", "float64"):
            sending("w", OnGPU(np.ones(2, dtype))).merge(merging, make_codec("2bit", {}))
    expected = "gradients of float64 are not compressed by '2bit' on a device: they are copied to the host's memory"
    assert [record.getMessage().startswith(expected) for record in caplog.records] == [True]


def test_a_single_array_is_encoded_where_it_lies() -> None:
    merging, devices = merger(2)
    array = OnDevice(OnGPU(np.ones(3, np.float32), number=1))
    (kept,) = merging.sum(["w"], [[array]], make_codec("2bit", {}))
    assert kept.device is devices[1]


def test_arrays_on_a_device_need_a_store_that_sums_there() -> None:
    arguments = sending("w", OnGPU(np.ones(2, np.float32)))
    wrong = "key 'w': expected arrays in host memory, got OnGPU of float32 on device 0: make the store with device="
    with pytest.raises(SpecMismatchError, match=wrong):
        arguments.merge(Merger(get_backend("reference")))
    elsewhere = sending("w", OnGPU(np.ones(2, np.float32), number=3))
    with pytest.raises(SpecMismatchError, match=r"expected one of the devices that this process sees, .* on device 3"):
        elsewhere.merge(merger(2)[0])


def test_a_call_that_takes_one_array_takes_one_on_a_device() -> None:
    first = OnGPU(np.ones(2, np.float32))
    arguments = sending("w", first, lists=False)
    arguments.merge(merger(1)[0])
    assert arguments.sources[0].tolist() == [1, 1]
    with pytest.raises(KeyUseError, match="key 'w': expected one array, got a list of 2"):
        sending("w", [first, first], lists=False)
