"""Commands of other packages: found, run, and no harm to the others when they are broken."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.cli.calling import call, help_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


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


def test_ctrl_c_ends_every_command_with_one_line(
    plugin: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    plugin("import click\n\n@click.command()\ndef hello():\n    raise KeyboardInterrupt\n")
    assert call("hello") == 130
    assert capsys.readouterr().err == "error: interrupted\n"


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
