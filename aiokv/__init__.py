"""A parameter server for Python: workers push gradients and pull weights over TCP, servers sum them and update.

    async with aiokv.connect() as kv:
        await kv.init({"w": w})
        await kv.pushpull({"w": gradient}, out={"w": w})

`aiokv.blocking.connect()` is the same for ordinary code, `aiokv.create(name)` makes a store by MXNet's names,
`aiokv.Trainer` is what a training loop uses, and `aiokv.Scheduler` and `aiokv.Server` are the other nodes of a cluster.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aiokv.errors import AiokvError

if TYPE_CHECKING:
    from aiokv.config import Config, load_config
    from aiokv.data import split_and_load
    from aiokv.kvstore import KVStore, create, register_store
    from aiokv.local import LocalStore
    from aiokv.net import blocking
    from aiokv.net.scheduler import Scheduler
    from aiokv.net.server import Server
    from aiokv.net.worker import Client, connect
    from aiokv.sparse import RowSparse
    from aiokv.trainer import Trainer
    from aiokv.training.averaging import ElasticAveraging, LocalSGD
    from aiokv.training.balancer import BatchBalancer

__version__ = "0.1.0"

__all__ = [
    "AiokvError",
    "BatchBalancer",
    "Client",
    "Config",
    "ElasticAveraging",
    "KVStore",
    "LocalSGD",
    "LocalStore",
    "RowSparse",
    "Scheduler",
    "Server",
    "Trainer",
    "__version__",
    "blocking",
    "connect",
    "create",
    "load_config",
    "register_store",
    "split_and_load",
]

# Loaded when they are used: a program that only wants `create("local")` should not pay for the network.
_HOMES = {
    "BatchBalancer": "aiokv.training.balancer",
    "Client": "aiokv.net.worker",
    "Config": "aiokv.config",
    "ElasticAveraging": "aiokv.training.averaging",
    "KVStore": "aiokv.kvstore",
    "LocalSGD": "aiokv.training.averaging",
    "LocalStore": "aiokv.local",
    "RowSparse": "aiokv.sparse",
    "Scheduler": "aiokv.net.scheduler",
    "Server": "aiokv.net.server",
    "Trainer": "aiokv.trainer",
    "blocking": "aiokv.net",
    "connect": "aiokv.net.worker",
    "create": "aiokv.kvstore",
    "load_config": "aiokv.config",
    "register_store": "aiokv.kvstore",
    "split_and_load": "aiokv.data",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'aiokv' has no attribute {name!r}")
    if name == "blocking":
        value: Any = importlib.import_module("aiokv.net.blocking")
    else:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
