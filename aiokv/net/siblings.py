"""Nodes of servers that run in the process and the loop of another one, and end with it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokv.errors import AiokvError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiokv.net.node import Node
    from aiokv.net.server import Server


class Siblings:
    """The nodes that a node has started beside itself.

    Args:
        owner: the node itself.
        ended: is called with the name of one that is no more.
    """

    def __init__(self, owner: Server, ended: Callable[[str], None]) -> None:
        self._owner = owner
        self._ended = ended
        self._nodes: dict[str, Node] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing: dict[str, None] = {}
        """Those that are being closed already, which must not be interrupted."""

    def __getitem__(self, name: str) -> Node:
        """Return one of them by its name."""
        return self._nodes[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over their names."""
        return iter(self._nodes)

    def start(self, name: str, node: Node) -> None:
        """Start a node; from then on it runs until its work is over, or until all are closed."""
        self._nodes[name] = node
        self._tasks[name] = asyncio.get_running_loop().create_task(self._run(name, node))

    async def _run(self, name: str, node: Node) -> None:
        try:
            await node.start()
            stop = await node.wait_stopped()
            text = f"{name}, in the process of {self._owner.name}, ends: {stop.reason}"
            self._owner.note("info", "", text, {})
        except AiokvError as error:
            text = f"{self._owner.name} could not start {name}: {error}"
            self._owner.note("warning", "standby_not_started", text, error.details)
        finally:
            self._closing[name] = None
            await node.close()
            del self._nodes[name], self._tasks[name], self._closing[name]
        self._ended(name)

    async def close(self) -> None:
        """Close all of them."""
        tasks = dict(self._tasks)
        for name, task in tasks.items():
            if name not in self._closing:
                task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
