"""`aiokv why` asks a running cluster, from outside."""

from __future__ import annotations

import asyncio
import io
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from aiokv.config import load_config
from aiokv.errors import HandshakeError
from aiokv.net.inquiry import ask_waiting
from aiokv.why import MOST_ROWS, as_counters, as_facts, metrics, plain_console, show, show_counters, why
from aiokv.wire.messages import Waiting, WaitingCall

if TYPE_CHECKING:
    import click

    from aiokv.config import Config
    from tests.net.conftest import Cluster, MakeCluster


async def look(running: Cluster, **settings: str) -> dict[str, Waiting | str]:
    """Ask a cluster."""
    config = load_config(environ={}, scheduler=running.scheduler.address, **{**running.settings, **settings})
    return await ask_waiting(config, timeout=5.0)


async def test_call_that_waits_for_another_worker_is_shown_while_it_does(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=2) as running:
        first, second = running.workers
        value = np.zeros((300, 300), np.float32)
        await asyncio.gather(first.init({"w": value}), second.init({"w": value}))
        pushing = asyncio.create_task(first.push("w", value))
        answers = await look(running)
        while not as_facts(answers)["waiting"]:
            answers = await look(running)
        shown = as_facts(answers)
        assert {call["at"] for call in shown["waiting"]} <= {"server-0", "server-1"}
        for call in shown["waiting"]:
            assert (call["who"], call["ranks"], call["key"]) == ("rank 0 (worker-0)", (1,), "w")
        assert [member["name"] for member in shown["members"] if member["role"] == "worker"] == ["worker-0", "worker-1"]
        await second.push("w", value)
        await pushing
        assert as_facts(await look(running))["waiting"] == []


async def test_who_does_not_know_the_token_learns_nothing(cluster: MakeCluster) -> None:
    async with cluster(workers=1, servers=1, token="right") as running:
        with pytest.raises(HandshakeError):
            await look(running, token="wrong")


async def test_whoever_looks_on_is_told_the_counters_of_each_node(cluster: MakeCluster) -> None:
    async with cluster(workers=1, servers=2) as running:
        (kv,) = running.workers
        await kv.init("w", np.zeros(3, np.float32))
        for server in running.servers:
            server.note("warning", "something", "was wrong", {})
        counters = as_counters(await look(running))
        assert list(counters) == ["scheduler", "server-0", "server-1"]
        assert ["something" in counters[node] for node in counters] == [False, True, True]


def test_counters_are_a_table_with_a_column_for_each_node() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    answers: dict[str, Waiting | str] = {
        "scheduler": Waiting(4, (), counters={"worker_lost": 2}),
        "server-0": Waiting(4, (), counters={"updates": 3000}),
        "server-1": "connection refused",
    }
    show_counters(answers, console)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[:3] == [["counter", "scheduler", "server-0"], ["updates", "0", "3,000"], ["worker_lost", "2", "0"]]
    assert " ".join(lines[3]) == "server-1 says nothing: connection refused"


@pytest.mark.parametrize("json_too", [False, True])
@pytest.mark.parametrize("command", [why, metrics], ids=["why", "metrics"])
def test_commands_ask_as_they_are_told_and_print_the_answers(
    monkeypatch: pytest.MonkeyPatch, command: click.Command, json_too: bool
) -> None:
    asked: list[tuple[Config, float]] = []

    async def answer(config: Config, *, timeout: float) -> dict[str, Waiting | str]:
        asked.append((config, timeout))
        return {"scheduler": Waiting(4, (), counters={"worker_lost": 2})}

    monkeypatch.setattr("aiokv.why.ask_waiting", answer)
    options = ["--scheduler", "node:7", "--tls-ca", "ca.pem", "--timeout", "2", *(["--json"] if json_too else [])]
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 0, result.output
    [(config, timeout)] = asked
    assert (config.scheduler_host, config.scheduler_port, config.uses_tls, timeout) == ("node", 7, True, 2.0)
    if json_too:
        assert set(json.loads(result.output)) >= {"scheduler" if command is metrics else "waiting"}
    else:
        assert ("worker_lost" if command is metrics else "Nothing waits.") in result.output


def test_requests_that_wait_for_the_same_are_one_row_and_the_longest_waits_come_first() -> None:
    calls = [
        WaitingCall(f"rank {rank}", "key 'w', round 3", "no contribution from rank 9", rank + 1.0) for rank in range(3)
    ]
    calls.append(WaitingCall("rank 0", "barrier 'b'", "rank 9 did not arrive", 20.0))
    console = Console(width=200, record=True, file=io.StringIO())
    show({"scheduler": Waiting(4, ()), "server-0": Waiting(4, tuple(calls)), "server-1": "connection refused"}, console)
    lines = console.export_text().splitlines()
    assert any("server-1 says nothing: connection refused" in line for line in lines)
    rows = [line.split() for line in lines if "rank 9" in line]
    assert [row[:3] for row in rows] == [["20.0", "s", "1"], ["3.0", "s", "3"]]


def test_what_users_have_named_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    call = WaitingCall("rank 0 ([/x])", "key '[red]'", "no contribution from rank 1 (:bug:)", 1.0)
    show({"scheduler": Waiting(1, (call,))}, plain_console())
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("rank 0 ([/x])", "key '[red]'", "rank 1 (:bug:)"))


def test_only_so_many_rows_are_shown_and_the_rest_is_counted() -> None:
    calls = tuple(WaitingCall("", f"key {number}", "nobody", 1.0) for number in range(MOST_ROWS + 5))
    console = Console(width=200, record=True, file=io.StringIO())
    show({"scheduler": Waiting(1, calls)}, console)
    assert "and 5 more, which --json shows" in console.export_text()


def test_facts_are_json() -> None:
    answers: dict[str, Waiting | str] = {"scheduler": Waiting(1, (WaitingCall("a", "b", "c", 1.0, (2,), 7, 3),))}
    assert json.loads(json.dumps(as_facts(answers)))["waiting"][0]["ranks"] == [2]
