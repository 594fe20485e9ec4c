"""Arrays on a device, whoever made them, as kernels take them; and what they must be.

Memory of CuPy, PyTorch, JAX and Numba is used where it lies: through DLPack, which knows bfloat16, or else through
`__cuda_array_interface__`. In Numba's simulator the host's memory is the device's.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numba import cuda

from aiokv.kernels.checks import mismatch
from aiokv.kernels.cuda import dlpack
from aiokv.kernels.cuda.memory import SIMULATED
from aiokv.kernels.foreign import CUDA_DEVICE, MANAGED_DEVICE, dlpack_device, is_immutable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiokv.kernels.cuda.streaming import Streaming
    from aiokv.kernels.reference import Array

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

CPU_DEVICE = 1
"""The number of DLPack."""

OWN_STREAM = 1
"""The default stream, as DLPack and the array interface call it."""

DEFAULT_STREAMS = (None, OWN_STREAM)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One-dimensional contiguous memory on a device.

    Attributes:
        address: of the first element.
        size: number of elements.
        dtype: of the elements.
        owner: what keeps the memory.
        shape: as the owner has it.
        read_only: whether nobody may write.
        device: which one it is on, where that is known.
    """

    address: int
    size: int
    dtype: np.dtype[Any]
    owner: Any
    shape: tuple[int, ...]
    read_only: bool = False
    device: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize


class Copy:
    """A copy on the device of an array in the host's memory, of any dtype; numba-cuda's own arrays have no bfloat16.

    Args:
        array: one-dimensional and contiguous.
        stream: in whose order it is copied.
    """

    def __init__(self, array: Array, stream: Any = 0) -> None:
        self.dtype = array.dtype
        self._memory = cuda.to_device(_as_memory(array), stream=stream)

    def __getitem__(self, part: slice) -> Copy:
        """Return a part of it, which is no copy."""
        found = object.__new__(Copy)
        found.dtype, found._memory = self.dtype, self._memory[part]
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return int(self._memory.nbytes)

    @property
    def tensor(self) -> Tensor:
        """What a kernel is told of it."""
        return tensor_of("array", self._memory, self.dtype)

    def copy_to(self, array: Array) -> None:
        """Copy it to an array of the same length and dtype in the host's memory."""
        if array.size:
            self._memory.copy_to_host(_as_memory(array))


class _Bytes:
    """A tensor's memory as bytes, for Numba."""

    def __init__(self, tensor: Tensor) -> None:
        self.owner = tensor
        data = (tensor.address, tensor.read_only)
        self.__cuda_array_interface__ = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": data, "version": 3}


def memory_of(tensor: Tensor) -> Any:
    """Return the bytes of a tensor as one of Numba's arrays, which knows how to copy from and to the host's memory."""
    if not SIMULATED:
        # Numba reads memory of another device through the addresses that all devices share.
        return cuda.as_cuda_array(_Bytes(tensor))  # type: ignore[no-untyped-call]
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray  # noqa: PLC0415 - nothing else needs it

    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.address)
    return FakeCUDAArray(np.frombuffer(memory, np.uint8))  # type: ignore[no-untyped-call]


def read(tensor: Tensor, out: Array, stream: Any = 0) -> None:
    """Copy a tensor to memory of the host that has as many bytes; with a stream it is there when that is."""
    if tensor.size:
        memory_of(tensor).copy_to_host(out.reshape(-1).view(np.uint8), stream=stream)


def writable_tensor(name: str, array: Any) -> Tensor:
    """Return what is told of an array that is to be written.

    Raises:
        SpecMismatchError: as `tensor_of`, or nobody may write to it.
    """
    tensor = tensor_of(name, array)
    if tensor.read_only or is_immutable(array):
        raise mismatch(name, "writable", f"a read-only {type(array).__name__}")
    return tensor


def _as_memory(array: Array) -> Array:
    return array.view(np.int16) if array.dtype == BFLOAT16 else array


def tensor_of(name: str, array: Any, dtype: Any = None) -> Tensor:
    """Return what a kernel is told of an array.

    Args:
        name: of the argument, for errors.
        array: a `Tensor`, a `Copy`, or an array with DLPack or `__cuda_array_interface__` on the current device.
        dtype: of the elements, where the array's own dtype is but a stand-in.

    Raises:
        SpecMismatchError: it lies elsewhere, is not contiguous, or not where its elements may lie.
    """
    if isinstance(array, Tensor):
        return array
    if isinstance(array, Copy):
        return array.tensor
    interface = _interface(array)
    if interface is not None:
        found = _from_interface(name, array, interface)
    elif hasattr(array, "__dlpack__"):
        found = _from_dlpack(name, array)
    else:
        expected = "an array with DLPack or __cuda_array_interface__"
        raise mismatch(name, expected, type(array).__name__)
    if dtype is not None:
        found = Tensor(found.address, found.size, np.dtype(dtype), array, found.shape, found.read_only)
    if found.address % found.dtype.itemsize:
        raise mismatch(name, f"aligned to its elements of {found.dtype.itemsize} bytes", f"address {found.address:#x}")
    return found


def _interface(array: Any) -> dict[str, Any] | None:
    """Return an array's interface; None where DLPack is to be asked."""
    if SIMULATED and hasattr(array, "__cuda_ndarray__"):
        # What the simulator has for an array on the device.
        found: dict[str, Any] = dict(array._ary.__array_interface__)
        found["typestr"] = array.dtype
        found["strides"] = None if array.is_c_contiguous() else array.strides
        return found
    # PyTorch offers an interface, which is an error for bfloat16; JAX has one for arrays of one device.
    if hasattr(array, "__dlpack__") and not hasattr(array, "__cuda_ndarray__"):
        return None
    interface: dict[str, Any] | None = getattr(array, "__cuda_array_interface__", None)
    return interface


def _from_interface(name: str, array: Any, interface: dict[str, Any]) -> Tensor:
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    if interface.get("mask") is not None:
        raise mismatch(name, "without a mask", "a masked array")
    _check_strides(name, shape, interface.get("strides"), dtype.itemsize)
    _follow(name, interface.get("stream"))
    address, read_only = interface["data"]
    device = None if SIMULATED or not hasattr(array, "gpu_data") else int(array.gpu_data.context.device.id)
    return Tensor(int(address or 0), int(np.prod(shape)), dtype, array, shape, bool(read_only), device)


def _follow(name: str, stream: int | None) -> None:
    """Have what is still under way on an array's own stream done before anything that is begun from now on.

    Raises:
        SpecMismatchError: the stream is 0, which the interface does not allow.
    """
    if stream == 0:
        raise mismatch(name, "on a stream that its interface names", "stream 0, which may be either default stream")
    if stream in DEFAULT_STREAMS:
        return
    new_event: Any = cuda.event
    other, mark = cuda.external_stream(stream), new_event(timing=False)
    try:
        mark.record(other)
        mark.wait()
    except Exception:  # noqa: BLE001 - the driver's errors have many classes
        # It is a stream of another device; the interface does not say of which.
        other.synchronize()


def _from_dlpack(name: str, array: Any) -> Tensor:
    # PyTorch does not export what it differentiates.
    source = array.detach() if hasattr(array, "detach") else array
    device = dlpack_device(source)
    here = (CPU_DEVICE,) if SIMULATED else (CUDA_DEVICE, MANAGED_DEVICE)
    if device not in here:
        raise mismatch(name, "on a CUDA device", f"an array on DLPack's device {device}")
    try:
        capsule = dlpack.request(source) if SIMULATED else dlpack.request(source, stream=OWN_STREAM)
        found = dlpack.describe(capsule)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise mismatch(name, "an array that DLPack exports", f"{type(array).__name__}: {error}") from error
    dtype = _dtype(name, found)
    strides = None if found.strides is None else [step * dtype.itemsize for step in found.strides]
    _check_strides(name, found.shape, strides, dtype.itemsize)
    size = int(np.prod(found.shape))
    # What is written to a copy would be lost.
    read_only = found.read_only or found.is_copied
    return Tensor(found.address, size, dtype, capsule, found.shape, read_only, found.device[1])


def _dtype(name: str, found: dlpack.Described) -> np.dtype[Any]:
    kind = dlpack.KINDS.get(found.code)
    if kind is None or found.lanes != 1:
        raise mismatch(name, "of integers or floats", f"DLPack's type {found.code} with {found.lanes} lanes")
    return np.dtype(f"{kind}{found.bits}")


def _check_strides(name: str, shape: tuple[int, ...], strides: Iterable[int] | None, itemsize: int) -> None:
    if strides is None:
        return
    step = itemsize
    for length, stride in zip(reversed(shape), reversed(list(strides)), strict=True):
        if length > 1 and stride != step:
            raise mismatch(name, "C-contiguous", f"shape {shape}, strides {tuple(strides)}")
        step *= length


def check_rows(rows: Sequence[Sequence[Tensor]], spec: Streaming) -> None:
    """Check the tensors of one launch: what a kernel reads and writes is not checked there.

    Raises:
        SpecMismatchError: one has another dtype or length than it should, is read-only, or overlaps one that is
            written.
    """
    names, written = list(spec.arrays), {name for name, _ in spec.writes}
    for row in rows:
        first = next(n for n, name in enumerate(names) if name != spec.packed)
        for (name, dtype), tensor in zip(spec.arrays.items(), row, strict=True):
            size = row[first].size
            if name == spec.packed:
                size = -(-size // spec.group)
            if tensor.dtype != np.dtype(dtype) or tensor.size != size:
                raise mismatch(name, f"{dtype}[{size}] to fit {names[first]}", f"{tensor.dtype}[{tensor.size}]")
            if name in written:
                _check_written(name, tensor, row, names)


def _check_written(name: str, tensor: Tensor, row: Sequence[Tensor], names: list[str]) -> None:
    if tensor.read_only:
        raise mismatch(name, "writable", "a read-only array")
    for other, neighbour in zip(names, row, strict=True):
        apart = (
            tensor.address + tensor.nbytes <= neighbour.address
            or neighbour.address + neighbour.nbytes <= tensor.address
        )
        if other != name and not apart:
            raise mismatch(name, f"apart from {other} in memory", "arrays that overlap")
