"""Workers whose process is asked to end: those that want to leave behind one of their steps, and nobody waits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import ConfigError
from aiokv.net.sigterm import ASKED, OnSigterm

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.net.conftest import Cluster, MakeCluster


@pytest.fixture
def before() -> Iterator[list[int]]:
    """Install a handler, as a program may have one; return what it has got."""
    got: list[int] = []
    original = signal.signal(ASKED, lambda number, _frame: got.append(number))
    yield got
    signal.signal(ASKED, original)


# --- the handler ---


def test_the_first_signal_calls_back_and_the_second_one_does_what_it_did_before(before: list[int]) -> None:
    called: list[int] = []
    watch = OnSigterm(lambda: called.append(1))
    signal.raise_signal(ASKED)
    assert (called, before) == ([1], [])
    signal.raise_signal(ASKED)
    watch.close()
    assert (called, before) == ([1], [ASKED])


def test_when_it_is_closed_the_handler_of_before_is_back(before: list[int]) -> None:
    handler = signal.getsignal(ASKED)
    watch = OnSigterm(lambda: None)
    watch.close()
    watch.close()
    assert signal.getsignal(ASKED) is handler


def test_a_handler_that_came_later_stays(before: list[int]) -> None:
    watch = OnSigterm(lambda: None)
    signal.signal(ASKED, signal.SIG_IGN)
    watch.close()
    assert signal.getsignal(ASKED) is signal.SIG_IGN


def test_when_another_thread_has_closed_it_a_signal_goes_to_the_handler_of_before(before: list[int]) -> None:
    called: list[int] = []
    watch = OnSigterm(lambda: called.append(1))
    thread = threading.Thread(target=watch.close)
    thread.start()
    thread.join()
    signal.raise_signal(ASKED)
    assert (called, before) == ([], [ASKED])


# --- clients ---


async def test_a_client_handles_no_signal_unless_its_user_wants_that(cluster: MakeCluster, before: list[int]) -> None:
    handler = signal.getsignal(ASKED)
    async with cluster(workers=2) as running:
        assert signal.getsignal(ASKED) is handler
        assert running.workers


async def test_a_client_handles_the_signal_as_long_as_it_is_there(cluster: MakeCluster, before: list[int]) -> None:
    handler = signal.getsignal(ASKED)
    async with cluster(workers=1, start_workers=False) as running:
        async with running.client("worker-0", leave_on_sigterm=True):
            assert signal.getsignal(ASKED) is not handler
        assert signal.getsignal(ASKED) is handler


async def test_outside_the_main_thread_nobody_can_handle_signals(cluster: MakeCluster) -> None:
    async with cluster(workers=1, start_workers=False) as running:
        kv = aiokv.blocking.connect(running.scheduler.address, leave_on_sigterm=True, **running.settings)
        with pytest.raises(ConfigError, match="only the main thread can handle signals"):
            await asyncio.to_thread(kv.start)
        client = running.client("worker-0", leave_on_sigterm=True)
        with pytest.raises(ConfigError, match="call plan_leave from a handler of your own"):
            await asyncio.to_thread(lambda: asyncio.run(client.start()))


# --- processes ---

ASYNC = """
    import asyncio, itertools, sys, numpy, aiokv

    async def main():
        settings = dict(name="worker-2", token="a shared secret", cluster="test", leave_on_sigterm=True)
        async with aiokv.connect(sys.argv[1], **settings) as kv:
            await kv.init("w", numpy.zeros(3))
            for step in itertools.count():
                if kv.rank not in await kv.members(step):
                    break
                await kv.push("w", numpy.full(3, 100.0))
                print(step, flush=True)

    asyncio.run(main())
"""

BLOCKING = """
    import itertools, sys, numpy, aiokv

    settings = dict(name="worker-2", token="a shared secret", cluster="test", leave_on_sigterm=True)
    with aiokv.blocking.connect(sys.argv[1], **settings) as kv:
        kv.init("w", numpy.zeros(3))
        for step in itertools.count():
            if kv.rank not in kv.members(step):
                break
            kv.push("w", numpy.full(3, 100.0))
            print(step, flush=True)
"""


@contextlib.asynccontextmanager
async def process(running: Cluster, code: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a worker in a process of its own."""
    arguments = [sys.executable, "-c", textwrap.dedent(code), running.scheduler.address]
    worker = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    try:
        yield worker
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.communicate()


@pytest.mark.parametrize("code", [ASYNC, BLOCKING], ids=["async", "blocking"])
async def test_a_process_that_gets_sigterm_makes_the_steps_in_which_it_is_counted_on_and_leaves(
    cluster: MakeCluster, code: str
) -> None:
    """Values are the sums of rounds: 111 with the process, and 11 after it has left; both others see the same."""
    sums: dict[int, list[float]] = {0: [], 1: []}

    async def train(kv: aiokv.Client) -> None:
        await kv.init("w", np.zeros(3))
        left = 0
        for step in itertools.count():
            left += len(await kv.members(step)) == 2
            sums[kv.rank].append(float((await kv.pushpull("w", np.full(3, 10.0**kv.rank)))[0]))
            if left == 3:
                break

    async with cluster(workers=3, start_workers=False) as running:
        workers = running.workers = [running.client(f"worker-{rank}") for rank in range(2)]
        async with process(running, code) as third:
            await asyncio.gather(*(kv.start() for kv in workers))
            training = asyncio.gather(*(train(kv) for kv in workers))
            assert third.stdout is not None
            while await third.stdout.readline() != b"2\n":
                pass
            third.send_signal(signal.SIGTERM)
            told: list[Any] = [int(line) async for line in third.stdout]
            assert await third.wait() == 0
            await training
        made = 1 + (told[-1] if told else 2)
        assert sums[0] == sums[1] == [111.0] * made + [11.0] * 3
