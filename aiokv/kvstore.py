"""Stores for ordinary code, by MXNet's names or by names of one's own."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from aiokv.errors import AiokvError, ConfigError, MissingExtraError, OptimizerError, StoreNameError
from aiokv.groups import Group
from aiokv.operations import Operations

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

P = ParamSpec("P")
T = TypeVar("T")

DIST_POLICIES = {"dist": "bsp", "dist_sync": "bsp", "dist_async": "asp"}
"""Name of a store on a cluster -> name of its synchronisation policy."""

ON_DEVICE = {
    "device": "local",
    "dist_sync_device": "dist_sync",
    "dist_device_sync": "dist_sync",
    "dist_async_device": "dist_async",
    "dist_device_async": "dist_async",
}
"""Name of a store that sums a key's arrays on a CUDA device -> the one that is the same but for that."""

Updater = Callable[[Any, Any, Any], object]
"""What makes an update: from the key, what was pushed and the stored value, which it changes in place."""

Factory = Callable[..., Any]


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

    def leave(self, *, timeout: float | None = None) -> None:
        """Leave in good order when all that was pushed counts."""
        self.close(timeout=timeout)

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

    @property
    def dropped(self) -> dict[str, int]:
        """How many contributions of this worker to a key count nowhere, by reason: "late", "stale" or "evicted"."""
        return self._operations.dropped

    @property
    def reconnects(self) -> int:
        """How often a connection to a server has ended and was made again; nothing is lost by that."""
        return self._operations.reconnects

    @property
    def torn_reads(self) -> int:
        """How many calls of this worker have got values of several rounds; see `docs/policies.md`."""
        return self._operations.torn_reads

    @property
    def reads_ahead(self) -> int:
        """How many values this worker's pulls have got that servers had sent ahead of them; see `docs/policies.md`."""
        return self._operations.reads_ahead

    @property
    def uses_devices(self) -> bool:
        """Whether arrays may lie on CUDA devices: `device="cuda"`."""
        return self._operations.uses_devices

    def group(self, ranks: Iterable[int]) -> Group:
        """Return some of the workers, to give them keys and barriers of their own.

        Raises:
            MembershipError: no ranks, or one twice.
        """
        return Group(self, tuple(sorted(ranks)))

    def is_capable(self, name: str) -> bool:
        """Say whether this store can do something. See `aiokv.operations.Operations.is_capable`."""
        return self._operations.is_capable(name)

    def set_updater(self, updater: Updater) -> None:
        """Let a function make the updates: `updater(key, received, stored)` changes the array `stored` in place.

        Only a store in this process can do that, "local" or "device". Keys come as they were given, int or str, and
        arrays have their shapes; `received` is a copy, the sum where there was a list.

        Raises:
            OptimizerError: this store is on a cluster, or has an update rule already.
        """
        del updater
        raise OptimizerError(
            f"a function can't travel to the servers of a {self.type!r} store: make a rule of it and register that, "
            "see aiokv.optim.own",
            expected="local, device",
            got=self.type,
        )

    init = _waiting(Operations.init)
    push = _waiting(Operations.push)
    pull = _waiting(Operations.pull)
    pushpull = _waiting(Operations.pushpull)
    init_rows = _waiting(Operations.init_rows)
    row_sparse_pull = _waiting(Operations.row_sparse_pull)
    wait_for_round = _waiting(Operations.wait_for_round)
    broadcast = _waiting(Operations.broadcast)
    delete = _waiting(Operations.delete)
    barrier = _waiting(Operations.barrier)
    finish = _waiting(Operations.finish)
    set_optimizer = _waiting(Operations.set_optimizer)
    change_optimizer = _waiting(Operations.change_optimizer)
    set_learning_rate = _waiting(Operations.set_learning_rate)
    set_policy = _waiting(Operations.set_policy)
    report_loss = _waiting(Operations.report_loss)
    send_command_to_servers = _waiting(Operations.send_command_to_servers)
    profile_servers = _waiting(Operations.profile_servers)
    set_gradient_compression = _waiting(Operations.set_gradient_compression)
    compression_state = _waiting(Operations.compression_state)
    restore_compression_state = _waiting(Operations.restore_compression_state)
    save = _waiting(Operations.save)
    load = _waiting(Operations.load)
    reseed = _waiting(Operations.reseed)
    save_optimizer_states = _waiting(Operations.save_optimizer_states)
    load_optimizer_states = _waiting(Operations.load_optimizer_states)
    update_counts = _waiting(Operations.update_counts)
    resume_step = _waiting(Operations.resume_step)
    plan_leave = _waiting(Operations.plan_leave)
    members = _waiting(Operations.members)
    tallies = _waiting(Operations.tallies)


def _local(name: str, *, device: str | None = None, **settings: Any) -> KVStore:
    from aiokv.kernels import backend_for  # noqa: PLC0415 - one store needs no network, the other no arithmetic
    from aiokv.local import LocalStore  # noqa: PLC0415

    if device is not None:
        settings.setdefault("backend", backend_for(device).name)
    store = LocalStore(**settings)
    store.type = name
    return store


def _cluster(name: str, *, device: str | None = None, policy: str | None = None, **settings: Any) -> KVStore:
    from aiokv.net import blocking  # noqa: PLC0415

    policy = policy or DIST_POLICIES[ON_DEVICE.get(name, name)]
    client = blocking.connect(policy=policy, device=device or "cpu", **settings)
    client.type = name
    client.start()
    return client


_factories: dict[str, Factory] = {
    name: functools.partial(_local if ON_DEVICE.get(name, name) == "local" else _cluster, name)
    for name in ("local", *DIST_POLICIES, *ON_DEVICE)
}


def register_store(name: str, factory: Factory | None = None, *, replace: bool = False) -> Any:
    """Make a store of one's own known to `create`; a function, or a decorator of the store's class::

        @aiokv.register_store("quiet")
        class Quiet(aiokv.LocalStore):
            ...

    Args:
        name: what it is called; case does not matter.
        factory: a class, or what else makes a store of the settings given to `create`.
        replace: whether it may take the place of another one.

    Raises:
        StoreNameError: the name is no text.
        ConfigError: there is another store of that name.
    """
    if factory is None:
        return functools.partial(register_store, name, replace=replace)
    lower = _lower(name)
    if lower in _factories and not replace:
        raise ConfigError(f"there is a store {lower!r} already; with replace=True this one takes its place", got=lower)
    _factories[lower] = factory
    return factory


def create(name: str = "local", *, device: str | None = None, **settings: Any) -> KVStore:
    """Return a store that is ready for use.

    Args:
        name: "local" or "device" (in this process); "dist_sync" = "dist" or "dist_async" (on the cluster of the
            environment), "dist_sync_device" = "dist_device_sync" or "dist_async_device" = "dist_device_async"; or what
            was registered. Case does not matter.
        device: where arrays that a call gives for one key are summed, "cpu" or "cuda"; that is "cuda" where the name
            has "device" in it. In this process updates are made there too.
        settings: for "local" and "device" the backend; otherwise fields of `Config` that win over the environment, and
            `policy`: the text of another one than "bsp" or "asp", such as "backup:2"; see `docs/policies.md`.

    Raises:
        StoreNameError: the name is no text.
        ConfigError: unknown name, settings that can't work, or no such device.
        MissingExtraError: the packages for the device are not installed.
        JoinTimeoutError: the cluster is not complete in time.
    """
    lower = _lower(name)
    if lower not in _factories:
        known = ", ".join(_factories)
        raise ConfigError(f"unknown store {name!r}; known: {known}", expected=known, got=name)
    if device is None and lower in ON_DEVICE:
        device = "cuda"
        _check_device(lower)
    if device is not None:
        settings["device"] = device
    store: KVStore = _factories[lower](**settings)
    return store


def _lower(name: object) -> str:
    if not isinstance(name, str):
        got = type(name).__name__
        raise StoreNameError(f"the name of a store is a text, got {name!r} of type {got}", expected="str", got=got)
    return name.lower()


def _check_device(name: str) -> None:
    """Say what to do where the name asks for a device that is not here."""
    from aiokv.kernels import backend_for  # noqa: PLC0415

    try:
        backend_for("cuda")
    except (MissingExtraError, ConfigError) as error:
        kind: type[AiokvError] = type(error)
        raise kind(
            f"store {name!r} sums on a CUDA device: {error.message}. It needs the extra aiokv[cuda]: "
            f'pip install "aiokv[cuda]"; to sum on the CPU: aiokv.create({name!r}, device="cpu")',
            **error.details,
        ) from error
