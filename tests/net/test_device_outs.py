"""A call that receives into arrays on a device ends when the copies are made; the event loop does not wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

if TYPE_CHECKING:
    import aiokv

Array = NDArray[Any]
MakeCluster = Callable[..., AbstractAsyncContextManager[Any]]


class OnGPU:
    """An array as libraries have it whose memory is on a device."""

    def __init__(self, array: Array) -> None:
        self.memory = array
        self.shape, self.dtype = array.shape, array.dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self.memory.__array_interface__)


class Slow:
    """A device whose copies are there when the test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[Array, OnGPU, int]] = []
        self.waiting = threading.Event()
        self.done = threading.Event()
        self.threads: set[str] = set()

    def fetch(self, arrays: list[OnGPU], /) -> list[Array]:
        self.threads.add(threading.current_thread().name)
        return [array.memory.copy() for array in arrays]

    def allocate(self, nbytes: int, /) -> Array:
        return np.empty(nbytes, np.uint8)

    def writable(self, array: OnGPU, /) -> OnGPU:
        return array

    def start(self, memory: Array, target: OnGPU, rows: None, first: int, /) -> None:
        self.threads.add(threading.current_thread().name)
        self.begun.append((memory, target, first))

    def wait(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.waiting.set()
        assert self.done.wait(20)
        for memory, target, first in self.begun:
            target.memory.reshape(-1).view(np.uint8)[first : first + memory.size] = memory
        self.begun = []


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Slow:
    device = Slow()
    monkeypatch.setattr("aiokv.net.worker.devices_for", lambda _: [device])
    return device


async def until(event: threading.Event) -> None:
    """Wait in the loop for what another thread says."""
    async with asyncio.timeout(20):
        while not event.is_set():  # noqa: ASYNC110 - a thread can't set the loop's own events
            await asyncio.sleep(0)


async def pulled(kv: aiokv.Client, device: Slow, out: OnGPU) -> asyncio.Task[Any]:
    """Return a pull that waits for its copy."""
    await kv.init("w", np.full((3, 4), 7, np.float32))
    call = asyncio.create_task(kv.pull("w", out=out))
    await until(device.waiting)
    return call


async def test_the_loop_works_while_a_copy_is_made(cluster: MakeCluster, device: Slow) -> None:
    async with cluster(workers=1) as running:
        kv, out = running.workers[0], OnGPU(np.zeros((3, 4), np.float32))
        call = await pulled(kv, device, out)
        # Other calls go on meanwhile.
        assert (await kv.pull("w")).tolist() == [[7] * 4] * 3
        assert not call.done()
        device.done.set()
        assert await call is out
    assert out.memory.tolist() == [[7] * 4] * 3
    assert threading.current_thread().name not in device.threads


async def test_a_cancelled_call_ends_when_nobody_writes_to_its_array(cluster: MakeCluster, device: Slow) -> None:
    async with cluster(workers=1) as running:
        kv, out = running.workers[0], OnGPU(np.zeros((3, 4), np.float32))
        call = await pulled(kv, device, out)
        call.cancel()
        await asyncio.sleep(0)
        assert not call.done()
        device.done.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not device.begun


async def test_a_small_array_on_a_device_is_read_aside_too(cluster: MakeCluster, device: Slow) -> None:
    async with cluster(workers=1) as running:
        kv = running.workers[0]
        await kv.init("w", OnGPU(np.ones(3, np.float32)))
        await kv.push("w", OnGPU(np.full(3, 2, np.float32)))
        assert (await kv.pull("w")).tolist() == [2] * 3
    assert device.threads
    assert threading.current_thread().name not in device.threads


@pytest.mark.parametrize(("size", "codec"), [(100_000, None), (100_000, "2bit"), (3, None)])
async def test_copies_begin_when_something_has_landed(
    cluster: MakeCluster, device: Slow, size: int, codec: str | None
) -> None:
    """Two keys are there, together if they are small; the third waits for a worker that has not pushed it yet."""
    sizes = {"a": size, "b": size, "c": 100_000}
    outs = {key: OnGPU(np.zeros(size, np.float32)) for key, size in sizes.items()}
    ones = {key: np.ones(size, np.float32) for key, size in sizes.items()}
    device.done.set()
    async with cluster(workers=2) as running:
        first, second = running.workers
        await running.each(lambda kv: kv.set_gradient_compression(None, pull_compression=codec))
        await running.each(lambda kv: kv.init({key: np.zeros(size, np.float32) for key, size in sizes.items()}))
        call = asyncio.create_task(first.pushpull(ones, out=outs))
        await second.push({key: ones[key] for key in "ab"})
        async with asyncio.timeout(20):
            while sum(memory.size for memory, _, _ in device.begun) < 8 * size:  # noqa: ASYNC110 - as in `until`
                await asyncio.sleep(0)
        assert not call.done()
        await second.push("c", ones["c"])
        await call
    assert [set(out.memory.tolist()) for out in outs.values()] == [{2.0}] * 3
    assert threading.current_thread().name not in device.threads
