"""Which loop runs a program."""

from __future__ import annotations

import asyncio
import sys

import pytest

from aiokv.errors import MissingExtraError
from aiokv.net import runner


async def loop_module() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_asyncio_is_there_when_asked_for() -> None:
    assert runner.run(loop_module(), loop="asyncio").startswith("asyncio")


def test_uvloop_is_the_default_where_it_exists() -> None:
    pytest.importorskip("uvloop", reason="uvloop does not exist for this platform")
    assert runner.run(loop_module()) == "uvloop"


def test_without_uvloop_the_default_is_asyncio_and_asking_for_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert runner.run(loop_module()).startswith("asyncio")
    with pytest.raises(MissingExtraError, match="uvloop"):
        runner.loop_factory("uvloop")
