"""The client for ordinary code: an async client whose loop runs in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
from typing import TYPE_CHECKING, Any, Self, TypeVar

from msgspec import structs

from aiokv.config import Config, load_config
from aiokv.errors import ClosedError
from aiokv.kvstore import KVStore
from aiokv.net.dropped import tell_of_dropped
from aiokv.net.runner import loop_factory
from aiokv.net.sigterm import OnSigterm, check_thread
from aiokv.net.worker import Client
from aiokv.net.worker import connect as connect_async

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from aiokv.operations import Operations

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread, to which ordinary code gives coroutines."""

    def __init__(self, loop: str) -> None:
        self.loop = loop_factory(loop)()
        self._thread = threading.Thread(target=self._run, name="aiokv", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and wait for its result; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def wait(self) -> None:
        """Wait until the loop is stopped and the thread has ended."""
        self._thread.join()

    def close(self) -> None:
        """Stop the loop and wait for the thread's end."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.wait()


class Member:
    """An async client and the thread in which it lives while it is a member of the cluster.

    It knows nothing of the store that uses it: what the program's end and signals have to do does not keep that alive.

    Args:
        client: the async client; it must not be started.
        leave_on_sigterm: see `Config.leave_on_sigterm`, which the client itself does not do.
    """

    def __init__(self, client: Client, *, leave_on_sigterm: bool) -> None:
        self.client = client
        self._leave_on_sigterm = leave_on_sigterm
        self._sigterm: OnSigterm | None = None
        self._thread: LoopThread | None = None
        self._leaves = False

    @property
    def is_started(self) -> bool:
        """Whether it has joined, and not left."""
        return self._thread is not None

    def start(self) -> None:
        """Join the cluster. See `aiokv.Client.start`."""
        if self._thread is not None:
            return
        if self._leave_on_sigterm:
            check_thread()
        self._thread = LoopThread(self.client.config.loop)
        try:
            self._thread.run(self.client.start())
        except BaseException:
            self._thread.close()
            self._thread = None
            raise
        atexit.register(self._at_exit)
        if self._leave_on_sigterm:
            # The client's own thread can't handle signals.
            self._sigterm = OnSigterm(self._plan_leave_soon)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for the end of a coroutine in the client's loop."""
        if self._thread is None:
            coroutine.close()
            raise ClosedError("this client is not connected: use `with`, or call start()")
        return self._thread.run(coroutine)

    def rejoin(self) -> None:
        """Leave, and join the cluster that comes after this one at the same address. See `aiokv.Client.rejoin`."""
        self.client = self.run(self.client.rejoin())

    def leave(self, *, timeout: float | None) -> None:
        """Leave the cluster when all that was pushed counts. See `aiokv.Client.leave`."""
        if self._thread is not None:
            self._thread.run(self.client.leave(timeout=timeout))
        self.end(abort=False)

    def end(self, *, abort: bool, timeout: float | None = None) -> None:
        """Leave the cluster, in good order or without a word, and end the thread. Can be called twice."""
        if self._thread is None:
            return
        self._forget()
        thread, self._thread = self._thread, None
        try:
            thread.run(self.client.abort() if abort else self.client.close(timeout=timeout))
        finally:
            thread.close()

    def end_soon(self) -> asyncio.AbstractEventLoop:
        """Do the same in good order, and wait for nothing: any thread may have to do so, the client's own one, too.

        Returns:
            The client's loop, which ends then.
        """
        assert self._thread is not None, "it is a member"
        loop, self._leaves = self._thread.loop, True
        asyncio.run_coroutine_threadsafe(self._leave(loop), loop)
        return loop

    async def _leave(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            await self.client.close()
        finally:
            self._forget()
            loop.stop()

    def _forget(self) -> None:
        atexit.unregister(self._at_exit)
        if self._sigterm is not None:
            self._sigterm.close()

    def _at_exit(self) -> None:
        if self._leaves and self._thread is not None:
            self._thread.wait()
            return
        # The interpreter keeps the exception that ended the program here.
        self.end(abort=getattr(sys, "last_value", None) is not None)

    def _plan_leave_soon(self) -> None:
        self.client.plan_leave_soon()


class BlockingClient(KVStore):
    """A worker of the cluster. Every method waits; otherwise they are those of `aiokv.Client`. Usable from any thread.

    A client that is still open when the program ends leaves the cluster in good order, unless the program ends by an
    exception: then the others see it as lost. One that is dropped before that leaves in good order at once, and warns.

    Args:
        client: the async client; it must not be started.
        type: the store's name, such as "dist_sync".
        leave_on_sigterm: see `Config.leave_on_sigterm`, which the client itself does not do.
    """

    def __init__(self, client: Client, *, type: str, leave_on_sigterm: bool = False) -> None:
        self.type = type
        self._member = Member(client, leave_on_sigterm=leave_on_sigterm)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._member.end(abort=error is not None)

    def __del__(self) -> None:
        if self._member.is_started:
            loop = self._member.end_soon()
            text = f"{self._member.client.description} was dropped before it was closed, so it leaves the cluster: "
            tell_of_dropped(self, text + "use `with`, or call `close()`", loop)

    def start(self) -> None:
        """Join the cluster. See `aiokv.Client.start`."""
        self._member.start()

    def close(self, *, timeout: float | None = None) -> None:
        """Leave the cluster in good order. Can be called twice. See `aiokv.Client.close`."""
        self._member.end(abort=False, timeout=timeout)

    def rejoin(self) -> None:
        """Leave, and join the cluster that comes after this one at the same address. See `aiokv.Client.rejoin`."""
        self._member.rejoin()

    def leave(self, *, timeout: float | None = None) -> None:
        """Leave the cluster when all that was pushed counts. See `aiokv.Client.leave`."""
        self._member.leave(timeout=timeout)

    @property
    def _operations(self) -> Operations:
        return self._member.client

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._member.run(coroutine)


def connect(
    scheduler: str | None = None,
    *,
    policy: str = "bsp",
    device: str = "cpu",
    config: Config | None = None,
    **settings: Any,
) -> BlockingClient:
    """Return a client for ordinary code, to be used with `with`. The arguments are those of `aiokv.connect`."""
    config = config or load_config(scheduler=scheduler, **settings)
    leaves, config = config.leave_on_sigterm, structs.replace(config, leave_on_sigterm=False)
    client = connect_async(config=config, policy=policy, device=device)
    return BlockingClient(client, type=policy, leave_on_sigterm=leaves)
