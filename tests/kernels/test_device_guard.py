"""What is looked at before it is pushed: devices measure what they sum. Only collected where CUDA is, or the
simulator."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 - with it NumPy knows the name "bfloat16"
import numpy as np
import pytest
from numba import cuda
from numpy.typing import NDArray

import aiokv
from aiokv.errors import NormLimitError, NotFiniteError
from aiokv.kernels import devices_for
from aiokv.kernels.cuda.memory import SIMULATED
from aiokv.list_sums import Resident

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Array = NDArray[Any]

SETTINGS: dict[str, Any] = {"token": "a shared secret", "cluster": "test", "backend": "reference"}

if SIMULATED:
    pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def put(array: Any) -> Any:
    return cuda.to_device(np.asarray(array))


@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_squares_are_those_of_what_is_sent(dtype: str, count: int) -> None:
    """Of the sums when they are rounded; the squares of a float64 may be too large."""
    rng = np.random.default_rng(count)
    shapes = [(1,), (7, 40), (33,)]
    lists = [[rng.standard_normal(shape).astype(dtype) for _ in range(count)] for shape in shapes]
    device = devices_for("cuda")[0]
    squares: list[float | None] = []
    sums = device.sum_lists([[put(array) for array in arrays] for arrays in lists], squares)
    if dtype == "float64":
        assert squares == [None] * 3
        return
    expected = [float((total.astype(np.float64) ** 2).sum()) for total in sums]
    np.testing.assert_allclose(squares, expected, rtol=1e-12)  # type: ignore[arg-type]
    kept: list[float | None] = []
    device.keep_sums([[put(array) for array in arrays] for arrays in lists], kept)
    np.testing.assert_allclose(kept, expected, rtol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("place", [0, 150, 299])
def test_one_element_that_is_no_number_shows_in_the_squares(dtype: str, place: int) -> None:
    """A sum that does not fit into a float16 is infinite, too; all others can be squared."""
    most = np.full(300, np.finfo(dtype).max / 4, dtype)
    given = [most, most.copy()]
    given[1][place] = np.finfo(dtype).max
    device = devices_for("cuda")[0]
    squares: list[float | None] = []
    device.sum_lists([[put(array) for array in given], [put(most), put(most)]], squares)
    assert [bool(np.isfinite(each)) for each in squares] == [False, True]  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def worker(**settings: Any) -> AsyncIterator[aiokv.Client]:
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        scheduler = await enter(aiokv.Scheduler(num_workers=1, num_servers=1, bind_port=0, **SETTINGS))
        await enter(aiokv.Server(scheduler=scheduler.address, **SETTINGS))
        yield await enter(aiokv.connect(scheduler.address, device="cuda", **settings, **SETTINGS))


@pytest.mark.parametrize("codec", [None, "fp16"])
async def test_limits_are_those_of_gradients_in_the_hosts_memory(
    codec: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of 3 and 4 have a norm of 5. Those that are encoded on the device do not leave it for that."""
    brought: list[Any] = []
    to_host = Resident.to_host

    def watched(resident: Resident) -> Array:
        brought.append(resident)
        return to_host(resident)

    monkeypatch.setattr(Resident, "to_host", watched)
    async with worker(max_norm=5.0, check_finite=True) as kv:
        await kv.init({"a": np.zeros(1, np.float32), "b": np.zeros(2, np.float32)})
        await kv.set_optimizer("accumulate")
        await kv.set_gradient_compression(codec)

        def gradients(a: float, b: float) -> dict[str, Any]:
            return {"a": [put(np.full(1, a / 2, np.float32))] * 2, "b": [put(np.array([b / 2, 0], np.float32))] * 2}

        await kv.push(gradients(3, 4))
        with pytest.raises(NormLimitError, match=r"'a', 'b' has a norm of 5.831, but the limit is max_norm = 5;"):
            await kv.push(gradients(3, 5))
        assert not brought
        with pytest.raises(NotFiniteError, match="the gradient of key 'b' has inf at element 0, and 0 more"):
            await kv.push(gradients(3, np.inf))
        assert (await kv.pull("b")).tolist() == [4, 0]
