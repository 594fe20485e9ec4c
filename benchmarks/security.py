"""What TLS and checksums cost: `aiokv bench` with and without them, in turns.

    python benchmarks/security.py large:64 --repeats 3 --workers 2

Prints GB/s a worker and CPU-seconds per GB of each way, medians, and the ratio of its GB/s to those of plain sockets.
The certificates are made for the run and thrown away.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import trustme


def certificates(folder: Path) -> dict[str, str]:
    """Return the settings of TLS, with files that are made in the folder."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    paths = {kind: folder / f"{kind}.pem" for kind in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(str(paths["ca"]))
    certificate.private_key_pem.write_to_path(str(paths["key"]))
    certificate.cert_chain_pems[0].write_to_path(str(paths["cert"]))
    return {f"AIOKV_TLS_{kind.upper()}": str(path) for kind, path in paths.items()}


def measure(workload: str, workers: int, loop: str, settings: dict[str, str]) -> dict[str, Any]:
    """Return what one run of the benchmark says."""
    command = [sys.executable, "-m", "aiokv", "bench", workload, "-w", str(workers), "--loop", loop, "--json"]
    run = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=True)
    figures: dict[str, Any] = json.loads(run.stdout)
    assert figures["ok"], figures["problems"]
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What TLS and checksums cost.")
    parser.add_argument("workload")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loop", default="auto")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "sockets": {"AIOKV_SHARED_MEMORY": "off"},
            "sockets, crc32c": {"AIOKV_SHARED_MEMORY": "off", "AIOKV_CHECKSUM": "crc32c"},
            "TLS": certificates(Path(folder)),
            "shared memory": {},
            "shared memory, crc32c": {"AIOKV_CHECKSUM": "crc32c"},
        }
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for _ in range(options.repeats):
            for name, settings in ways.items():
                found[name].append(measure(options.workload, options.workers, options.loop, settings))
    rates = {name: [run["gbps_per_worker"] for run in runs] for name, runs in found.items()}
    for name, runs in found.items():
        ratios = [rate / plain for rate, plain in zip(rates[name], rates["sockets"], strict=True)]
        ratio = statistics.median(rates[name]) / statistics.median(rates["sockets"])
        cpu = statistics.median(run["cpu_s_per_gb_total"] for run in runs)
        print(
            f"{name:22} {statistics.median(rates[name]):6.2f} GB/s  {cpu:5.2f} CPU s/GB  "
            f"ratio {ratio:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
