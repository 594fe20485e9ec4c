"""What the scheduler knows of a node that has registered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiokv.core.effects import Refuse, Send
    from aiokv.types import Incarnation, Peer, Role


@dataclass(slots=True, eq=False)
class Member:
    """A node that has registered. `state` is as in a view."""

    peer: Peer
    request: int
    """Under which number it has asked, over its connection, to be let in; 0: it has not."""
    role: Role
    name: str
    incarnation: Incarnation
    host: str
    port: int
    heard: float
    state: str = "alive"
    reason: str = ""
    number: int = -1
    """Rank of a worker, index of a server; given when the cluster is complete. A server without one has no index."""
    connected: bool = True
    since: int = 0
    """The clock after which a worker counts in rounds; 0: from the beginning, or that is not known yet."""
    until: int = 0
    """The clock up to which a worker counts in rounds that is about to leave; 0: it stays, or that is not known yet."""
    answered: dict[int, Send | Refuse] = field(default_factory=dict)
    """The last answers to what it has asked, which may have got lost with its connection."""

    @property
    def is_here(self) -> bool:
        """Whether the node is there, as far as is known."""
        return self.state in {"alive", "finished", "joining"}

    @property
    def is_expected(self) -> bool:
        """Whether the node is connected, or another process may take its place."""
        return self.is_here or self.state == "away"

    @property
    def facts(self) -> dict[str, Any]:
        """What an event about it says, for programs."""
        return {"node": self.name, "role": str(self.role), "number": self.number}
