"""The `aiokv` command as its user sees it: help, output, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any, Self

import click
import pytest
from click.testing import CliRunner

from aiokv.cli import cli, main
from aiokv.core.effects import Stop
from aiokv.errors import BindError, ConfigError
from aiokv.types import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from aiokv.config import Config


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test as if nothing of the cluster were set in the environment."""
    for name in list(os.environ):
        if name.startswith(("AIOKV_", "DMLC_")):
            monkeypatch.delenv(name)


def call(*args: str) -> int:
    """Run the command in this process; return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(list(args))
    return int(caught.value.code or 0)


def help_of(*args: str) -> str:
    """Return a help text."""
    result = CliRunner().invoke(cli, [*args, "--help"], prog_name="aiokv")
    assert result.exit_code == 0
    return result.output


# --- the command itself ---


def test_help_lists_the_commands_with_a_sentence_each() -> None:
    text = help_of()
    assert "run         Run a training job, on this machine or on several hosts." in text
    assert "scheduler   Run the scheduler of a cluster." in text
    assert "server      Run one server of a cluster." in text


@pytest.mark.parametrize("command", ["run", "scheduler", "server"])
def test_help_of_a_command_fits_a_terminal_and_has_no_token_option(command: str) -> None:
    text = help_of(command)
    assert max(map(len, text.splitlines())) <= 80
    assert "--token" not in text


def test_help_of_run_says_what_the_exit_codes_mean_and_gives_an_example() -> None:
    text = help_of("run")
    assert "124  --timeout has passed" in text
    assert "aiokv run --servers 2 --workers 4 -- python train.py --epochs 10" in text


def test_module_and_command_are_the_same() -> None:
    done = subprocess.run([sys.executable, "-m", "aiokv", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("aiokv ")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, aiokv.cli\n"
        "try: aiokv.cli.main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'numpy', 'numba', 'asyncio', 'rich', 'aiokv.net'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["fly"], "No such command 'fly'"),
        (["run"], "Missing argument 'COMMAND...'"),
        (["run", "-w", "0", "--", "true"], "0 is not in the range x>=1"),
        (["scheduler", "--port", "65536"], "65536 is not in the range 0<=x<=65535"),
        (["scheduler", "--token", "x"], "No such option '--token'"),
    ],
)
def test_wrong_usage_exits_with_2(args: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*args) == 2
    assert complaint in capsys.readouterr().err


# --- scheduler and server, with stubs for the nodes ---


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


# --- run ---

SCHEDULER = "import json, signal; print(json.dumps({'host': '127.0.0.1', 'port': 4321})); signal.pause()"
PAUSE = "import signal; signal.pause()"


@pytest.fixture
def _fake_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `aiokv run` start tiny processes instead of real schedulers and servers."""
    codes = {Role.SCHEDULER: SCHEDULER, Role.SERVER: PAUSE}
    monkeypatch.setattr("aiokv.launch.base.node_command", lambda role: [sys.executable, "-S", "-c", codes[role]])


@pytest.mark.usefixtures("_fake_nodes")
def test_run_shows_the_workers_lines_and_exits_with_0(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os; print(os.environ['AIOKV_NAME'], os.environ['AIOKV_NUM_SERVERS'])"
    assert call("run", "-w", "2", "-s", "1", "--name-prefix", "a-", "python", "-S", "-c", code) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["a-worker-0  | a-worker-0 1", "a-worker-1  | a-worker-1 1"]
    assert "aiokv       | scheduler listening on 127.0.0.1:4321; starting 1 server and 2 workers\n" in err
    assert err.endswith("aiokv       | all workers are done\n")


@pytest.mark.usefixtures("_fake_nodes")
def test_run_ends_with_the_reason_and_the_code_of_the_worker_that_failed(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('ValueError: no data', file=sys.stderr); sys.exit(7)"
    assert call("run", "--", "python", "-S", "-c", code) == 7
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == "error: worker-0 exited with code 7; its last line on stderr: ValueError: no data"


@pytest.mark.usefixtures("_fake_nodes")
def test_run_takes_defaults_from_the_environment_and_hands_the_file_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text("num_servers = 2\nscheduler = '10.0.0.1:9'", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DMLC_NUM_WORKER", "3")
    monkeypatch.setenv("DMLC_ROLE", "scheduler")
    names = ("AIOKV_CONFIG", "AIOKV_BIND_HOST", "AIOKV_ON_WORKER_LOSS")
    code = f"import os; print(*[os.environ[name] for name in {names}])"
    options = ("--config", "c.toml", "--on-worker-loss", "respawn", "--json")
    assert call("run", *options, "--", "python", "-S", "-c", code) == 0
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    lines = [event["text"] for event in events if event["event"] == "line"]
    assert lines == [f"{tmp_path / 'c.toml'} 127.0.0.1 respawn"] * 3
    assert [event["node"] for event in events if event["event"] == "started" and event["role"] == "server"] == [
        "server-0",
        "server-1",
    ]
    assert events[-1] == {"event": "ended", "exit_code": 0, "reason": "", "text": "all workers are done"}


def test_run_refuses_copies_for_which_there_is_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "--replication", "2", "--", "python", "-c", "") == 1
    assert "replication = 2 needs at least 2 servers, got 1" in capsys.readouterr().err


def test_run_refuses_a_program_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "nosuchprogram") == 1
    assert capsys.readouterr().err == "error: cannot find the program 'nosuchprogram' that the workers shall run\n"


# --- plug-in commands ---


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs a package with a command `hello`."""

    def install(source: str, extras: tuple[str, ...] = ()) -> None:
        info = tmp_path / "hellopack-1.0.dist-info"
        info.mkdir()
        metadata = [
            "Metadata-Version: 2.1",
            "Name: hellopack",
            "Version: 1.0",
            *(f"Provides-Extra: {e}" for e in extras),
        ]
        (info / "METADATA").write_text("\n".join(metadata) + "\n", encoding="utf-8")
        (info / "entry_points.txt").write_text("[aiokv.commands]\nhello = hellopack_cli:hello\n", encoding="utf-8")
        (tmp_path / "hellopack_cli.py").write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "hellopack_cli", raising=False)

    return install


HELLO = """
import click

@click.command()
@click.option("--name", default="world")
def hello(name):
    "Greet somebody."
    click.echo(f"hello {name}")
"""


def test_plugin_is_listed_and_runs(plugin: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    plugin(HELLO)
    assert "hello       Greet somebody." in help_of()
    assert call("hello", "--name", "you") == 0
    assert capsys.readouterr().out == "hello you\n"


def test_plugin_s_own_help_and_usage_errors_are_its_own(
    plugin: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    plugin(HELLO)
    assert "Usage: aiokv hello [OPTIONS]" in help_of("hello")
    assert call("hello", "--nome", "you") == 2
    assert "No such option '--nome'" in capsys.readouterr().err


def test_plugin_is_not_imported_by_other_commands(plugin: Callable[..., None]) -> None:
    plugin("raise AssertionError('imported')")
    assert "Run the scheduler" in help_of("scheduler")


def test_plugin_that_misses_its_extra_says_what_to_install(
    plugin: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    plugin("import nosuchpackage.inside", extras=("hello",))
    assert call("hello") == 1
    assert capsys.readouterr().err == (
        "error: the command 'hello' needs the package 'nosuchpackage', which is not installed: "
        "pip install 'hellopack[hello]'\n"
    )


def test_plugin_without_an_extra_names_the_package(
    plugin: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    plugin("import nosuchpackage")
    assert call("hello") == 1
    assert capsys.readouterr().err.endswith("which is not installed: pip install nosuchpackage\n")


def test_plugin_that_misses_a_part_of_itself_is_not_blamed_on_an_extra(
    plugin: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    plugin("import hellopack_cli.part", extras=("hello",))
    assert call("hello") == 1
    assert capsys.readouterr().err.startswith("error: the command 'hello' can't be loaded from hellopack_cli:hello: ")


@pytest.mark.parametrize("source", ["raise RuntimeError('broken')", "import nosuchpackage", "hello = 3"])
def test_broken_plugin_does_not_hide_the_help_of_the_others(plugin: Callable[..., None], source: str) -> None:
    plugin(source)
    text = help_of()
    assert "hello       (not available: " in text
    assert "run         Run a training job" in text


def test_plugin_that_is_no_command_is_an_error(plugin: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    plugin("hello = 3")
    assert call("hello") == 1
    assert capsys.readouterr().err == (
        "error: the command 'hello' can't be used: hellopack_cli:hello is of type int, not a click command\n"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--remote", "ssh {host}"], "give both"),
        (["--hosts", ","], "names no host"),
        (["--hosts", "no-such-host.invalid"], "'no-such-host.invalid' reaches this machine .*: give --advertise"),
    ],
)
def test_hosts_that_can_not_be_used_are_an_error_before_anything_starts(options: list[str], words: str) -> None:
    with pytest.raises((click.UsageError, ConfigError), match=words):
        cli.main(["run", *options, "--", "python", "-c", ""], standalone_mode=False)
