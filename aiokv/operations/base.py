"""What all calls of a worker need of who carries them out, and what it says about itself."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiokv.errors import ConfigError
from aiokv.groups import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aiokv.arrays import Arguments, Array
    from aiokv.core import stimuli as st
    from aiokv.core.worker.session import Session
    from aiokv.list_sums import Merger

T = TypeVar("T")

CAPABILITIES = {"optimizer": True}
"""What a store may be asked about -> whether all stores of this package can do it."""

SLOW: Final = 1 << 30
"""Stands for the bytes of a computation that takes seconds."""


class BaseOperations(ABC):
    """A worker, as the calls of `Operations` see it."""

    _session: Session
    _merger: Merger
    """Sums the arrays that a call gives for one key."""

    _most_bytes = sys.maxsize
    """How long a message can be."""

    _checkpoint_folder = ""
    """Where files have to be that are saved and loaded; empty: anywhere."""

    @abstractmethod
    async def _call(self, make: Callable[[int], st.Stimulus], arguments: Arguments | None = None) -> Any:
        """Give a call to the session, under a number, and return its result when it is over."""

    @abstractmethod
    def _seconds(self, timeout: float | None) -> float:
        """Return how long a call may take."""

    @abstractmethod
    def note(self, level: str, event: str, text: str, facts: dict[str, Any]) -> None:
        """Write a line for the operator, and count it. See `aiokv.telemetry.take_note`."""

    async def _compute(self, function: Callable[[], T], nbytes: int) -> T:
        """Return what a function over so many bytes returns; carriers with an event loop do not let it wait."""
        del nbytes
        return function()

    async def _use(self, function: Callable[[], T], nbytes: int) -> T:
        """As `_compute`, for what reads or writes the caller's arrays: it has ended when this has, cancelled or not."""
        return await self._compute(function, nbytes)

    async def _prepare(self, function: Callable[[], T], nbytes: int) -> T:
        """Compute what a call sends: as `_use`, but of two calls the one that began first goes first."""
        return await self._use(function, nbytes)

    def _reuse(self, arrays: list[Array]) -> None:
        """Take note that the memory is free in which values had come ahead of a call."""
        del arrays

    # --- who we are ---

    @property
    def rank(self) -> int:
        """This worker's rank, 0 <= rank < num_workers."""
        return self._session.rank

    @property
    def num_workers(self) -> int:
        """How many workers the cluster was declared with."""
        return self._session.num_workers

    @property
    def num_dead_nodes(self) -> int:
        """How many workers and servers are lost, as far as this worker knows."""
        return self._session.num_lost

    @property
    def dropped(self) -> dict[str, int]:
        """How many contributions of this worker to a key count nowhere, by reason: "late", "stale" or "evicted"."""
        return self._session.dropped

    @property
    def reconnects(self) -> int:
        """How often a connection to a server has ended and was made again; nothing is lost by that."""
        return self._session.reconnects

    @property
    def torn_reads(self) -> int:
        """How many calls of this worker have got values of several rounds; see `docs/policies.md`."""
        return self._session.torn_reads

    @property
    def reads_ahead(self) -> int:
        """How many values this worker's pulls have got that servers had sent ahead of them; see `docs/policies.md`."""
        return self._session.reads_ahead

    @property
    def uses_devices(self) -> bool:
        """Whether arrays may lie on CUDA devices: `device="cuda"`."""
        return bool(self._merger.devices)

    def group(self, ranks: Iterable[int]) -> Group:
        """Return some of the workers, to give them keys and barriers of their own.

        Raises:
            MembershipError: no ranks, or one twice.
        """
        return Group(self, tuple(sorted(ranks)))

    def is_capable(self, name: str) -> bool:
        """Say whether this store can do something; "optimizer": update by a rule.

        Raises:
            ConfigError: there is no such capability.
        """
        if name not in CAPABILITIES:
            known = ", ".join(CAPABILITIES)
            raise ConfigError(f"unknown capability {name!r}; known: {known}", expected=known, got=repr(name))
        return CAPABILITIES[name]
