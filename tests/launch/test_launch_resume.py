"""Everything dies at once, as in a power cut: `aiokv run --resume` goes on, and ends with the same bits."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from subprocess import DEVNULL, PIPE
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from aiokv.checkpoint.folder import find_checkpoints

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills with POSIX signals")

STEPS = 40

SCRIPT = """
import asyncio, os, sys
import numpy as np
import aiokv
from aiokv.checkpoint.folder import find_checkpoints

steps, result, until = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def gradients(values, rank, step):
    rng = np.random.default_rng([rank, step])
    return {key: (0.1 * value + rng.normal(size=value.shape)).astype("float32") for key, value in values.items()}

async def wait_for_checkpoint(clock):
    # Rounds may be faster than the writing of a checkpoint, and then others are not begun.
    folder = os.environ["AIOKV_CHECKPOINT_FOLDER"]
    while not any(found.is_complete and found.clock >= clock for found in find_checkpoints(folder)):
        await asyncio.sleep(0.01)

async def main():
    async with aiokv.connect() as kv:
        rng = np.random.default_rng(0)
        values = {"large": rng.normal(size=(200, 200)).astype("float32"), "small": np.ones(5, "float32")}
        await kv.init(values)
        await kv.set_optimizer("adam", learning_rate=0.01)
        start = await kv.resume_step()
        await kv.pull(list(values), out=list(values.values()))
        for step in range(start, steps):
            if start < until and step % 5 == 1 and step > 1:
                await wait_for_checkpoint(step - 1)
            if start < until and step == until + 3:
                await asyncio.Event().wait()  # to be killed
            await kv.pushpull(gradients(values, kv.rank, step), out=values)
        if kv.rank == 0:
            np.savez(result, start=start, **values)

asyncio.run(main())
"""


def command(tmp_path: Path, result: Path, *options: str, until: int = 0, servers: int = 2) -> list[str]:
    """Return the command of a job of two workers, which stand still soon after a step if they begin before it."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    nodes = ["--workers", "2", "--servers", str(servers)]
    job = ["python", str(script), str(STEPS), str(result), str(until)]
    return [sys.executable, "-m", "aiokv", "run", *nodes, *options, "--", *job]


def run_to_the_end(args: Sequence[str]) -> None:
    """Run a job that ends well."""
    done = subprocess.run(args, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def running(args: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a job, and kill all of it that is still there at the end: its processes are not waited for in vain."""
    with subprocess.Popen(args, stdout=DEVNULL, stderr=PIPE) as job:
        try:
            yield job
        finally:
            kill_all(job)


def wait_for(job: subprocess.Popen[bytes], folder: Path, clock: int) -> None:
    """Wait until a job has completed a checkpoint of at least a clock."""
    while not any(found.is_complete and found.clock >= clock for found in find_checkpoints(str(folder))):
        assert job.poll() is None, "the job has ended by itself"
        time.sleep(0.01)


def assert_same(undisturbed: Path, resumed: Path, *, at_least: int) -> None:
    """Compare bits, and look whether the last life of a job began with at least so many steps."""
    with np.load(undisturbed) as expected, np.load(resumed) as got:
        assert got["start"] >= at_least
        for key in ("large", "small"):
            assert got[key].tobytes() == expected[key].tobytes()


def kill_all(job: subprocess.Popen[bytes]) -> None:
    """Kill a job's launcher and all nodes; the launcher first, so that it can't end the others in good order."""
    if job.poll() is not None:
        return
    launcher = psutil.Process(job.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=20)


@pytest.mark.timeout(200)
def test_job_that_is_killed_as_a_whole_ends_with_the_same_bits(tmp_path: Path) -> None:
    undisturbed, resumed = tmp_path / "undisturbed.npz", tmp_path / "resumed.npz"
    run_to_the_end(command(tmp_path, undisturbed))
    folder = tmp_path / "checkpoints"
    options = ("--checkpoint-folder", str(folder), "--checkpoint-every", "5", "--resume")
    for wanted in (5, 20):
        args = command(tmp_path, resumed, *options, until=wanted)
        with running(args) as job:
            wait_for(job, folder, wanted)
    run_to_the_end(command(tmp_path, resumed, *options, servers=3))
    assert_same(undisturbed, resumed, at_least=20)


@pytest.mark.timeout(200)
def test_scenario_14_job_whose_server_is_killed_goes_on_by_itself(tmp_path: Path) -> None:
    undisturbed, resumed = tmp_path / "undisturbed.npz", tmp_path / "resumed.npz"
    run_to_the_end(command(tmp_path, undisturbed))
    folder = tmp_path / "checkpoints"
    options = ("--checkpoint-folder", str(folder), "--checkpoint-every", "5", "--restarts", "1")
    with running(command(tmp_path, resumed, *options, until=10)) as job:
        wait_for(job, folder, 10)
        nodes = psutil.Process(job.pid).children(recursive=True)
        server = next(node for node in nodes if "server" in node.cmdline())
        server.send_signal(signal.SIGKILL)
        _, errors = job.communicate(timeout=100)
    assert job.returncode == 0, errors.decode()
    assert b"starting all nodes again, from the last checkpoint" in errors
    assert_same(undisturbed, resumed, at_least=10)
