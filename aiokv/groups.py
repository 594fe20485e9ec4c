"""Some of the workers, with keys and barriers of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiokv.errors import MembershipError

if TYPE_CHECKING:
    from aiokv.arrays import Keys


@dataclass(frozen=True)
class Group:
    """Ranks of a store, for model parallelism and the like. Made by `group` of a client or a store.

    The methods are those of the client or store that it was made by: what waits there waits here, what is awaited there
    is awaited here. A key that a group has initialised is pushed and pulled like any other; its rounds wait for the
    group alone.

    Args:
        store: whose ranks they are.
        ranks: in order, each once.
    """

    store: Any
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if tuple(sorted(set(self.ranks))) != self.ranks or not self.ranks:
            raise MembershipError(f"a group has at least one rank, each once; got {list(self.ranks)}")

    @property
    def num_workers(self) -> int:
        """How many workers the group has."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This worker's place in the group, from 0 on.

        Raises:
            MembershipError: it is not in the group.
        """
        if self.store.rank not in self.ranks:
            raise MembershipError(f"rank {self.store.rank} is none of {list(self.ranks)}", ranks=[self.store.rank])
        return self.ranks.index(self.store.rank)

    def init(self, key: Keys, value: Any = None, *, policy: str | None = None, timeout: float | None = None) -> Any:
        """Create keys of the group. See `aiokv.operations.Operations.init`."""
        return self.store.init(key, value, policy=policy, group=self.ranks, timeout=timeout)

    def barrier(self, name: str = "", *, timeout: float | None = None) -> Any:
        """Wait until every worker of the group is here. See `aiokv.operations.Operations.barrier`."""
        return self.store.barrier(name, group=self.ranks, timeout=timeout)
