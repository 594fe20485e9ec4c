"""The commands `aiokv scheduler` and `aiokv server`, with stubs for the nodes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import types
from typing import TYPE_CHECKING, Any, Self

import pytest

from aiokv.core.effects import Stop
from aiokv.errors import BindError
from aiokv.types import Role
from tests.cli.calling import call

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from aiokv.config import Config


class StubNode:
    """Takes the place of a scheduler or server."""

    stop = Stop("all workers have left")
    refusal: Exception | None = None

    def __init__(self, config: Config) -> None:
        self.config = config
        self.host, self.port = "", 0
        made.append(self)

    async def __aenter__(self) -> Self:
        """Listen, or refuse to."""
        if self.refusal:
            raise self.refusal
        self.host, self.port = self.config.bind_host, self.config.bind_port or 41235
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing."""

    async def wait_stopped(self) -> Stop:
        """End at once."""
        return self.stop


made: list[StubNode] = []


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> type[StubNode]:
    """Put stubs in the place of the nodes and of the loop; return the class of the nodes."""

    class Node(StubNode):
        """A class of its own for each test, so that a test may change it."""

    def run(main: Coroutine[Any, Any, Any], *, loop: str) -> Any:
        assert loop == "auto"
        return asyncio.run(main)

    stubs: list[tuple[str, str, Any]] = [
        ("scheduler", "Scheduler", Node),
        ("server", "Server", Node),
        ("runner", "run", run),
    ]
    for name, attribute, stub in stubs:
        module = types.ModuleType(f"aiokv.net.{name}")
        setattr(module, attribute, stub)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("aiokv.net.runner", sys.modules["aiokv.net.runner"], raising=False)
    made.clear()
    return Node


@pytest.mark.usefixtures("node")
def test_scheduler_says_where_it_listens_and_whom_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("scheduler", "--port", "0", "-w", "2", "-s", "1") == 0
    out, err = capsys.readouterr()
    assert out == "scheduler listening on 127.0.0.1:41235, waiting for 2 workers and 1 server\n"
    assert err == "scheduler is done: all workers have left\n"


@pytest.mark.usefixtures("node")
def test_scheduler_listens_at_the_well_known_port_unless_told_otherwise() -> None:
    call("scheduler")
    assert made[0].config.bind_port == 9091


@pytest.mark.usefixtures("node")
def test_server_says_where_it_listens_and_where_the_scheduler_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("server", "--scheduler", "[::1]:9000", "--host", "::1") == 0
    assert capsys.readouterr().out == "server listening on [::1]:41235, scheduler at [::1]:9000\n"


@pytest.mark.usefixtures("node")
def test_json_is_one_line_with_the_real_address(capsys: pytest.CaptureFixture[str]) -> None:
    call("scheduler", "--port", "0", "--name", "boss", "--cluster", "blue", "--json")
    record = json.loads(capsys.readouterr().out)
    assert record == {
        "role": "scheduler",
        "name": "boss",
        "cluster": "blue",
        "host": "127.0.0.1",
        "port": 41235,
        "pid": os.getpid(),
    }


@pytest.mark.usefixtures("node")
def test_json_has_the_address_that_the_others_shall_use(capsys: pytest.CaptureFixture[str]) -> None:
    call("scheduler", "--advertise", "node7", "--json")
    assert json.loads(capsys.readouterr().out)["host"] == "node7"


@pytest.mark.usefixtures("node")
def test_options_become_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("heartbeat = 0.5\nbackend = 'cuda'", encoding="utf-8")
    monkeypatch.setenv("AIOKV_TOKEN", "secret")
    monkeypatch.setenv("AIOKV_ROLE", "worker")
    options = "--scheduler node1:9000 --host 0.0.0.0 --port 7 --advertise node2 --backend cpu --name s7 --cluster blue"
    assert call("server", *options.split(), "--config", str(path)) == 0
    config = made[0].config
    assert (config.role, config.scheduler_host, config.scheduler_port) == (Role.SERVER, "node1", 9000)
    assert (config.bind_host, config.bind_port, config.advertise_host) == ("0.0.0.0", 7, "node2")
    assert (config.backend, config.name, config.cluster, config.token) == ("cpu", "s7", "blue", "secret")
    assert config.heartbeat == 0.5


def test_node_that_failed_says_why_and_exits_with_1(node: type[StubNode], capsys: pytest.CaptureFixture[str]) -> None:
    node.stop = Stop("worker-1 (rank 1) is lost", failed=True)
    assert call("scheduler") == 1
    assert capsys.readouterr().err == "error: worker-1 (rank 1) is lost\n"


def test_error_is_one_line_and_exits_with_1(node: type[StubNode], capsys: pytest.CaptureFixture[str]) -> None:
    node.refusal = BindError("can't listen at 127.0.0.1:9091:\n  address already in use")
    assert call("scheduler") == 1
    assert capsys.readouterr().err == "error: can't listen at 127.0.0.1:9091: address already in use\n"


@pytest.mark.usefixtures("node")
def test_setting_that_can_not_be_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AIOKV_NUM_SERVER", "2")
    assert call("scheduler") == 1
    expected = "error: unknown environment variable 'AIOKV_NUM_SERVER'; did you mean 'AIOKV_NUM_SERVERS'?\n"
    assert capsys.readouterr().err == expected
