"""Stores by MXNet's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from aiokv.arrays import Keys

DIST_POLICIES = {"dist": "bsp", "dist_sync": "bsp", "dist_async": "asp"}
"""Name of a store on a cluster -> name of its synchronisation policy."""


class KVStore(Protocol):
    """What every store for ordinary code can do. See `aiokv.Client` for the meaning of each method."""

    type: str

    def __enter__(self) -> Self:
        """Return the store."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave; after an error the others see this worker as lost."""

    @property
    def rank(self) -> int:
        """This worker's rank."""

    @property
    def num_workers(self) -> int:
        """How many workers there are."""

    def init(self, key: Keys, value: Any = None, *, timeout: float | None = None) -> None:
        """Create keys."""

    def push(self, key: Keys, value: Any = None, *, priority: int = 0, timeout: float | None = None) -> None:
        """Contribute to the keys' next update."""

    def pull(self, key: Keys, out: Any = None, *, priority: int = 0, timeout: float | None = None) -> Any:
        """Read the keys."""

    def pushpull(
        self, key: Keys, value: Any = None, *, out: Any = None, priority: int = 0, timeout: float | None = None
    ) -> Any:
        """Push and receive the new values."""

    def barrier(self, name: str = "", *, timeout: float | None = None) -> None:
        """Wait until every worker is here."""

    def set_optimizer(self, name: str, *, timeout: float | None = None, **params: bool | int | float | str) -> None:
        """Set the update rule."""

    def close(self, *, timeout: float | None = None) -> None:
        """Leave."""


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
