"""What `docs/embedding.md` says: its program, and what becomes of calls that are cancelled."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from aiokv.errors import BarrierTimeoutError
from tests.pages import DOCS, snippets

if TYPE_CHECKING:
    from pathlib import Path

    from tests.net.conftest import MakeCluster


def test_the_program_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(snippets(DOCS / "embedding.md")[0], encoding="utf-8")
    command = [sys.executable, "-W", "error", "service.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("trained: [0.99999")
    assert lines[1:] == ["updates: 20", "rank 0 did not wait: 1 request is open", "rank 1 pushed nothing"]


async def entered_and_cancelled(entering: asyncio.Task[None]) -> None:
    """Cancel what waits for others."""
    _, waiting = await asyncio.wait([entering], timeout=0.1)
    assert waiting
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering


async def test_a_barrier_that_is_cancelled_is_entered(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        first, second = running.workers
        await entered_and_cancelled(asyncio.create_task(first.barrier()))
        await second.barrier()
        await running.each(lambda kv: kv.barrier())


async def test_a_barrier_that_took_too_long_can_be_tried_again(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        first, second = running.workers
        with pytest.raises(BarrierTimeoutError, match="rank 1"):
            await first.barrier(timeout=0.1)
        waiting = asyncio.create_task(second.barrier())
        await first.barrier()
        await waiting


async def test_who_does_not_wait_until_it_has_joined_leaves_its_place_to_another(cluster: MakeCluster) -> None:
    async with cluster(workers=2, start_workers=False) as running:
        for _ in range(2):
            await entered_and_cancelled(asyncio.create_task(running.client("").start()))
        running.workers = [running.client("one"), running.client("two")]
        await running.each(lambda kv: kv.start())
        assert [worker.rank for worker in running.workers] == [0, 1]


async def test_leaving_that_is_cancelled_closes_everything(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        leaving = asyncio.create_task(running.workers[0].close())
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await running.workers[0].close()
