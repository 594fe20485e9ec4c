"""Calls whose arrays lie on a device, alone and on a cluster. Only collected where CUDA is, or the simulator."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from numba import cuda
from numpy.typing import NDArray

import aiokv
from aiokv.errors import SpecMismatchError
from aiokv.kernels.cuda.memory import SIMULATED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Array = NDArray[Any]

SETTINGS: dict[str, Any] = {"token": "a shared secret", "cluster": "test", "backend": "reference"}


def put(array: Any) -> Any:
    return cuda.to_device(np.asarray(array))


def numbers(*shape: int, dtype: str = "float32", seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@contextlib.asynccontextmanager
async def cluster_of_one() -> AsyncIterator[aiokv.Client]:
    """Run a worker that uses the device, and two servers."""
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        scheduler = await enter(aiokv.Scheduler(num_workers=1, num_servers=2, bind_port=0, **SETTINGS))
        for _ in range(2):
            await enter(aiokv.Server(scheduler=scheduler.address, **SETTINGS))
        # Small parts, so that a tensor comes from both servers.
        yield await enter(aiokv.connect(scheduler.address, device="cuda", **SETTINGS))


async def test_a_cluster_sums_and_answers_on_the_device() -> None:
    weight, parts = numbers(300, 70), [numbers(300, 70, seed=seed) for seed in (1, 2)]
    async with cluster_of_one() as kv:
        await kv.init("w", put(weight))
        outs = [put(np.zeros_like(weight)) for _ in range(2)]
        assert await kv.pull("w", out=outs) is outs
        assert [out.copy_to_host().tobytes() for out in outs] == [weight.tobytes()] * 2
        gradients = [put(part) for part in parts]
        await kv.pushpull({"w": gradients}, out={"w": outs})
    assert [out.copy_to_host().tobytes() for out in outs] == [(parts[0] + parts[1]).tobytes()] * 2


async def test_many_calls_at_a_time_get_their_own_values() -> None:
    names = [f"w{number}" for number in range(12)]
    async with cluster_of_one() as kv:
        await kv.init({name: np.full(9, number, np.float32) for number, name in enumerate(names)})
        outs = [put(np.zeros(9, np.float32)) for _ in names]
        for _ in range(3):
            await kv.pull(names, out=outs)
        assert [out.copy_to_host().tolist() for out in outs] == [[number] * 9 for number in range(12)]


async def test_rows_are_pulled_to_the_device() -> None:
    values = numbers(3, 5)
    async with cluster_of_one() as kv:
        await kv.init("t", aiokv.RowSparse([1, 4, 6], values, (9, 5)))
        out, host = put(numbers(9, 5, seed=3)), numbers(9, 5)
        await kv.row_sparse_pull("t", out=[out, host], row_ids=[6, 1, 6])
    expected = np.zeros((9, 5), np.float32)
    expected[[1, 6]] = values[[0, 2]]
    assert out.copy_to_host().tobytes() == host.tobytes() == expected.tobytes()


@pytest.fixture
def kv() -> Any:
    with aiokv.create("device") as store:
        yield store


DTYPES = ["float16", "float32", "float64", "int8", "int32", "int64", "uint8"]


@pytest.mark.parametrize(
    "dtype", [*DTYPES, pytest.param("bfloat16", marks=pytest.mark.skipif(not SIMULATED, reason="no array of Numba"))]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (33,), (5, 7)], ids=str)
def test_every_dtype_and_shape_goes_there_and_back(kv: Any, dtype: str, shape: tuple[int, ...]) -> None:
    value = (10 * numbers(*shape)).astype(dtype)
    out = put(np.ones_like(value))
    assert kv.broadcast("w", put(value), out=out) is out
    assert np.asarray(out.copy_to_host()).tobytes() == value.tobytes()
    assert kv.pull("w").tobytes() == value.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
@pytest.mark.parametrize("width", [1, 3, 16])
def test_rows_of_any_dtype_and_width(kv: Any, dtype: str, width: int) -> None:
    values = (10 * numbers(2, width)).astype(dtype)
    kv.init("t", aiokv.RowSparse([0, 6], values, (7, width)))
    out = put(np.ones((7, width), dtype))
    kv.row_sparse_pull("t", out=out, row_ids=[6])
    expected = np.zeros((7, width), dtype)
    expected[6] = values[1]
    assert out.copy_to_host().tobytes() == expected.tobytes()
    kv.row_sparse_pull("t", out=out, row_ids=[])
    assert not out.copy_to_host().any()


def test_one_array_may_be_pushed_and_receive(kv: Any) -> None:
    kv.init("w", np.zeros(40, np.float32))
    kv.set_optimizer("sgd", learning_rate=0.5)
    array = put(np.full(40, 2, np.float32))
    assert kv.pushpull("w", array, out=array) is array
    assert array.copy_to_host().tolist() == [-1.0] * 40


def test_whole_numbers_are_summed_without_overflow(kv: Any) -> None:
    kv.init("n", np.zeros(3, np.int8))
    kv.push("n", [put(np.array([100, 1, 2], np.int8)), put(np.array([-100, 1, 2], np.int8))])
    assert kv.pull("n").tolist() == [0, 2, 4]


def test_what_cannot_be_written_is_refused(kv: Any) -> None:
    kv.init("w", np.zeros((4, 4), np.float32))
    with pytest.raises(SpecMismatchError, match="out must be C-contiguous"):
        kv.pull("w", out=put(np.zeros((4, 8), np.float32))[:, ::2])
    if not SIMULATED:
        return
    immutable = type("ArrayImpl", (), {"__module__": "jaxlib.xla"})()
    memory = np.zeros((4, 4), np.float32)
    immutable.__dict__.update(shape=(4, 4), dtype=memory.dtype, __cuda_ndarray__=True, _ary=memory)
    immutable.is_c_contiguous = lambda: True
    with pytest.raises(SpecMismatchError, match="out must be writable; got a read-only ArrayImpl"):
        kv.pull("w", out=immutable)


def test_bfloat16_of_a_device_keeps_its_bits() -> None:
    """A sum is made in float32, and rounded once."""
    parts = [numbers(50, seed=seed).astype(ml_dtypes.bfloat16) for seed in range(3)]
    with aiokv.create("device") as kv:
        kv.init("w", parts[0])
        kv.push("w", parts)
        found = kv.pull("w")
    total = parts[0].astype(np.float32) + parts[1].astype(np.float32) + parts[2].astype(np.float32)
    assert found.tobytes() == total.astype(ml_dtypes.bfloat16).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 8)], ids=str)
def test_rows_on_the_device_are_summed_there_in_their_order(kv: Any, dtype: str, shape: tuple[int, ...]) -> None:
    values = (10 * numbers(40, *shape)).astype(dtype)
    values[3] = -0.0
    ids = np.random.default_rng(0).integers(0, 9, 40)
    ids[3] = 17
    found = []
    with aiokv.create("local") as local:
        for store, place in ((local, np.asarray), (kv, put)):
            store.init_rows("t", (20, *shape), dtype)
            store.push("t", aiokv.RowSparse(ids, place(values), (20, *shape)))
            found.append(store.row_sparse_pull("t", row_ids=np.arange(20)).values.tobytes())
    assert found[0] == found[1]


async def test_rows_and_dense_keys_in_one_call() -> None:
    """Dense keys are compressed as they are alone, and rows are not."""
    async with cluster_of_one() as kv:
        await kv.init("w", np.zeros(40, np.float32))
        await kv.init_rows("t", (9, 5))
        await kv.set_gradient_compression("2bit", threshold=0.5)
        dense, rows = numbers(40), numbers(3, 5)
        await kv.push({"w": put(dense), "t": aiokv.RowSparse([4, 1, 4], put(rows), (9, 5))})
        assert (await kv.pull("w")).tolist() == np.where(abs(dense) >= 0.5, np.copysign(0.5, dense), 0).tolist()
        pulled = await kv.row_sparse_pull("t", row_ids=[1, 4])
    assert pulled.values.tobytes() == np.stack([rows[1], rows[0] + rows[2]]).tobytes()


def test_no_rows_on_the_device(kv: Any) -> None:
    kv.init_rows("t", (9, 5))
    kv.push("t", aiokv.RowSparse([], put(np.empty((0, 5), np.float32)), (9, 5)))
    assert not kv.row_sparse_pull("t", row_ids=[1]).values.any()


def test_rows_on_a_device_need_a_store_that_uses_it(kv: Any) -> None:
    rows = aiokv.RowSparse([1], put(np.ones((1, 2), np.float32)), (4, 2))
    with pytest.raises(SpecMismatchError, match="a store that uses the device sums them"):
        rows.to_dense()
    with aiokv.create("local") as local:
        local.init_rows("t", (4, 2))
        with pytest.raises(SpecMismatchError, match="key 't': expected arrays in host memory"):
            local.push("t", rows)
    with pytest.raises(SpecMismatchError, match=r"row ids must be in the host's memory, got .* on a device"):
        aiokv.RowSparse(put(np.array([1])), np.ones((1, 2)), (4, 2))
