"""Values for arrays on devices: where they land, and who copies them to where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv.arrays import exchanging, receiving
from aiokv.errors import AiokvError, SpecMismatchError
from aiokv.sparse import pulling, pulling_rows
from aiokv.staging import Staged
from aiokv.staging import stage as stage_on
from aiokv.types import TensorSpec

Array = NDArray[Any]


class OnGPU:
    """An array as libraries have it whose memory is on a device."""

    def __init__(self, array: Array, number: int = 0) -> None:
        self.memory, self.number = array, number
        self.shape, self.dtype = array.shape, array.dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self.memory.__array_interface__)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.number


class Simulated:
    """A device that copies when it is waited for, in the order in which copies were begun."""

    def __init__(self) -> None:
        self.begun: list[tuple[Array, OnGPU, Array | None, int]] = []
        self.allocated: list[int] = []

    def allocate(self, nbytes: int, /) -> Array:
        self.allocated.append(nbytes)
        return np.full(nbytes, 0xEE, np.uint8)

    def writable(self, array: OnGPU, /) -> OnGPU:
        if not array.memory.flags.writeable:
            raise SpecMismatchError("read-only")
        return array

    def start(self, memory: Array, target: OnGPU, rows: Array | None, first: int, /) -> None:
        # A device may copy at once, too.
        self.begun.append((memory.copy(), target, rows, first))

    def wait(self) -> None:
        for memory, target, rows, first in self.begun:
            if rows is None:
                target.memory.reshape(-1).view(np.uint8)[first : first + memory.size] = memory
            else:
                target.memory[...] = 0
                target.memory[rows] = memory.view(target.dtype).reshape(-1, *target.shape[1:])
        self.begun = []


def floats(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def stage(arguments: Any, devices: list[Any]) -> Staged:
    return stage_on(arguments, devices)


def unknown(key: object) -> None:
    raise AssertionError(key)


def test_a_value_lands_once_and_every_device_copies_it() -> None:
    devices = [Simulated(), Simulated()]
    outs = [OnGPU(floats(2, 3)), OnGPU(floats(2, 3), 1), floats(2, 3)]
    arguments = receiving("w", outs, unknown)
    staged = stage(arguments, devices)
    arguments.targets[0][...] = 7
    staged.copy()
    assert arguments.finish() is outs
    assert [np.asarray(getattr(out, "memory", out)).tolist() for out in outs] == [[[7] * 3] * 2] * 3
    assert [device.allocated for device in devices] == [[24], []]


def test_no_elements_need_no_copy() -> None:
    device = Simulated()
    arguments = receiving("w", OnGPU(floats(0, 5)), unknown)
    staged = stage(arguments, [device])
    staged.copy()
    assert arguments.targets[0].shape == (0, 5)
    assert not staged.landed(0, 0, 0)


def test_what_is_pushed_may_receive_as_well() -> None:
    array = OnGPU(floats(3))
    arguments = exchanging("w", array, array)
    staged = stage(arguments, [Simulated()])
    arguments.targets[0][...] = [1, 2, 3]
    staged.copy()
    assert arguments.finish() is array
    assert array.memory.tolist() == [1, 2, 3]


def test_rows_go_to_their_places() -> None:
    out = OnGPU(floats(5, 2))
    pull = pulling_rows("t", out, [4, 1, 4], TensorSpec((5, 2), "float32"), lambda key, spec: [0])
    arguments = pulling([pull])
    staged = stage(arguments, [Simulated()])
    arguments.targets[0][...] = [[1, 2], [3, 4]]
    staged.copy()
    assert out.memory.tolist() == [[0, 0], [1, 2], [0, 0], [0, 0], [3, 4]]


def test_what_has_landed_is_copied_while_the_rest_is_coming() -> None:
    """Neighbours in one copy, and what comes again once more; in the end what nobody has told."""
    device, out = Simulated(), OnGPU(floats(8))
    arguments = receiving("w", [out, OnGPU(floats(8))], unknown)
    staged = stage(arguments, [device])
    memory = arguments.targets[0]
    memory[...] = range(8)
    assert [staged.landed(0, *part) for part in ((8, 12), (16, 24), (12, 16), (4, 4))] == [True, True, True, False]
    staged.begin()
    assert [(copy.size, first) for copy, _, _, first in device.begun] == [(16, 8)] * 2
    memory[2] = 20
    staged.landed(0, 8, 12)
    staged.copy()
    assert out.memory.tolist() == [0, 1, 20, 3, 4, 5, 6, 7]


def test_rows_are_copied_when_all_are_there() -> None:
    pull = pulling_rows("t", OnGPU(floats(5, 2)), [4, 1], TensorSpec((5, 2), "float32"), lambda key, spec: [0])
    staged = stage(pulling([pull]), [Simulated()])
    assert not staged.landed(0, 0, 8)
    assert not staged.landed(1, 0, 8), "nobody has an array for it on a device"


def test_an_array_of_which_no_rows_are_wanted_is_written_too() -> None:
    """Its rows become zero."""
    out, device = OnGPU(np.ones((2, 2), np.float32)), Simulated()
    pull = pulling_rows("t", out, [], TensorSpec((2, 2), "float32"), lambda key, spec: [0])
    staged = stage(pulling([pull]), [device])
    staged.copy()
    assert out.memory.tolist() == [[0, 0], [0, 0]]


def test_what_could_not_be_begun_is_said_at_the_end() -> None:
    class Broken(Simulated):
        def start(self, memory: Array, target: OnGPU, rows: Array | None, first: int, /) -> None:
            raise AiokvError("no such stream")

    staged = stage(receiving("w", OnGPU(floats(3)), unknown), [Broken()])
    staged.landed(0, 0, 4)
    staged.begin()
    with pytest.raises(AiokvError, match="no such stream"):
        staged.copy()


def test_a_call_that_failed_writes_to_no_array_any_longer() -> None:
    device, out = Simulated(), OnGPU(floats(3))
    arguments = receiving("w", out, unknown)
    staged = stage(arguments, [device])
    arguments.targets[0][...] = 7
    staged.landed(0, 0, 4)
    staged.begin()
    staged.landed(0, 4, 8)
    staged.wait()
    staged.begin()
    assert not device.begun
    assert out.memory.tolist() == [7, 0, 0]


def test_an_array_that_cannot_be_written_is_refused_before_anything_is_sent() -> None:
    read_only = floats(3)
    read_only.flags.writeable = False
    arguments = receiving(["v", "w"], [OnGPU(floats(3)), OnGPU(read_only)], unknown)
    targets = list(arguments.targets)
    with pytest.raises(SpecMismatchError, match="read-only"):
        stage(arguments, [Simulated()])
    assert all(now is before for now, before in zip(arguments.targets, targets, strict=True))


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (
            OnGPU(floats(3), 1),
            "key 'w': expected one of the devices that this process sees, got OnGPU of float32 on device 1",
        ),
        (
            [OnGPU(floats(3)), OnGPU(floats(4))],
            r"the first array of its list is float32\[3\], number 1 is float32\[4\]",
        ),
    ],
)
def test_arrays_that_cannot_receive_are_refused(out: Any, words: str) -> None:
    with pytest.raises(SpecMismatchError, match=words):
        stage(receiving("w", out, unknown), [Simulated()])


def test_a_store_without_devices_says_how_to_make_one_that_has() -> None:
    with pytest.raises(SpecMismatchError, match=r'expected arrays in host memory.*make the store with device="cuda"'):
        stage(receiving("w", OnGPU(floats(3)), unknown), [])
