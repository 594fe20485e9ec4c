"""`aiokv bench` as its user sees it: real clusters with few and small rounds, their figures, and what goes wrong."""

from __future__ import annotations

import pstats
import sys
from typing import TYPE_CHECKING

import pytest

from aiokv.bench import cluster

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.bench.conftest import Ran


@pytest.mark.parametrize("store", ["dist_sync", "dist_async"])
@pytest.mark.parametrize(
    ("workload", "cluster_options", "nbytes"),
    [
        ("large:5", "--servers 2 --workers 2", 5 << 20),
        ("resnet50", "", 102_228_128),
        ("small", "--workers 2", 1_024_000),
        ("latency:4", "--servers 1 --workers 1", 4),
    ],
)
def test_every_workload_comes_back_right(
    bench: Callable[[str], Ran], workload: str, cluster_options: str, nbytes: int, store: str
) -> None:
    ran = bench(f"{workload} {cluster_options} --store {store} --rounds 3 --warmup 1 --json")
    assert (ran.code, ran.err) == (0, "")
    record = ran.json()
    assert (record["workload"], record["store"], record["rounds"]) == (workload, store, 3)
    assert (record["ok"], record["problems"]) == (True, [])
    assert record["payload_mib"] * 2**20 == nbytes


def test_json_has_figures_of_every_node(bench: Callable[[str], Ran]) -> None:
    record = bench("large:1 --servers 2 --workers 2 --rounds 5 --json").json()
    nodes = ["scheduler", "server-0", "server-1", "worker-0", "worker-1"]
    assert list(record["cpu_s_per_gb"]) == list(record["peak_rss_mib"]) == nodes
    assert all(mib > 5 for mib in record["peak_rss_mib"].values())
    assert list(record["by_worker"]) == ["worker-0", "worker-1"]
    rounds = record["round_s"]
    assert 0 < rounds["min"] <= rounds["median"] <= rounds["p99"]
    assert record["gbps_per_worker"] == pytest.approx(2 * 2**20 / rounds["median"] / 1e9)


def test_optimizer_of_the_servers_is_checked_too(bench: Callable[[str], Ran]) -> None:
    record = bench("small --workers 2 --rounds 4 --optimizer sgd --json").json()
    assert (record["optimizer"], record["ok"]) == ("sgd", True)


def test_loop_chunks_and_backend_reach_the_nodes(bench: Callable[[str], Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; from aiokv.bench import worker; from aiokv.config import load_config; c = load_config();"
        "print(c.loop, c.chunk_bytes, c.backend, file=sys.stderr); sys.exit(9)"
    )
    monkeypatch.setattr(cluster, "worker_command", lambda: [sys.executable, "-c", code])
    ran = bench("large:1 --loop asyncio --chunk-kib 64 --backend reference")
    assert "worker-0 | asyncio 65536 reference\n" in ran.err


def test_table_ends_with_a_verdict(bench: Callable[[str], Ran]) -> None:
    ran = bench("latency:64 --rounds 20 --warmup 0")
    assert (ran.code, ran.err) == (0, "")
    assert "latency:64: 1 worker, 1 server, dist_sync, 20 rounds" in ran.out
    assert ran.out.endswith("; every number is right\n")


WRONG = """
import sys
from aiokv.bench import worker
from aiokv.net.worker import Client

exchange = Client.pushpull

async def spoil(self, key, value=None, *, out=None, timeout=None):
    result = await exchange(self, key, value, out=out, timeout=timeout)
    if self.rank == 1:
        out["large"][1000] += 1
    return result

Client.pushpull = spoil
worker.main(sys.argv[1:])
"""


def test_wrong_number_is_found_and_makes_the_exit_code_1(
    bench: Callable[[str], Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "worker_command", lambda: [sys.executable, "-c", WRONG])
    ran = bench("large:0.1 --workers 2 --rounds 2 --warmup 0 --json")
    assert ran.code == 1
    record = ran.json()
    assert record["ok"] is False
    # Twice 1000, and the terms 0 and 1 of round 0.
    assert record["problems"][0] == "worker-1: round 0: element 1000 is 2002, expected 2001, the sum of all workers"
    assert record["problems"][-1] == "the workers did not receive the same values in the last round"
    assert ran.err.startswith("error: wrong numbers: worker-1: round 0:")


def test_worker_that_fails_is_quoted(bench: Callable[[str], Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; print('ValueError: no memory', file=sys.stderr); sys.exit(7)"
    monkeypatch.setattr(cluster, "worker_command", lambda: [sys.executable, "-S", "-c", code])
    ran = bench("large:1 --json")
    assert (ran.code, ran.out) == (7, "")
    assert ran.err == (
        "worker-0 | ValueError: no memory\n"
        "error: worker-0 exited with code 7; its last line on stderr: ValueError: no memory\n"
    )


def test_measurement_that_takes_too_long_is_ended(bench: Callable[[str], Ran]) -> None:
    ran = bench("large:1 --rounds 1000000 --timeout 1")
    assert ran.code == 124
    assert "error: the job did not end within 1 s; still running: scheduler, server-0, worker-0" in ran.err


def test_profile_of_every_node_is_written(bench: Callable[[str], Ran], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "profiles"
    assert bench(f"latency:4 --rounds 5 --profile {folder}").code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["scheduler.pstats", "server-0.pstats", "worker-0.pstats"]
    assert pstats.Stats(str(folder / "worker-0.pstats")).total_calls > 1000  # type: ignore[attr-defined]


def test_profile_needs_a_folder(bench: Callable[[str], Ran], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    ran = bench(f"latency:4 --profile {tmp_path / 'file'}")
    assert (ran.code, ran.err) == (
        1,
        f"error: cannot make the directory '{tmp_path / 'file'}' for the profiles: File exists\n",
    )


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        ("", 2, "Missing argument 'WORKLOAD'"),
        ("huge:1", 1, "error: unknown workload 'huge:1'; known: large:MIB, resnet50, small, latency:BYTES, limits"),
        ("large:1 --store local", 1, "error: unknown store 'local'; known: dist, dist_sync, dist_async"),
        ("large:1 --policy magic", 1, "error: unknown policy 'magic'; known: "),
        ("large:1 --optimizer magic", 1, "error: unknown optimizer 'magic'; known: "),
        ("large:1 --loop magic", 1, "error: loop must be one of auto, uvloop, asyncio, got 'magic'"),
        ("large:1 --chunk-kib 3", 1, "error: chunk_bytes must be a multiple of 64 from 4096"),
        ("large:1 --rounds 0", 2, "Invalid value for '--rounds'"),
        ("large:1 --workers 0", 2, "Invalid value for '-w' / '--workers'"),
        ("limits:x", 1, "error: 'limits:x' needs a number of MiB"),
        ("kernels:x", 1, "error: 'kernels:x' needs a number of MiB"),
        ("kernels --workers 2", 2, "kernels starts no cluster, so these options mean nothing to it: --workers"),
    ],
)
def test_mistake_is_reported_before_anything_starts(
    bench: Callable[[str], Ran], arguments: str, code: int, complaint: str
) -> None:
    ran = bench(arguments)
    assert (ran.code, ran.out) == (code, "")
    assert complaint in ran.err


def test_help_names_the_workloads_and_fits_a_terminal(bench: Callable[[str], Ran]) -> None:
    text = bench("--help").out
    for name in ("large:MIB", "resnet50", "small", "latency:BYTES", "limits", "kernels"):
        assert f"    {name}" in text
    assert max(map(len, text.splitlines())) <= 80
