"""How the benchmark's tests run the command: in this process, with nothing of a cluster in the environment."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Ran:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Return the one JSON object on stdout."""
        [line] = self.out.splitlines()
        return json.loads(line)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[[str], Ran]:
    """Run `aiokv bench` with the arguments in a text."""
    for name in list(os.environ):
        if name.startswith(("AIOKV_", "DMLC_")):
            monkeypatch.delenv(name)

    def run(arguments: str) -> Ran:
        with pytest.raises(SystemExit) as caught:
            main(["bench", *arguments.split()])
        out, err = capfd.readouterr()
        return Ran(int(caught.value.code or 0), out, err)

    return run
