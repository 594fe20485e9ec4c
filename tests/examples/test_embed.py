"""The embedding example: a whole cluster in one event loop, which goes on to serve the rest of the program."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import CompletedProcess


def test_the_cluster_adds_and_the_program_ticks(run_example: Callable[..., CompletedProcess[str]]) -> None:
    done = run_example("embed.py")
    assert (done.returncode, done.stderr) == (0, "")
    total, ticks = done.stdout.splitlines()
    assert total == "the sum of 1 and 2, as each worker got it: [3.0, 3.0]"
    found = re.fullmatch(r"ticks meanwhile: (\d+)", ticks)
    assert found is not None
    assert int(found[1]) > 1
