"""PyTorch's gloo all-reduce between workers on loopback; there are no servers, `--servers` is not used.

An all-reduce gives every worker the sum, as a push and a pull do, and its bytes are counted as if it had been one.
Modes: `each` reduces tensor by tensor, `async` starts all and waits then, `flat` copies them into one tensor and back.
"""

# ruff: noqa: PLC0415 - only the workers need torch, which takes its time

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.cases import MODES

if TYPE_CHECKING:
    import argparse


def drive(options: argparse.Namespace) -> None:
    """Start the workers, wait for them, and print the result."""
    with tempfile.TemporaryDirectory() as folder:
        nodes = [
            (
                f"worker{rank}",
                common.node(__file__, options, "worker", rank, meet=f"file://{folder}/meet"),
                {"GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(options.workers)
        ]
        printed = common.run_nodes(nodes, timeout=options.timeout)
    records = [record for lines in printed.values() for record in lines]
    options.servers = 0
    common.emit(common.result(options, records[0]["system"], records))


def work(options: argparse.Namespace) -> None:
    """Be a worker."""
    import torch
    import torch.distributed as dist

    # One thread for the arithmetic, as each worker has about one core.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=options.meet, rank=options.rank, world_size=options.workers)
    tensors = [torch.zeros(shape) for shape in options.shapes]

    def fill(index: int) -> None:
        for tensor in tensors:
            tensor.fill_(common.gradient(options.rank, index))

    def check(index: int) -> bool:
        wanted = common.expected_sum(options.workers, index)
        return all(bool((tensor == wanted).all()) for tensor in tensors)

    record = common.timed_rounds(
        options, fill=fill, work=_round(options.mode, tensors), check=check, barrier=dist.barrier
    )
    common.emit({"system": f"gloo (torch {torch.__version__})", **record})
    dist.destroy_process_group()


def _round(mode: str, tensors: list[Any]) -> Any:
    """Return the function that does a round."""
    import torch
    import torch.distributed as dist

    whole = torch.zeros(sum(tensor.numel() for tensor in tensors) if mode == "flat" else 0)

    def each() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    def at_once() -> None:
        for handle in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            handle.wait()

    def flat() -> None:
        torch.cat([tensor.view(-1) for tensor in tensors], out=whole)
        dist.all_reduce(whole)
        for tensor, piece in zip(tensors, whole.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view_as(tensor))

    return {"each": each, "async": at_once, "flat": flat}[mode]


def main() -> None:
    """Drive, or be the worker that `--role` names."""
    options = common.arguments("Measure gloo's all-reduce.", MODES["gloo"])
    if options.role == "worker":
        work(options)
    else:
        common.drive_or_say_why(drive, options)


if __name__ == "__main__":
    main()
