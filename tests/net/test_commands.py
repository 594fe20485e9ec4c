"""Commands, plug-ins and profiles over TCP, and on the store in this process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.commands import registry as commands
from aiokv.errors import CommandError, ConfigError, OptimizerError
from aiokv.optim import registry as rules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.net.conftest import MakeCluster

PLUGIN = '''
    """A rule and a command of one's own."""

    import msgspec
    from aiokv.commands import register as register_command
    from aiokv.optim import OwnRule, register


    @register
    class Half(OwnRule, tag="half", frozen=True, kw_only=True):
        def compute(self, weight, gradient, state, step):
            return weight - gradient / 2


    class Add(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        numbers: list[int]


    @register_command("add", Add)
    def add(server, params):
        return {"sum": sum(params.numbers) + server.index}
'''


def full(value: float) -> Any:
    return np.full(3, value, np.float32)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that can be imported; what it registers is forgotten after the test."""
    (tmp_path / "own_plugin.py").write_text(textwrap.dedent(PLUGIN))
    monkeypatch.syspath_prepend(str(tmp_path))
    known: list[Any] = [(registry, dict(registry)) for registry in (commands._commands, rules._rules)]
    yield "own_plugin"
    sys.modules.pop("own_plugin", None)
    for registry, before in known:
        registry.clear()
        registry.update(before)


WORKER = """
    import aiokv, numpy, own_plugin
    kv = aiokv.create("dist_sync")
    kv.init("w", numpy.ones(3, "float32"))
    kv.set_optimizer("half")
    print(kv.pushpull("w", numpy.ones(3, "float32")), kv.send_command_to_servers("add", {"numbers": [1]}))
"""


def test_servers_that_are_processes_import_the_plugin(tmp_path: Path) -> None:
    (tmp_path / "own_plugin.py").write_text(textwrap.dedent(PLUGIN))
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER))
    command = [sys.executable, "-m", "aiokv", "run", "-s", "2", "--plugin", "own_plugin", "--", "python", "worker.py"]
    # The workers' folder is searched first, and the package under test need not be installed.
    environ = {**os.environ, "AIOKV_BACKEND": "reference", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=25)
    assert done.returncode == 0, done.stderr
    assert "[0.5 0.5 0.5] [{'sum': 1}, {'sum': 2}]" in done.stdout


@pytest.mark.allow_blocking("a plug-in is imported when the server is made")
async def test_a_plugin_brings_a_rule_and_a_command(cluster: MakeCluster, plugin: str) -> None:
    async with cluster(workers=2, servers=2, plugins=(plugin,)) as running:
        await running.each(lambda kv: kv.set_optimizer("half"))
        await running.each(lambda kv: kv.init("w", full(1)))
        for value in await running.each(lambda kv: kv.pushpull("w", full(1))):
            np.testing.assert_array_equal(value, full(0))
        answers = await running.workers[1].send_command_to_servers("add", {"numbers": [1, 2]})
        assert answers == [{"sum": 3}, {"sum": 4}]


async def test_a_plugin_that_cannot_be_imported_is_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="plug-in 'no_such_module' can't be imported: ModuleNotFoundError"):
        aiokv.Server(scheduler="127.0.0.1:1", plugins=("no_such_module",), **settings)


async def test_a_command_that_no_server_knows_lists_those_that_there_are(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        with pytest.raises(CommandError, match=r"unknown command 'stop'; known: profiler\.dump.*statistics"):
            await kv.send_command_to_servers("stop")
        with pytest.raises(CommandError, match="a command has a name, got 2"):
            await kv.send_command_to_servers(2)  # type: ignore[arg-type]
        with pytest.raises(CommandError, match="only plain data can travel"):
            await kv.send_command_to_servers("statistics", {"what": object()})
        assert (await kv.send_command_to_servers("statistics"))[0]["index"] == 0


class Malicious:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


async def test_scenario_23_a_pickle_is_refused_and_no_file_appears(
    cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle  # noqa: PLC0415, TID251 - what an attacker would send

    payload = pickle.dumps(Malicious(tmp_path / "written"))
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        with pytest.raises(OptimizerError):
            await kv.set_optimizer("sgd", learning_rate=payload)
        # Past this side's own check, as from a client that has none.
        monkeypatch.setattr("aiokv.core.worker.control_calls.make_optimizer", lambda name, params: None)
        with pytest.raises(OptimizerError, match="learning_rate"):
            await kv.set_optimizer("sgd", learning_rate=payload)
        with pytest.raises(OptimizerError, match="unknown optimizer"):
            await kv.set_optimizer(payload.decode("latin-1"))
        with pytest.raises(CommandError):
            await kv.send_command_to_servers("statistics", {"optimizer": payload})
        await kv.init("w", full(1))
        np.testing.assert_array_equal(await kv.pull("w"), full(1))
    assert not (tmp_path / "written").exists()


async def test_scenario_59_staleness_is_counted(cluster: MakeCluster) -> None:
    """A worker that read version 0 pushes when the store is at version 5."""
    async with cluster(workers=2, policy="asp") as running:
        late, other = running.workers
        await running.each(lambda kv: kv.set_optimizer("sgd", learning_rate=0.5))
        await running.each(lambda kv: kv.init("w", full(0)))
        await late.pull("w")
        for _ in range(5):
            await other.pushpull("w", full(1))
        await late.push("w", full(1))
        (statistics,) = await other.send_command_to_servers("statistics")
        assert statistics["staleness"] == {0: 5, 5: 1}
        assert statistics["counters"]["updates"] == 6


async def test_every_server_writes_its_profile(cluster: MakeCluster, tmp_path: Path) -> None:
    """MXNet's test_server_profiling."""
    path = tmp_path / "profile.json"
    async with cluster(workers=3, servers=2) as running:
        first = running.workers[0]
        await running.each(lambda kv: kv.init("w", np.zeros(100_000, np.float32)))

        async def train() -> None:
            await running.each(lambda kv: kv.pushpull("w", np.ones(100_000, np.float32)))

        await first.profile_servers("start")
        await train()
        before = [answer["steps"] for answer in await first.profile_servers("stop")]
        await train()
        assert [answer["steps"] for answer in await first.profile_servers("resume")] == before
        await train()
        answers = await first.profile_servers("dump", path=str(path))
        assert [answer["path"] for answer in answers] == [str(tmp_path / f"server{i}_profile.json") for i in range(2)]
        with pytest.raises(CommandError, match="unknown action 'pause'; known: start, stop, resume, dump"):
            await first.profile_servers("pause")
    for answer in answers:
        events = json.loads(await asyncio.to_thread(Path(answer["path"]).read_bytes))["traceEvents"]
        pushes = [event for event in events if event["name"] == "Push"]
        assert len(pushes) >= 2 * 3
        assert all(event["args"] == {"key": "w"} and event["dur"] >= 0 for event in pushes)


def test_the_local_store_has_the_same_commands(tmp_path: Path) -> None:
    kv = aiokv.create("local")
    kv.init("w", full(0))
    kv.profile_servers("start")
    kv.push("w", full(1))
    (answer,) = kv.profile_servers("dump", path=str(tmp_path / "p.json"))
    names = [event["name"] for event in json.loads(Path(answer["path"]).read_bytes())["traceEvents"]]
    assert "Push" in names
    (statistics,) = kv.send_command_to_servers("statistics")
    assert (statistics["staleness"], statistics["counters"]) == ({0: 1}, {"updates": 1})
    with pytest.raises(CommandError, match="unknown command 'nope'"):
        kv.send_command_to_servers("nope")
