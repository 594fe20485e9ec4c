"""What every test gets: both event loops, and guards that fail a test which leaves something running.

A test may leave no task, thread, socket, transport, log handler or setting behind, and tests of `aiokv.net` may not
block their event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from blockbuster import blockbuster_ctx
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

NET_TESTS = Path(__file__).parent / "net"
LONG_COMPUTATIONS = (
    "codec/test_codec_properties.py",
    "core/scheduler/test_members_properties.py",
    "core/scheduler/test_standbys_properties.py",
    "core/together/test_bundles_together.py",
    "core/together/test_checkpoints_together.py",
    "core/together/test_failover_together.py",
    "core/together/test_going_on_together.py",
    "core/together/test_joining_together.py",
    "core/together/test_policy_changes_together.py",
    "core/together/test_together.py",
    "core/together/test_whole_reads_together.py",
    "kernels/test_kernel_arithmetic.py",
    "sim/test_sim_planted_faults.py",
    "sim/test_sim_validation.py",
)
"""Traced by coverage they would take three times as long, for lines that other tests come by, too."""
LONGEST = ("chaos/test_chaos_run.py", "device/test_simulated_devices.py", "kernels/test_kernel_cuda.py")
"""What takes half a minute a test comes first: begun last it would keep one process busy when the others are done."""
SANS_IO = ("aiokv.core", "aiokv.policy", "aiokv.wire")
"""The packages whose branches the tests in the folders of the same names cover all."""
TURNS_TO_END = 20
"""How many turns of the loop a task that was cancelled, or is about to end, gets before it counts as left behind."""
NAMED = 10
"""How many of the tasks that a test left behind are named."""
SECONDS_TO_END = 2.0
"""How long a thread that is about to end gets before it counts as left behind."""

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest tests, and let coverage not look at long computations.

    Where it measures the state machines it looks only at the tests of these.
    """
    tests = Path(__file__).parent
    longest = {tests / name for name in LONGEST}
    items.sort(key=lambda item: item.path not in longest)
    untraced = {tests / name for name in LONG_COMPUTATIONS}
    measured = config.getoption("cov_source", None) or []
    folders = [tests / name.removeprefix("aiokv.") for name in measured if name in SANS_IO]
    for item in items:
        is_elsewhere = folders and not any(item.path.is_relative_to(folder) for folder in folders)
        if is_elsewhere or item.path in untraced:
            item.add_marker("no_cover")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every async test on asyncio's own loop, and on uvloop where there is one, unless it says that one will do."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if item.get_closest_marker("one_loop"):
        return factories
    with contextlib.suppress(ImportError):
        factories["uvloop"] = _make_uvloop_factory()
    return factories


def _make_uvloop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what makes a uvloop; raises ImportError where there is none."""
    import uvloop  # noqa: PLC0415 - not every platform has it

    class Loop(uvloop.Loop):
        def close(self) -> None:
            # A warning about an open transport that is raised while uvloop closes it keeps uvloop waiting forever,
            # so the warnings come when it is done.
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", ResourceWarning)
                super().close()
            for warning in caught:
                warnings.warn(warning.message, stacklevel=1)

    return Loop


@pytest.fixture(scope="module", autouse=True)
def _freeze_old_objects() -> None:
    """Keep the collection after each test short: it need not look at what is older than the test's module."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_left_behind(_freeze_old_objects: None) -> Iterator[None]:
    """Fail a test that leaves threads, sockets, transports, log handlers or settings behind.

    It is set up first and torn down last, when the event loop is closed and every fixture has cleaned up.
    """
    threads = set(threading.enumerate())
    sockets = _open_sockets()
    handlers = list(logging.getLogger("aiokv").handlers)
    environ = _settings()
    yield
    left = [handler for handler in logging.getLogger("aiokv").handlers if handler not in handlers]
    for handler in left:
        logging.getLogger("aiokv").removeHandler(handler)
    if left:
        pytest.fail(f"the test left handlers of aiokv's log behind: {left}", pytrace=False)
    if _settings() != environ:
        names = sorted(name for name, _ in _settings() ^ environ)
        pytest.fail(f"the test left other environment variables behind: {', '.join(names)}", pytrace=False)
    # An object in a cycle warns of its open socket when it is collected: do that here, so that this test fails for it.
    gc.collect()
    # What is left belongs to the module, or to what it has imported or compiled: later tests need not look at it.
    gc.freeze()
    new_threads = [thread for thread in threading.enumerate() if thread not in threads]
    for thread in new_threads:
        thread.join(SECONDS_TO_END)
    running = sorted(thread.name for thread in new_threads if thread.is_alive())
    if running:
        pytest.fail(f"the test left threads running: {', '.join(running)}", pytrace=False)
    new_sockets = sorted(_open_sockets() - sockets)
    if new_sockets:
        pytest.fail(f"the test left sockets open that something still refers to: {new_sockets}", pytrace=False)


def _settings() -> set[tuple[str, str]]:
    """Return the environment variables that are settings of aiokv; libraries set others when they are imported."""
    return {(name, value) for name, value in os.environ.items() if name.startswith(("AIOKV_", "DMLC_"))}


def _open_sockets() -> set[str]:
    """Return what identifies the sockets of this process, e.g. `fd 7 socket:[81034]`; empty where there is no /proc."""
    sockets = set()
    with contextlib.suppress(FileNotFoundError):
        for fd in os.listdir("/proc/self/fd"):
            # The descriptor of the listing itself is gone by now.
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if target.startswith("socket:"):
                    sockets.add(f"fd {fd} {target}")
    return sockets


@pytest.fixture(autouse=True)
def _no_task_left_behind_by_async_tests(request: pytest.FixtureRequest, _nothing_left_behind: None) -> None:
    """Ask for `_no_task_left_behind` where there is a loop, before any other async fixture does."""
    if pytest_asyncio.is_async_test(request.node):
        request.getfixturevalue("_no_task_left_behind")


@pytest.fixture
async def _no_task_left_behind() -> AsyncIterator[None]:
    """Fail an async test that leaves tasks pending, when the other async fixtures have cleaned up."""
    yield
    for _ in range(TURNS_TO_END):
        if not _other_tasks():
            return
        await asyncio.sleep(0)
    left = _other_tasks()
    if left:
        names = sorted(f"{task.get_name()} ({_where(task)})" for task in left)
        pytest.fail(f"the test left {len(left)} tasks pending: {', '.join(names[:NAMED])}", pytrace=False)


def _other_tasks() -> list[asyncio.Task[object]]:
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def _where(task: asyncio.Task[object]) -> str:
    """Return the name of the task's coroutine and the line where it waits."""
    coroutine = task.get_coro()
    name = getattr(coroutine, "__qualname__", repr(coroutine))
    stack = task.get_stack(limit=1)
    return f"{name}, line {stack[0].f_lineno}" if stack else name


@pytest.fixture(autouse=True)
def _no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test of `aiokv.net` in which something blocks the event loop.

    Mark a test `allow_blocking(reason)` when it has to. Only calls made by `aiokv` count: tests may read files.
    """
    watched = NET_TESTS in request.path.parents and request.node.get_closest_marker("allow_blocking") is None
    if not watched:
        yield
        return
    with blockbuster_ctx(scanned_modules="aiokv"):
        yield


@pytest.fixture
def closed_policy(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a policy with which nobody can join a running job."""
    from aiokv.policy import ASP, registry  # noqa: PLC0415 - these guards are also tried beside another `aiokv`

    class ClosedPolicy(ASP):
        name = "closed"
        admits = False

    monkeypatch.setitem(registry._POLICIES, ClosedPolicy.name, ClosedPolicy)
    return ClosedPolicy.name
