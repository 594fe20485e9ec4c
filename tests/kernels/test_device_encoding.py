"""Gradients on a device are encoded there, to the bytes that the host makes. Only collected where CUDA is, or the
simulator."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda
from numpy.typing import NDArray

import aiokv
from aiokv.codec import make_codec
from aiokv.codec.encoder import Encoder
from aiokv.errors import NotFiniteError
from aiokv.kernels import devices_for
from aiokv.kernels.cuda.memory import SIMULATED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiokv.compressing import Kept
    from aiokv.kernels.cuda.devices import Device

Array = NDArray[Any]

CODECS: list[dict[str, Any]] = [
    {"type": "1bit", "threshold": 0.25},
    {"type": "2bit", "threshold": 0.5},
    {"type": "fp16"},
    {"type": "bf16"},
    {"type": "fp8"},
    {"type": "topk", "fraction": 0.1},
]
SIZES = [1, 33, 150]


@pytest.fixture
def device() -> Device:
    found: Device = devices_for("cuda")[0]
    return found


def gradient(size: int, seed: int = 0, dtype: str = "float32") -> Array:
    return np.random.default_rng([size, seed]).standard_normal(size).astype(dtype)


def cuts_of(size: int) -> list[tuple[int, int]]:
    """Ranges of which one is empty, and one begins between two vectors."""
    first = size // 3
    return [(0, first), (first, first), (first, size)]


def encode_on(device: Device, encoders: list[Any], arrays: list[Any]) -> list[list[bytes]]:
    """Return the payloads that one job makes of arrays in the host's memory."""
    given = device.keep_sums([[cuda.to_device(array)] for array in arrays])
    found = device.check(
        [(encoder, values, cuts_of(values.size)) for encoder, values in zip(encoders, given, strict=True)]
    )
    return [[bytes(piece) for piece in pieces] for pieces in device.encode(found)]


def encoders(device: Device, codec: Any, sizes: list[int], dtype: str = "float32") -> tuple[list[Any], list[Encoder]]:
    """Return encoders on the device, and what they are compared with."""
    there = [device.new_encoder(codec, size, size, dtype, 0) for size in sizes]
    return there, [Encoder(codec, size, size, dtype, backend="reference") for size in sizes]


@pytest.mark.parametrize("feeds_back", [True, False])
@pytest.mark.parametrize("wanted", CODECS, ids=lambda wanted: wanted["type"])
def test_payloads_and_residuals_have_the_bits_of_the_host(
    device: Device, wanted: dict[str, Any], feeds_back: bool
) -> None:
    params = {name: value for name, value in wanted.items() if name != "type"} | {"error_feedback": feeds_back}
    codec = make_codec(wanted["type"], params)
    there, here = encoders(device, codec, SIZES)
    for step in range(2):
        arrays = [gradient(size, step) for size in SIZES]
        expected = [
            [bytes(piece) for piece in encoder.encode(array, cuts_of(array.size))]
            for encoder, array in zip(here, arrays, strict=True)
        ]
        assert encode_on(device, there, arrays) == expected
    for one, other in zip(there, here, strict=True):
        found, kept = one.state(), other.state()
        assert found["step"] == kept["step"] == 2
        assert found.keys() == kept.keys()
        if feeds_back:
            assert found["residual"].tobytes() == kept["residual"].tobytes()


@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_tensors_of_any_length_cut_anywhere(data: st.DataObject) -> None:
    codec = make_codec(data.draw(st.sampled_from(["1bit", "2bit", "fp16", "fp8"])), {})
    sizes = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=3))
    bounds = [sorted(data.draw(st.lists(st.integers(0, size), max_size=3))) for size in sizes]
    cuts = [list(itertools.pairwise([0, *inner, size])) for inner, size in zip(bounds, sizes, strict=True)]
    arrays = [gradient(size) for size in sizes]
    device = devices_for("cuda")[0]
    there, here = encoders(device, codec, sizes)
    given_sums = device.keep_sums([[cuda.to_device(array)] for array in arrays])
    found = device.encode(device.check(list(zip(there, given_sums, cuts, strict=True))))
    for encoder, array, ranges, pieces in zip(here, arrays, cuts, found, strict=True):
        assert [bytes(piece) for piece in pieces] == [bytes(piece) for piece in encoder.encode(array, ranges)]


def test_tensors_for_which_no_unit_is_fine_enough_are_left_whole(device: Device) -> None:
    """Zeros have no scale, and the smallest numbers have none that float32 can hold."""
    arrays = [np.zeros(40, np.float32), np.full(40, 1e-45, np.float32), gradient(40)]
    for feeds_back in (True, False):
        codec = make_codec("fp8", {"error_feedback": feeds_back})
        there = [device.new_encoder(codec, n, 40, "float32", 0) for n in range(3)]
        here = [Encoder(codec, n, 40, backend="reference") for n in range(3)]
        for _ in range(2):
            expected = [
                [bytes(piece) for piece in encoder.encode(array, cuts_of(40))]
                for encoder, array in zip(here, arrays, strict=True)
            ]
            assert encode_on(device, there, arrays) == expected


@pytest.mark.parametrize(
    "dtype",
    [
        "float16",
        "float32",
        pytest.param("bfloat16", marks=pytest.mark.skipif(not SIMULATED, reason="Numba has no such arrays")),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_a_sum_that_is_kept_is_the_sum_that_would_be_sent(device: Device, dtype: str, count: int) -> None:
    arrays = [10 * gradient(50, seed).astype(dtype) for seed in range(count)]
    on_device = [cuda.to_device(array) for array in arrays]
    kept = device.keep_sums([on_device])
    (expected,) = device.sum_lists([on_device])
    assert device.fetch(kept)[0].astype(dtype).tobytes() == expected.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["2bit", "fp8"])
def test_what_is_no_number_is_refused_and_nothing_changes(device: Device, name: str, bad: float) -> None:
    codec = make_codec(name, {})
    there, here = encoders(device, codec, SIZES)
    encode_on(device, there, [gradient(size) for size in SIZES])
    before = [encoder.state() for encoder in there]
    arrays = [gradient(size) for size in SIZES]
    arrays[1][7] = bad
    with pytest.raises(NotFiniteError) as said:
        here[1].encode(arrays[1])
    with pytest.raises(NotFiniteError) as found:
        encode_on(device, there, arrays)
    assert str(found.value) == str(said.value)
    for encoder, state in zip(there, before, strict=True):
        after = encoder.state()
        assert (after["step"], after["residual"].tobytes()) == (state["step"], state["residual"].tobytes())


@pytest.mark.filterwarnings("ignore:.*overflow encountered:RuntimeWarning")
def test_a_gradient_that_is_too_large_with_its_residual_is_refused(device: Device) -> None:
    encoder = device.new_encoder(make_codec("2bit", {}), "w", 2, "float32", 0)
    huge = np.full(2, 3e38, np.float32)
    encode_on(device, [encoder], [huge])
    with pytest.raises(NotFiniteError, match="and its residual have a sum that is too large"):
        encode_on(device, [encoder], [huge])


# --- stores ---


def kept_of(kv: Any) -> dict[Any, Kept]:
    found: dict[Any, Kept] = kv._worker._compressor.kept
    return found


def changes(kv: Any, put: Callable[[Array], Any]) -> list[bytes]:
    """Push from here and there, with codecs that change, and return all values."""
    kv.init({"a": np.zeros((9, 5), np.float32), "b": np.zeros(3, np.float32)})
    found = []
    bare = {"type": "bf16", "error_feedback": False}
    codecs: list[Any] = ["2bit", "2bit", {"type": "topk", "k": 2}, bare, "fp8", "qsgd", "1bit", None, "2bit"]
    for step, codec in enumerate(codecs):
        kv.set_gradient_compression(codec)
        pushed: dict[str, Any] = {
            "a": gradient(45, step).reshape(9, 5),
            "b": [gradient(3, step), gradient(3, step + 1)],
        }
        # Every third time from the host's memory, as far as that is another one.
        place: Callable[[Array], Any] = np.asarray if step % 3 == 2 else put
        values = kv.pushpull({"a": place(pushed["a"]), "b": [place(array) for array in pushed["b"]]})
        found += [value.tobytes() for value in values]
    state = kv.compression_state()
    return found + [state[key]["residual"].tobytes() for key in ("a", "b")]


def test_what_is_left_moves_to_where_gradients_come_from() -> None:
    with aiokv.create("local") as local, aiokv.create("device") as on_device:
        assert changes(on_device, cuda.to_device) == changes(local, np.asarray)


def test_a_saved_state_goes_on_on_the_device() -> None:
    values = []
    for stops in (False, True):
        kv = aiokv.create("device")
        kv.init("w", np.zeros(40, np.float32))
        kv.set_gradient_compression("2bit")
        kv.push("w", cuda.to_device(gradient(40)))
        if stops:
            state = kv.compression_state()
            kv = aiokv.create("device")
            kv.init("w", np.zeros(40, np.float32))
            kv.set_gradient_compression("2bit")
            kv.restore_compression_state(state)
        values.append(kv.pushpull("w", cuda.to_device(gradient(40, 1))).tobytes())
        assert kept_of(kv)["w"].device is not None
        assert kv.compression_state()["w"]["step"] == 2
    assert values[0] == values[1]


@pytest.mark.skipif(not SIMULATED, reason="only there copies can be seen")
def test_only_payloads_are_copied_to_the_hosts_memory(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray  # noqa: PLC0415 - there is none on a card

    copied = []
    copy_to_host = FakeCUDAArray.copy_to_host

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        copied.append(self.nbytes)
        return copy_to_host(self, *args, **kwargs)  # type: ignore[no-untyped-call]

    encoder = device.new_encoder(make_codec("2bit", {}), "w", 1024, "float32", 0)
    monkeypatch.setattr(FakeCUDAArray, "copy_to_host", record)
    encode_on(device, [encoder], [gradient(1024)])
    # A number for each part of 128 elements; then two bits for each element of both ranges, padded to 16 bytes.
    assert copied == [8 * 8, 96 + 176]


@contextlib.asynccontextmanager
async def cluster_of_one(**settings: Any) -> AsyncIterator[aiokv.Client]:
    """Run a worker, and two servers; tensors come from both of them."""
    shared: dict[str, Any] = {"token": "a shared secret", "cluster": "test", "backend": "reference"}
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        scheduler = await enter(
            aiokv.Scheduler(num_workers=1, num_servers=2, bind_port=0, split_bytes=1024, chunk_bytes=4096, **shared)
        )
        for _ in range(2):
            await enter(aiokv.Server(scheduler=scheduler.address, **shared))
        yield await enter(aiokv.connect(scheduler.address, **settings, **shared))


async def test_a_cluster_gets_the_bytes_that_it_gets_from_the_host() -> None:
    found = []
    places: dict[str, Callable[[Array], Any]] = {"cuda": cuda.to_device, "cpu": np.asarray}
    for device, place in places.items():
        async with cluster_of_one(device=device) as kv:
            await kv.init({"w": np.zeros(600, np.float32), "small": np.zeros(5, np.float32)})
            await kv.set_gradient_compression("2bit", threshold=0.5)
            out: Any = place(np.zeros(600, np.float32))
            for step in range(2):
                parts = [place(gradient(600, step)), place(gradient(600, step + 9))]
                await kv.pushpull(
                    {"w": parts, "small": place(gradient(5, step))}, out={"w": out, "small": np.empty(5, np.float32)}
                )
            with pytest.raises(NotFiniteError, match="the gradient of key 'w' has nan at element 2"):
                await kv.push("w", place(np.where(np.arange(600) == 2, np.nan, 0).astype(np.float32)))
            found.append(
                (
                    np.asarray(out.copy_to_host() if device == "cuda" else out).tobytes(),
                    (await kv.compression_state())["w"]["residual"].tobytes(),
                )
            )
    assert found[0] == found[1]
