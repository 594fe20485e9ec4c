"""Commands by name: what can be registered, what is checked, and that whatever goes wrong is an answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from aiokv.commands import NoParams, ServerInfo, make_command, plain, register, registry, run
from aiokv.errors import AiokvError, CommandError
from aiokv.telemetry import Profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Scale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of the test's command."""

    factor: int = 1


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Registered commands are the whole process's: forget those of a test."""
    before = dict(registry._commands)
    yield
    registry._commands.clear()
    registry._commands.update(before)


@pytest.fixture
def info() -> ServerInfo:
    return ServerInfo("server-1", 1, {"updates": 3}, {5: 1, 0: 2}, Profile())


def test_a_command_gets_its_parameters_and_the_server(info: ServerInfo) -> None:
    @register("scale", Scale)
    def scale(server: ServerInfo, params: Scale) -> dict[str, Any]:
        return {"updates": server.counters["updates"] * params.factor}

    assert run(make_command("scale", {"factor": 2}), info) == {"updates": 6}
    assert run(make_command("scale", {}), info) == {"updates": 3}


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("nope", {}, r"unknown command 'nope'; known: .*profiler\.dump.*statistics"),
        ("statistics", {"a": 1}, "'statistics': .*unknown field.* its parameters: none"),
        ("profiler.dump", {"path": 3}, "'profiler.dump': Expected `str`.*its parameters: path"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(name: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(CommandError, match=words):
        make_command(name, params)


def test_a_name_belongs_to_one_function() -> None:
    def one(server: ServerInfo, params: NoParams) -> dict[str, Any]:
        return {}

    register("one", NoParams)(one)
    register("one", NoParams)(one)
    with pytest.raises(CommandError, match="'statistics' is already aiokv"):
        register("statistics", NoParams)(one)


class Loose(msgspec.Struct):
    """It can change, and it ignores mistakes."""


@pytest.mark.parametrize("params", [Loose, dict, NoParams()])
def test_parameters_are_a_strict_record(params: Any) -> None:
    with pytest.raises(CommandError, match="frozen=True and forbid_unknown_fields=True"):
        register("mine", params)


@pytest.mark.parametrize("name", [2, "", None])
def test_a_number_is_no_command(name: Any) -> None:
    """MXNet's heads 0 to 5 were internal, and 2 stopped the server."""
    with pytest.raises(CommandError, match="a command has a name"):
        register(name, NoParams)


def fail(server: ServerInfo, params: NoParams) -> dict[str, Any]:
    raise ValueError("no such thing")


def refuse(server: ServerInfo, params: NoParams) -> dict[str, Any]:
    raise CommandError("not now")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (fail, "'mine' on server-1: ValueError: no such thing"),
        (refuse, "not now"),
        (lambda server, params: {"object": object()}, "'mine': only plain data can travel"),
        (lambda server, params: {"number": 1 << 70}, "'mine': only plain data can travel: .* ints"),
        (lambda server, params: [1], "'mine': expected a dict with names, got list"),
        (lambda server, params: {1: 2}, "'mine': expected a dict with names, got dict"),
        (lambda server, params: {"much": "x" * 600_000}, "'mine': .* bytes are too many"),
    ],
)
def test_whatever_goes_wrong_is_an_answer(function: Callable[..., Any], words: str, info: ServerInfo) -> None:
    register("mine", NoParams)(function)
    answer = run(make_command("mine", {}), info)
    assert isinstance(answer, AiokvError)
    with pytest.raises(CommandError, match=words):
        raise answer


def test_a_record_travels_as_a_dict() -> None:
    assert plain("scale", Scale(factor=3)) == {"factor": 3}


def test_statistics_are_those_of_the_server(info: ServerInfo) -> None:
    expected = {"name": "server-1", "index": 1, "counters": {"updates": 3}, "staleness": {0: 2, 5: 1}}
    assert run(make_command("statistics", {}), info) == expected


def test_a_profile_is_a_trace_of_complete_events(info: ServerInfo, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    run(make_command("profiler.start", {}), info)
    info.profile.add(make_command("statistics", {}), 1.0, 1.5)
    assert run(make_command("profiler.stop", {}), info) == {"steps": 1}
    assert not info.profile.running
    assert run(make_command("profiler.resume", {}), info) == {"steps": 1}
    assert info.profile.running
    written = tmp_path / "server1_profile.json"
    answer = run(make_command("profiler.dump", {"path": str(path)}), info)
    assert answer == {"path": str(written), "steps": 1, "dropped": 0}
    process, event = json.loads(written.read_bytes())["traceEvents"]
    assert process["args"] == {"name": "server-1"}
    assert (event["name"], event["ph"], event["ts"], event["dur"]) == ("Command", "X", 1e6, 5e5)
    run(make_command("profiler.start", {}), info)
    assert not info.profile.steps


@pytest.mark.parametrize(
    ("path", "words"), [("~/.bashrc", "ends in .json"), ("no/such/folder/p.json", "server-1 can't write .*server1_p")]
)
def test_a_trace_that_cannot_be_written_is_an_error(path: str, words: str, info: ServerInfo) -> None:
    answer = run(make_command("profiler.dump", {"path": path}), info)
    assert isinstance(answer, CommandError)
    with pytest.raises(CommandError, match=words):
        raise answer


def test_a_profile_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiokv.telemetry.MAX_STEPS", 1)
    profile = Profile()
    profile.start()
    for _ in range(3):
        profile.add(object(), 0.0, 1.0)
    assert (len(profile.steps), profile.dropped) == (1, 2)
