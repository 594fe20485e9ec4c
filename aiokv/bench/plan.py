"""What a benchmark shall measure, and what its parent process and its workers say to each other."""

from __future__ import annotations

import msgspec

from aiokv.bench.checks import OPTIMIZERS
from aiokv.bench.workloads import parse_workload
from aiokv.errors import ConfigError
from aiokv.kvstore import DIST_POLICIES
from aiokv.optim import make_optimizer
from aiokv.policy import get_policy


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. It reaches the workers as JSON, as their argument."""

    workload: str
    servers: int
    workers: int
    rounds: int
    warmup: int
    store: str
    policy: str
    optimizer: str | None
    shows_progress: bool = False
    colocate: bool = False
    replication: int = 1


def make_plan(
    workload: str,
    *,
    servers: int,
    workers: int,
    rounds: int | None = None,
    warmup: int | None = None,
    store: str | None = None,
    policy: str | None = None,
    optimizer: str | None = None,
    colocate: bool = False,
    replication: int = 1,
) -> Plan:
    """Check everything that can be wrong before a process is started; fill in what is not given.

    Args:
        workload: as `parse_workload` reads it.
        servers: number of servers.
        workers: number of workers.
        rounds: number of timed rounds; the workload's own when not given.
        warmup: number of rounds before these; the workload's own when not given.
        store: a store on a cluster by MXNet's name; "dist_sync" when not given.
        policy: another one than the store's. One whose rounds are decided for all keys at once is taken for one of all
            workers, and the values are checked as such.
        optimizer: name of the servers' update rule; they keep the sums when not given.
        colocate: each worker also hosts a server, so there are as many of them.
        replication: on how many servers every parameter is.

    Raises:
        ConfigError: unknown workload or store.
        PolicyError: unknown policy, or wrong options.
        OptimizerError: unknown rule.
    """
    store = store or "dist_sync"
    usual = parse_workload(workload)
    if store not in DIST_POLICIES:
        known = ", ".join(DIST_POLICIES)
        raise ConfigError(f"unknown store {store!r}; known: {known}", expected=known, got=store)
    if optimizer is not None:
        make_optimizer(optimizer, OPTIMIZERS.get(optimizer, {}))
    return Plan(
        workload=workload,
        servers=workers if colocate else servers,
        workers=workers,
        colocate=colocate,
        replication=replication,
        rounds=usual.rounds if rounds is None else rounds,
        warmup=usual.warmup if warmup is None else warmup,
        store=store,
        policy=str(get_policy(policy or DIST_POLICIES[store])),
        optimizer=optimizer,
    )


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A worker has warmed up, and starts when it reads a line."""

    token: str
    name: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """So many rounds are done."""

    rounds: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """What a worker found; it leaves the cluster when it reads a line."""

    rank: int
    round_s: list[float]
    """Seconds of each round, nothing but the call."""
    cpu_s: float
    """CPU-seconds of the worker during these."""
    digest: int
    """Checksum of the last values."""
    problems: list[str]


Message = Ready | Progress | Done

MAX_LINE = 1 << 26
"""Bytes; a line has about 20 for each round."""

_decoder = msgspec.json.Decoder(Message)


def encode(message: Message | Plan) -> bytes:
    """Write a message as one line of JSON, without its end."""
    return msgspec.json.encode(message)


def decode(line: bytes) -> Message:
    """Read a message.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _decoder.decode(line)
