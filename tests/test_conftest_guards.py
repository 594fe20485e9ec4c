"""The guards of conftest.py, tried on small test files of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

SETTINGS = """
[tool.pytest]
strict = true
addopts = ["--import-mode=importlib", "-p", "no:randomly"]
filterwarnings = ["error"]
markers = ["allow_blocking"]
pythonpath = ["."]
asyncio_mode = "auto"
asyncio_default_fixture_loop_scope = "function"
"""

LEAVES_TASK = """
import asyncio

async def test_it():
    test_it.task = asyncio.create_task(asyncio.Event().wait(), name="forgotten")
"""

LEAVES_SOCKET_IN_CYCLE = """
import socket

def test_it():
    cycle = [socket.socket()]
    cycle.append(cycle)
"""

LEAVES_REFERENCED_SOCKET = """
import socket

def test_it():
    test_it.socket = socket.socket()
"""

LEAVES_TRANSPORT = """
import asyncio

async def test_it():
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    await loop.create_connection(asyncio.Protocol, *server.sockets[0].getsockname())
    server.close()
"""

LEAVES_THREAD = """
import threading

def test_it():
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()
"""

LEAVES_LOG_HANDLER = """
import logging

def test_it():
    logging.getLogger("aiokv").addHandler(logging.NullHandler())
"""

LEAVES_SETTING = """
import os

def test_it():
    os.environ["AIOKV_FORGOTTEN"] = "1"
"""

LEAVES_NOTHING = """
import asyncio
import socket
import threading

import pytest

@pytest.fixture
async def echo():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    task = asyncio.create_task(server.serve_forever())
    yield server.sockets[0].getsockname()
    task.cancel()

async def test_fixture_with_a_task(echo):
    reader, writer = await asyncio.open_connection(*echo)
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()

async def test_executor():
    assert await asyncio.to_thread(threading.current_thread) is not threading.current_thread()

def test_joined_thread_and_closed_socket():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    socket.socket().close()
"""

LIBRARY_THAT_BLOCKS = """
import time

def stall():
    time.sleep(0)
"""

CALLS_WHAT_BLOCKS = """
import aiokv
import pytest

async def test_watched():
    aiokv.stall()

@pytest.mark.allow_blocking("the test says so")
async def test_not_watched():
    aiokv.stall()
"""


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    """Return a folder with this project's conftest.py, in which tests run in a process of their own."""
    pytester.makepyprojecttoml(SETTINGS)
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    return pytester


def test_left_task_fails_the_test_and_is_named(inner: pytest.Pytester) -> None:
    inner.makepyfile(LEAVES_TASK)
    result = inner.runpytest_subprocess()
    result.stdout.fnmatch_lines(["*left 1 tasks pending: forgotten (Event.wait, line *"])
    assert result.parseoutcomes()["errors"] == result.parseoutcomes()["passed"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param(LEAVES_SOCKET_IN_CYCLE, "*ResourceWarning: unclosed <socket.socket*", id="socket"),
        pytest.param(
            LEAVES_REFERENCED_SOCKET, "*left sockets open that something still refers to*", id="referenced-socket"
        ),
        pytest.param(LEAVES_THREAD, "*left threads running: forgotten*", id="thread"),
        pytest.param(LEAVES_LOG_HANDLER, "*left handlers of aiokv's log behind: *NullHandler*", id="handler"),
        pytest.param(LEAVES_SETTING, "*left other environment variables behind: AIOKV_FORGOTTEN*", id="setting"),
    ],
)
def test_what_is_left_fails_the_test_and_is_named(inner: pytest.Pytester, source: str, message: str) -> None:
    inner.makepyfile(source)
    result = inner.runpytest_subprocess()
    result.stdout.fnmatch_lines([message])
    assert result.parseoutcomes()["errors"] == result.parseoutcomes()["passed"]


@pytest.mark.parametrize(
    ("loop", "kind"), [("asyncio", "transport <*SocketTransport"), ("uvloop", "resource <TCPTransport")]
)
def test_left_transport_fails_the_test_on_either_loop(inner: pytest.Pytester, loop: str, kind: str) -> None:
    if loop == "uvloop":
        pytest.importorskip("uvloop", reason="not every platform has uvloop")
    inner.makepyfile(LEAVES_TRANSPORT)
    result = inner.runpytest_subprocess("-k", loop)
    result.stdout.fnmatch_lines([f"*ResourceWarning: unclosed {kind}*"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_what_cleans_up_passes_on_every_loop(inner: pytest.Pytester) -> None:
    inner.makepyfile(LEAVES_NOTHING)
    result = inner.runpytest_subprocess("-v")
    result.stdout.fnmatch_lines(["*test_executor?asyncio? PASSED*"])
    assert result.ret == pytest.ExitCode.OK


def test_blocking_call_below_the_library_fails_a_net_test_unless_it_is_marked(inner: pytest.Pytester) -> None:
    inner.makepyfile(**{"aiokv/__init__": LIBRARY_THAT_BLOCKS, "net/test_blocks": CALLS_WHAT_BLOCKS})
    result = inner.runpytest_subprocess()
    result.stdout.fnmatch_lines(["*BlockingError: Blocking call to time.sleep*"])
    assert result.parseoutcomes()["failed"] == result.parseoutcomes()["passed"]
