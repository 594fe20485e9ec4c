"""Arrays of other libraries, used where they lie. Only collected where CUDA is, or the simulator."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import aiokv
from aiokv.data import with_dlpack
from aiokv.errors import SpecMismatchError
from aiokv.kernels import devices_for, get_backend
from aiokv.kernels.cuda import reduce
from aiokv.kernels.cuda.memory import SIMULATED
from aiokv.kernels.cuda.tensors import tensor_of, writable_tensor
from aiokv.kernels.foreign import OnDevice
from aiokv.list_sums import Merger

Array = NDArray[Any]

pytestmark = pytest.mark.skipif(not SIMULATED, reason="the host's memory is the device's in the simulator alone")


class OnGPU:
    """An array as libraries have it whose memory is on a device."""

    def __init__(self, array: Array, **others: Any) -> None:
        self._array, self._others = array, others
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self._array.__array_interface__) | self._others


# --- DLPack ---


def test_a_tensor_of_pytorch_is_used_where_it_lies() -> None:
    """A bfloat16 has no array interface."""
    torch = pytest.importorskip("torch")
    whole = torch.arange(12, dtype=torch.bfloat16, requires_grad=True).reshape(3, 4)
    found = tensor_of("x", whole)
    assert (found.address, found.size, found.dtype.name, found.shape) == (whole.data_ptr(), 12, "bfloat16", (3, 4))
    part = tensor_of("x", whole[1])
    assert (part.address, part.size) == (whole.data_ptr() + 8, 4)
    with pytest.raises(SpecMismatchError, match=r"x must be C-contiguous; got shape \(4, 3\)"):
        tensor_of("x", whole.T)
    with pytest.raises(SpecMismatchError, match="x must be of integers or floats; got DLPack's type 5"):
        tensor_of("x", torch.zeros(2, dtype=torch.complex64))


def test_memory_is_kept_as_long_as_its_tensor_and_no_longer() -> None:
    array = np.ones(5, np.float32)
    alive = weakref.ref(array)
    found = tensor_of("x", array)
    del array
    assert alive() is not None
    del found
    assert alive() is None


def test_what_another_device_has_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(SpecMismatchError, match="x must be on a CUDA device"):
        tensor_of("x", torch.zeros(2, device="meta"))


# --- the array interface ---


def test_an_array_with_the_interface_is_used_where_it_lies() -> None:
    array = np.ones((2, 3), np.float16)
    found = tensor_of("x", OnGPU(array))
    assert (found.address, found.size, found.dtype, found.shape) == (array.ctypes.data, 6, array.dtype, (2, 3))


def test_memory_that_a_kernel_cannot_use_is_refused() -> None:
    array = np.ones(8, np.float32)
    with pytest.raises(SpecMismatchError, match=r"x must be C-contiguous; got shape \(4,\), strides \(8,\)"):
        tensor_of("x", OnGPU(array[::2]))
    with pytest.raises(SpecMismatchError, match="x must be without a mask"):
        tensor_of("x", OnGPU(array, mask=array))
    with pytest.raises(SpecMismatchError, match="x must be aligned to its elements of 4 bytes"):
        tensor_of("x", OnGPU(np.zeros(33, np.uint8)[1:].view(np.float32)))
    with pytest.raises(SpecMismatchError, match="x must be an array with DLPack or __cuda_array_interface__; got list"):
        tensor_of("x", [1.0])
    array.flags.writeable = False
    with pytest.raises(SpecMismatchError, match="out must be writable; got a read-only array"):
        reduce.sum_into([OnGPU(array)], [[OnGPU(np.ones(8, np.float32))]])


# --- lists under one key ---


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_scenario_73_a_list_is_summed_on_the_device_with_the_bits_of_the_host(dtype: str, count: int) -> None:
    rng = np.random.default_rng(count)
    arrays = [rng.standard_normal((5, 7)).astype(dtype) for _ in range(count)]
    (on_host,) = Merger(get_backend("reference")).sum(["w"], [arrays])
    merging = Merger(get_backend("reference"), devices_for("cuda"))
    given: list[Any] = arrays if dtype == "bfloat16" else [OnDevice(OnGPU(array)) for array in arrays]
    for _ in range(2):
        # The second time in the memory of the first.
        (total,) = merging.sum(["w"], [given])
        assert total.shape == (5, 7)
        assert total.tobytes() == on_host.tobytes()


def test_arrays_on_a_device_are_pushed_without_a_copy_of_the_users() -> None:
    kv = aiokv.create("device")
    kv.init("w", np.zeros((2, 2), np.float32))
    parts = [np.full((2, 2), n, np.float32) for n in (1, 2)]
    kv.push("w", [OnGPU(part) for part in parts])
    np.testing.assert_array_equal(kv.pull("w"), [[3, 3]] * 2)
    kv.push("w", OnGPU(parts[1]))
    np.testing.assert_array_equal(kv.pull("w"), [[2, 2]] * 2)
    kv.close()


def test_arrays_of_ours_are_taken_with_dlpack() -> None:
    """At the same place, for as long as anybody uses them."""
    torch = pytest.importorskip("torch")
    (part, _) = aiokv.split_and_load(np.arange(6, dtype=np.float32).reshape(2, 3), ["cuda"] * 2)
    tensor, array = torch.from_dlpack(with_dlpack(part)), np.from_dlpack(with_dlpack(part))
    assert tensor.tolist() == [[0, 1, 2]]
    tensor[0, 1] = 7
    assert array.tolist() == [[0, 7, 2]]
    assert part.copy_to_host().tolist() == [[0, 7, 2]]


def test_arrays_of_jax_are_exchanged_and_never_written() -> None:
    jax = pytest.importorskip("jax")
    array = jax.numpy.arange(6, dtype="bfloat16").reshape(2, 3)
    found = tensor_of("x", array)
    assert (found.address, found.shape, found.dtype.name) == (array.unsafe_buffer_pointer(), (2, 3), "bfloat16")
    with pytest.raises(SpecMismatchError, match="x must be writable; got a read-only"):
        writable_tensor("x", array)
    assert jax.dlpack.from_dlpack(with_dlpack(array)).tolist() == array.tolist()
