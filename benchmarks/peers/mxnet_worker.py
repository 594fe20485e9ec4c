"""Apache MXNet's KVStore `dist_sync` on loopback: a scheduler, servers and workers. Runs on Python 3.8 and 3.9.

Modes: `together` calls `pushpull` for each key with a falling priority, as MXNet's own Trainer does; `apart` pushes key
by key and then pulls key by key; `list` pushes all keys in one call and pulls them in another.
"""

# ruff: noqa: PLC0415 - in a scheduler and a server the import is what serves, and the driver must not become one

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.cases import MODES

if TYPE_CHECKING:
    import argparse


def drive(options: argparse.Namespace) -> None:
    """Start the cluster, wait for it, and print the result."""
    # The port is free when it is chosen; a run that loses it to another program fails, and says so.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": str(options.servers),
        "DMLC_NUM_WORKER": str(options.workers),
    }
    nodes = []
    for role, count in (("scheduler", 1), ("server", options.servers), ("worker", options.workers)):
        for rank in range(count):
            command = common.node(__file__, options, role, rank)
            nodes.append((f"{role}{rank}", command, {**environ, "DMLC_ROLE": role}))
    printed = common.run_nodes(nodes, timeout=options.timeout)
    records = [record for lines in printed.values() for record in lines]
    common.emit(common.result(options, records[0]["system"], records))


def work(options: argparse.Namespace) -> None:
    """Be a worker."""
    import mxnet as mx

    store = mx.kv.create("dist_sync")
    # MXNet gives the ranks, in the order of arrival.
    options.rank = store.rank
    keys = [str(number) for number in range(len(options.shapes))]
    pushed, pulled = ([mx.ndarray.zeros(shape) for shape in options.shapes] for _ in range(2))
    for number, key in enumerate(keys):
        store.init(key, pushed[number])

    def fill(index: int) -> None:
        for array in pushed:
            array[:] = common.gradient(options.rank, index)
        mx.ndarray.waitall()

    def check(index: int) -> bool:
        wanted = common.expected_sum(options.workers, index)
        return all(bool((array.asnumpy() == wanted).all()) for array in pulled)

    nodes = common.earlier_nodes() if options.rank == 0 else {}
    record = common.timed_rounds(
        options,
        fill=fill,
        work=_round(mx, options.mode, store, keys, pushed, pulled),
        check=check,
        barrier=store._barrier,  # the public interface has none
        others={name: pid for name, pid in nodes.items() if not name.startswith("worker")},
    )
    common.emit({"system": f"mxnet {mx.__version__}", **record})


def _round(mx: Any, mode: str, store: Any, keys: list[str], pushed: list[Any], pulled: list[Any]) -> Any:
    """Return the function that does a round."""

    def together() -> None:
        for number, key in enumerate(keys):
            store.pushpull(key, pushed[number], out=pulled[number], priority=-number)
        mx.ndarray.waitall()

    def apart() -> None:
        for number, key in enumerate(keys):
            store.push(key, pushed[number], priority=-number)
        for number, key in enumerate(keys):
            store.pull(key, out=pulled[number], priority=-number)
        mx.ndarray.waitall()

    def as_list() -> None:
        store.push(keys, pushed)
        store.pull(keys, out=pulled)
        mx.ndarray.waitall()

    return {"together": together, "apart": apart, "list": as_list}[mode]


def main() -> None:
    """Drive, or be the node that `--role` names."""
    options = common.arguments("Measure MXNet's KVStore.", MODES["mxnet"])
    if options.role == "worker":
        work(options)
    elif options.role:
        # In these roles the import serves until the workers are done, and then ends the process.
        import mxnet  # noqa: F401
    else:
        common.drive_or_say_why(drive, options)


if __name__ == "__main__":
    main()
