"""A node as the main thing of its process."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import pytest

from aiokv.core.effects import Stop
from aiokv.launch.serve import serve
from aiokv.launch.signals import END_AT_ONCE
from aiokv.launch.supervisor import Outcome

if TYPE_CHECKING:
    from types import TracebackType


class FakeNode:
    """A node whose work is over when `stop` says so."""

    def __init__(self, stop: Stop | None = None, left: Stop | None = None) -> None:
        self.host, self.port = "127.0.0.1", 0
        self._left = left
        self._ended: asyncio.Future[Stop]
        self.is_closed = False
        self._stop = stop

    async def __aenter__(self) -> Self:
        """Listen at a made-up port."""
        self.port = 4321
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remember it."""
        self.is_closed = True

    def note(self, level: str, event: str, text: str, facts: dict[str, Any]) -> None:
        """Say nothing."""

    def leave(self) -> bool:
        """End as it is said, if it is."""
        if self._left is not None:
            self._ended.set_result(self._left)
        return self._left is not None

    async def wait_stopped(self) -> Stop:
        """Return why, at once, or when it has left, or never."""
        self._ended = asyncio.get_running_loop().create_future()
        return self._stop or await self._ended


@pytest.mark.parametrize(
    ("stop", "outcome"),
    [
        (Stop("all workers have left"), Outcome(0, "all workers have left")),
        (Stop("rank 1 is lost", failed=True), Outcome(1, "rank 1 is lost")),
    ],
)
async def test_node_that_ends_by_itself_says_why(stop: Stop, outcome: Outcome) -> None:
    assert await serve(FakeNode(stop), lambda: None) == outcome


async def test_address_is_announced_when_it_is_known() -> None:
    node, ports = FakeNode(Stop("done")), []
    await serve(node, lambda: ports.append(node.port))
    assert ports == [4321]


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows delivers no signals to itself")
@pytest.mark.parametrize(
    ("left", "code"), [(Stop("others serve what it had"), 0), (Stop("it is the last one", failed=True), 143)]
)
def test_node_that_is_asked_to_end_leaves_in_good_order_if_it_can(left: Stop, code: int) -> None:
    async def main() -> Outcome:
        asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGTERM)
        return await serve(FakeNode(left=left), lambda: None)

    assert asyncio.run(main()) == Outcome(code, left.reason)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows delivers no signals to itself")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (END_AT_ONCE, 143)])
def test_signal_closes_the_node_and_shows_in_the_exit_code(number: signal.Signals, code: int) -> None:
    node = FakeNode()
    assert asyncio.run(serve(node, lambda: os.kill(os.getpid(), number))) == Outcome(code)
    assert node.is_closed


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has no SIGUSR1")
def test_launcher_ends_a_node_without_letting_it_leave() -> None:
    node = FakeNode(left=Stop("others serve what it had"))
    assert asyncio.run(serve(node, lambda: os.kill(os.getpid(), END_AT_ONCE))) == Outcome(143)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_signal_that_was_ignored_from_the_start_stays_ignored() -> None:
    seen = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(serve(FakeNode(Stop("done")), lambda: seen.append(signal.getsignal(signal.SIGHUP))))
        seen.append(signal.getsignal(signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen == [signal.SIG_IGN, signal.SIG_IGN]


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(serve(FakeNode(Stop("done")), lambda: None))
    assert signal.getsignal(signal.SIGTERM) is before


def test_node_runs_outside_the_main_thread_where_there_are_no_signals() -> None:
    with ThreadPoolExecutor() as threads:
        outcome = threads.submit(lambda: asyncio.run(serve(FakeNode(Stop("done")), lambda: None))).result()
    assert outcome == Outcome(0, "done")


async def test_cancelling_it_is_no_signal() -> None:
    started = asyncio.Event()
    task = asyncio.create_task(serve(FakeNode(), started.set))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
