"""Where the update of a training step is made: the decision of the trainer, by MXNet's rules."""

from __future__ import annotations

import enum

from aiokv.errors import ConfigError
from aiokv.kvstore import DIST_POLICIES

LARGE = 16 << 20
"""Elements; with a larger parameter, the update of a store in this process is made by the worker."""


class Place(enum.Enum):
    """Where the update is made."""

    ALONE = "in this process; nothing is exchanged"
    WORKERS = "on every worker, with the sum of all gradients"
    SERVERS = "on the servers"


def place_of_update(
    store: str | None, wanted: bool | None, *, by_name: bool = True, devices: int = 1, largest: int = 0
) -> Place:
    """Decide where the update is made. The rules are those of MXNet's Trainer.

    Args:
        store: the type of the store, such as "dist_sync"; None for none.
        wanted: True for the servers, False for the workers, None for what is best.
        by_name: the store was asked for by its name, so it can be done without.
        devices: how many replicas of each parameter there are.
        largest: elements of the largest parameter.

    Raises:
        ConfigError: the update can't be made where it is wanted.
    """
    is_local = store == "local" and by_name
    if store is None or (is_local and devices == 1 and not wanted):
        if wanted:
            raise ConfigError("update_on_kvstore is True, but there is no store: name one, such as 'dist_sync'")
        return Place.ALONE
    if is_async(store):
        if wanted is False:
            raise ConfigError(
                f"with store {store!r} updates are made on the servers: no worker waits for the gradients of the "
                "others. Leave update_on_kvstore out, or use 'dist_sync'",
                key="update_on_kvstore",
                expected=True,
                got=False,
            )
        return Place.SERVERS
    if wanted is None:
        wanted = not (is_local and largest > LARGE)
    return Place.SERVERS if wanted else Place.WORKERS


def is_async(store: str) -> bool:
    """Say whether a store of this type makes an update of every push."""
    return DIST_POLICIES.get(store, store) == "asp"
