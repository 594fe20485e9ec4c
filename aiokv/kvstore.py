"""Stores for ordinary code, by MXNet's names."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from aiokv.errors import ConfigError
from aiokv.groups import Group
from aiokv.operations import Operations

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

P = ParamSpec("P")
T = TypeVar("T")

DIST_POLICIES = {"dist": "bsp", "dist_sync": "bsp", "dist_async": "asp"}
"""Name of a store on a cluster -> name of its synchronisation policy."""


def _waiting(
    operation: Callable[Concatenate[Operations, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[KVStore, P], T]:
    """Make a method that waits for the end of an operation."""

    @functools.wraps(operation)
    def method(self: KVStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(operation(self._operations, *args, **kwargs))

    return method


class KVStore(ABC):
    """What every store for ordinary code can do: the calls of `aiokv.operations.Operations`, each of which waits."""

    type: str
    """The store's name, such as "dist_sync"."""

    @property
    @abstractmethod
    def _operations(self) -> Operations:
        """Who makes the calls."""

    @abstractmethod
    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a call's end and return its result."""

    @abstractmethod
    def close(self, *, timeout: float | None = None) -> None:
        """Leave in good order. Can be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    @property
    def rank(self) -> int:
        """This worker's rank, 0 <= rank < num_workers."""
        return self._operations.rank

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self._operations.num_workers

    @property
    def num_dead_nodes(self) -> int:
        """How many workers and servers are lost, as far as this worker knows."""
        return self._operations.num_dead_nodes

    def group(self, ranks: Iterable[int]) -> Group:
        """Return some of the workers, to give them keys and barriers of their own.

        Raises:
            MembershipError: no ranks, or one twice.
        """
        return Group(self, tuple(sorted(ranks)))

    init = _waiting(Operations.init)
    push = _waiting(Operations.push)
    pull = _waiting(Operations.pull)
    pushpull = _waiting(Operations.pushpull)
    init_rows = _waiting(Operations.init_rows)
    row_sparse_pull = _waiting(Operations.row_sparse_pull)
    broadcast = _waiting(Operations.broadcast)
    delete = _waiting(Operations.delete)
    barrier = _waiting(Operations.barrier)
    finish = _waiting(Operations.finish)
    set_optimizer = _waiting(Operations.set_optimizer)
    change_optimizer = _waiting(Operations.change_optimizer)
    set_learning_rate = _waiting(Operations.set_learning_rate)


def create(name: str = "local", **settings: Any) -> KVStore:
    """Return a store that is ready for use.

    Args:
        name: "local" (in this process), "dist_sync" = "dist" or "dist_async" (on the cluster of the environment).
        settings: for `local` the backend; otherwise fields of `Config` that win over the environment.

    Raises:
        ConfigError: unknown name, or settings that can't work.
        JoinTimeoutError: the cluster is not complete in time.
    """
    if name == "local":
        from aiokv.local import LocalStore  # noqa: PLC0415 - one needs no network, the other no store

        return LocalStore(**settings)
    if name in DIST_POLICIES:
        from aiokv.net import blocking  # noqa: PLC0415

        client = blocking.connect(policy=DIST_POLICIES[name], **settings)
        client.type = name
        client.start()
        return client
    known = ", ".join(["local", *DIST_POLICIES])
    raise ConfigError(f"unknown store {name!r}; known: {known}", expected=known, got=name)
