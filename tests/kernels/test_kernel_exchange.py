"""Memory that is exchanged with CuPy, PyTorch and JAX, without a card: arrays that hold to the protocols to the letter.

Their memory is the host's; they say that it is on a device. The capsules are NumPy's.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv.errors import SpecMismatchError
from aiokv.kernels.foreign import OnDevice, is_on_device

tensors = pytest.importorskip("aiokv.kernels.cuda.tensors", reason="numba-cuda is not installed", exc_type=ImportError)
exchange = pytest.importorskip("aiokv.kernels.cuda.exchange", exc_type=ImportError)

pytestmark = pytest.mark.skipif(tensors.SIMULATED, reason="in the simulator the host's memory is the device's")

Array = NDArray[Any]

KNOWS_VERSIONS = np.lib.NumpyVersion(np.__version__) >= "2.1.0"

_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

# Where the numbers of the device stand, by DLPack's header: behind the tensor's address; before that a versioned one
# has two numbers of 32 bits, two addresses and the flags.
PLAIN, VERSIONED = (b"dltensor", 8), (b"dltensor_versioned", 32 + 8)


def on_device(capsule: Any, number: int, kind: tuple[bytes, int]) -> Any:
    """Say in a capsule that its memory is on a CUDA device."""
    name, place = kind
    (ctypes.c_int32 * 2).from_address(_pointer(capsule, name) + place)[:] = [2, number]
    return capsule


class Library:
    """An array with DLPack, as CuPy, PyTorch and JAX have it."""

    def __init__(self, array: Array, number: int = 0, *, versions: bool = True) -> None:
        self.array, self.number, self.versions = array, number, versions
        self.shape, self.dtype = array.shape, array.dtype
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.number

    def __dlpack__(self, *, stream: Any = None, **more: Any) -> Any:
        if more and not self.versions:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        assert set(more) <= {"max_version", "dl_device", "copy"}
        # A stream is a whole number; 0 may be either default stream, and None leaves it to the producer.
        assert type(stream) is int
        assert stream == -1 or stream > 0
        self.streams.append(stream)
        newest = more.get("max_version")
        if newest is None or not KNOWS_VERSIONS:
            return on_device(self.array.__dlpack__(), self.number, PLAIN)
        return on_device(self.array.__dlpack__(max_version=newest), self.number, VERSIONED)


class CuPyLike:
    """An array with `__cuda_array_interface__` of version 3."""

    def __init__(self, array: Array, **interface: Any) -> None:
        self.array, self.interface = array, interface
        self.shape, self.dtype = array.shape, array.dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        given = self.array.__array_interface__
        return {name: given[name] for name in ("shape", "typestr", "data")} | {"version": 3} | self.interface


# --- in ---


@pytest.mark.parametrize("versions", [True, False], ids=["with versions", "without"])
def test_memory_is_used_where_it_lies_in_the_order_of_the_default_stream(versions: bool) -> None:
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    library = Library(array, 1, versions=versions)
    assert is_on_device(library)
    assert OnDevice(library).number == 1
    found = tensors.tensor_of("x", library)
    assert (found.address, found.shape, found.dtype.name, found.device) == (array.ctypes.data, (2, 3), "float16", 1)
    assert not found.read_only
    assert library.streams == [1]


def test_memory_is_given_back_when_nobody_uses_it() -> None:
    array = np.ones(3, np.float32)
    alive = weakref.ref(array)
    found = tensors.tensor_of("x", Library(array))
    del array
    assert alive() is not None
    del found
    gc.collect()
    assert alive() is None


@pytest.mark.skipif(not KNOWS_VERSIONS, reason="this NumPy exports no read-only arrays")
def test_read_only_memory_is_read_and_never_written() -> None:
    """JAX's arrays are so; before version 1 of DLPack, no array could say it."""
    array = np.ones(3, np.float32)
    array.flags.writeable = False
    assert tensors.tensor_of("x", Library(array)).read_only
    with pytest.raises(SpecMismatchError, match="out must be writable; got a read-only Library"):
        tensors.writable_tensor("out", Library(array))
    with pytest.raises(SpecMismatchError, match="x must be an array that DLPack exports; got Library: Cannot export"):
        tensors.tensor_of("x", Library(array, versions=False))


@pytest.mark.skipif(not KNOWS_VERSIONS, reason="this NumPy has no flags")
def test_a_copy_is_never_written_since_nobody_would_see_it() -> None:
    class Copying(Library):
        def __dlpack__(self, **more: Any) -> Any:
            capsule = super().__dlpack__(**more)
            ctypes.c_uint64.from_address(_pointer(capsule, VERSIONED[0]) + 24).value |= 2
            return capsule

    with pytest.raises(SpecMismatchError, match="out must be writable"):
        tensors.writable_tensor("out", Copying(np.ones(3, np.float32)))


@pytest.mark.skipif(not KNOWS_VERSIONS, reason="this NumPy has no versions")
def test_a_major_version_that_is_not_known_is_refused() -> None:
    class Newer(Library):
        def __dlpack__(self, **more: Any) -> Any:
            capsule = super().__dlpack__(**more)
            ctypes.c_uint32.from_address(_pointer(capsule, VERSIONED[0])).value = 2
            return capsule

    with pytest.raises(SpecMismatchError, match=r"DLPack 2\.\d+ is not known"):
        tensors.tensor_of("x", Newer(np.ones(3, np.float32)))


def test_the_interface_says_what_may_be_written() -> None:
    array = np.ones((2, 3), np.float64)
    found = tensors.tensor_of("x", CuPyLike(array))
    assert (found.address, found.shape, found.dtype.name) == (array.ctypes.data, (2, 3), "float64")
    array.flags.writeable = False
    with pytest.raises(SpecMismatchError, match="out must be writable"):
        tensors.writable_tensor("out", CuPyLike(array))
    empty = tensors.tensor_of("x", CuPyLike(np.ones((0, 3), np.float32), data=(0, False)))
    assert (empty.address, empty.size) == (0, 0)


class Cuda:
    """What of CUDA is called, in order. `elsewhere`: streams of another device."""

    def __init__(self, *, elsewhere: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.gpus = [self, self]
        self.elsewhere = elsewhere

    def __enter__(self) -> None:
        self.calls.append(("enter",))

    def __exit__(self, *_: object) -> None:
        pass

    def external_stream(self, pointer: int) -> Any:
        cuda = self

        class Stream:
            def synchronize(self) -> None:
                cuda.calls.append(("synchronize", pointer))

            def __repr__(self) -> str:
                return f"stream {pointer}"

        return Stream()

    def event(self, *, timing: bool) -> Any:
        assert not timing
        cuda = self

        class Event:
            def record(self, stream: Any = "default") -> None:
                if cuda.elsewhere:
                    raise RuntimeError("CUDA_ERROR_INVALID_HANDLE")
                cuda.calls.append(("record", str(stream)))

            def wait(self, stream: Any = "default") -> None:
                cuda.calls.append(("wait", str(stream)))

        return Event()


@pytest.mark.parametrize("stream", [2, 0x7F00])
def test_what_is_under_way_on_a_librarys_stream_is_waited_for_by_the_device(
    stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the program. 2 is the default stream of each thread."""
    cuda = Cuda()
    monkeypatch.setattr(tensors, "cuda", cuda)
    tensors.tensor_of("x", CuPyLike(np.ones(3, np.float32), stream=stream))
    assert cuda.calls == [("record", f"stream {stream}"), ("wait", "default")]


def test_a_stream_of_another_device_is_waited_for_by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(elsewhere=True)
    monkeypatch.setattr(tensors, "cuda", cuda)
    tensors.tensor_of("x", CuPyLike(np.ones(3, np.float32), stream=7))
    assert cuda.calls == [("synchronize", 7)]


@pytest.mark.parametrize("stream", [None, 1])
def test_on_the_default_stream_nothing_is_waited_for(stream: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    monkeypatch.setattr(tensors, "cuda", cuda)
    tensors.tensor_of("x", CuPyLike(np.ones(3, np.float32), stream=stream))
    assert cuda.calls == []


def test_stream_0_is_refused_as_the_interface_says() -> None:
    with pytest.raises(SpecMismatchError, match="x must be on a stream that its interface names; got stream 0"):
        tensors.tensor_of("x", CuPyLike(np.ones(3, np.float32), stream=0))


def test_bytes_in_the_other_order_are_refused() -> None:
    reduce = pytest.importorskip("aiokv.kernels.cuda.reduce")
    big = np.ones(3, np.dtype(np.float32).newbyteorder("S"))
    with pytest.raises(SpecMismatchError, match=r"source_0 must be"):
        reduce.sum_into([CuPyLike(np.ones(3, np.float32))], [[CuPyLike(big)]])


# --- out ---


def exported(array: Array, number: int = 1) -> Any:
    return exchange.Exported(Library(array, number))


def test_an_array_of_ours_has_both_protocols() -> None:
    """And is taken in again, at the same place, without a copy."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    given = exported(array)
    assert given.__dlpack_device__() == (2, 1)
    assert given.__cuda_array_interface__["data"] == (array.ctypes.data, False)
    assert given.__cuda_array_interface__["typestr"] == "<f4"
    for versions in ({}, {"max_version": (1, 1)}):
        capsule = given.__dlpack__(stream=1, **versions)
        found = tensors.dlpack.describe(capsule)
        assert (found.address, found.shape, found.device) == (array.ctypes.data, (2, 3), (2, 1))
        assert (found.code, found.bits, found.lanes, found.strides) == (2, 32, 1, None)


def test_the_consumers_stream_waits_for_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    given, cuda = exported(np.ones(3, np.float32)), Cuda()
    monkeypatch.setattr(exchange, "cuda", cuda)
    for stream in (None, 1, -1):
        given.__dlpack__(stream=stream)
    assert cuda.calls == []
    given.__dlpack__(stream=9)
    assert cuda.calls == [("enter",), ("record", "default"), ("wait", "stream 9")]
    for stream in (0, -2):
        with pytest.raises(BufferError, match="is ambiguous"):
            given.__dlpack__(stream=stream)


@pytest.mark.skipif(not KNOWS_VERSIONS, reason="this NumPy exports no read-only arrays")
def test_what_a_consumer_can_not_have_is_a_buffer_error() -> None:
    given = exported(np.ones(3, np.float32))
    for wish in ({"copy": True}, {"dl_device": (1, 0)}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError, match="where it lies"):
            given.__dlpack__(**wish)
    array = np.ones(3, np.float32)
    array.flags.writeable = False
    with pytest.raises(BufferError, match="read-only"):
        exported(array).__dlpack__()
    assert tensors.dlpack.describe(exported(array).__dlpack__(max_version=(1, 0))).read_only


def test_memory_of_ours_stays_until_its_user_gives_it_back() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    owner = np.ones(0)
    alive = weakref.ref(owner)
    described = tensors.dlpack.Described(tensor.data_ptr(), (2, 3), None, 4, 16, 1, (1, 0))
    taken = torch.from_dlpack(tensors.dlpack.lend(described, owner, versioned=True))
    unused = tensors.dlpack.lend(described, owner, versioned=False)
    del owner
    assert torch.equal(taken, tensor)
    assert taken.data_ptr() == tensor.data_ptr()
    del unused
    assert alive() is not None
    del taken
    gc.collect()
    assert alive() is None
