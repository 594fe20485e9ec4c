"""How transfers share network cards: max-min fairly, or one after the other. A card has two directions, each a port."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.clock import Clock

Port = tuple[str, str]
"""A node's name and "out" or "in"."""

ROUNDING: Final = 1e-9
"""What arithmetic with times and rates may be off, as a share."""


class Fabric(Protocol):
    """What carries transfers from card to card."""

    carried: dict[Port, float]
    """Bytes that have gone through a port."""

    def start(self, source: str, target: str, nbytes: int, limit: float, done: Callable[[], None]) -> None:
        """Begin a transfer.

        Args:
            source: the node that sends.
            target: the node that receives.
            nbytes: how much.
            limit: bytes a second that the transfer gets at most.
            done: is called when the last byte has left.
        """
        ...


@dataclass(slots=True, eq=False)
class Flow:
    """A transfer that is going on."""

    ports: tuple[Port, Port]
    left: float
    limit: float
    done: Callable[[], None]
    nbytes: int
    rate: float = 0.0


def fair_rates(flows: list[Flow], capacity: Callable[[Port], float]) -> None:
    """Give each flow its max-min fair rate: nobody can get more without taking from one who has less.

    Progressive filling (Bertsekas and Gallager 1992, "Data Networks", 6.5.2): the port that has least for each of its
    flows decides about them, then the next one.
    """
    room: dict[Port, float] = {}
    waiting: dict[Port, int] = {}
    for flow in flows:
        for port in flow.ports:
            room.setdefault(port, capacity(port))
            waiting[port] = waiting.get(port, 0) + 1
    left = flows
    while left:
        shares = [room[port] / count for port, count in waiting.items() if count]
        share = min(*shares, *(flow.limit for flow in left))
        full = {port for port, count in waiting.items() if count and room[port] / count <= share * (1.0 + ROUNDING)}
        fixed = [flow for flow in left if flow.limit <= share or not full.isdisjoint(flow.ports)]
        for flow in fixed:
            flow.rate = share
            for port in flow.ports:
                room[port] = max(0.0, room[port] - share)
                waiting[port] -= 1
        left = [flow for flow in left if not (flow.limit <= share or not full.isdisjoint(flow.ports))]


class FairFabric:
    """All transfers go on at once and share the ports max-min fairly.

    Args:
        env: the simulated time.
        capacity: bytes a second of a port.
    """

    def __init__(self, env: Clock, capacity: Callable[[Port], float]) -> None:
        self.carried: dict[Port, float] = {}
        self._env = env
        self._capacity = capacity
        self._flows: list[Flow] = []
        self._at = 0.0
        self._plan = 0
        self._solving = False

    def start(self, source: str, target: str, nbytes: int, limit: float, done: Callable[[], None]) -> None:
        """Begin a transfer; the rates change when all that happens at this time has happened."""
        self._advance()
        flow = Flow(((source, "out"), (target, "in")), float(nbytes), limit, done, nbytes)
        self._flows.append(flow)
        self._solve_soon()

    def _solve_soon(self) -> None:
        if not self._solving:
            self._solving = True
            self._env.after(0.0, self._solve)

    def _advance(self) -> None:
        now = self._env.now
        if now > self._at:
            for flow in self._flows:
                flow.left -= flow.rate * (now - self._at)
        self._at = now

    def _solve(self) -> None:
        self._solving = False
        self._advance()
        fair_rates(self._flows, self._capacity)
        self._plan += 1
        if self._flows:
            soonest = min(max(0.0, flow.left) / flow.rate for flow in self._flows)
            # Decided here: a rest that rounding leaves could be too small for time to go on.
            over = [flow for flow in self._flows if flow.left / flow.rate <= soonest * (1.0 + ROUNDING)]
            self._env.after(soonest, self._finish, (self._plan, over))

    def _finish(self, plan: int, over: list[Flow]) -> None:
        if plan != self._plan:
            # The rates have changed since.
            return
        self._advance()
        self._flows = [flow for flow in self._flows if flow not in over]
        self._solve_soon()
        for flow in over:
            for port in flow.ports:
                self.carried[port] = self.carried.get(port, 0.0) + flow.nbytes
            flow.done()


class FifoFabric:
    """A port carries one transfer after the other, each at full speed, in the order in which they were asked for.

    A transfer waits until both of its ports are free for it, and keeps its place at both.

    Args:
        env: the simulated time.
        capacity: bytes a second of a port.
    """

    def __init__(self, env: Clock, capacity: Callable[[Port], float]) -> None:
        self.carried: dict[Port, float] = {}
        self._env = env
        self._capacity = capacity
        self._free: dict[Port, float] = {}

    def start(self, source: str, target: str, nbytes: int, limit: float, done: Callable[[], None]) -> None:
        """Begin a transfer as soon as both ports are free."""
        ports: tuple[Port, Port] = ((source, "out"), (target, "in"))
        rate = min(limit, *(self._capacity(port) for port in ports))
        begin = max(self._env.now, *(self._free.get(port, 0.0) for port in ports))
        end = begin + nbytes / rate
        for port in ports:
            self._free[port] = end

        def over() -> None:
            for port in ports:
                self.carried[port] = self.carried.get(port, 0.0) + nbytes
            done()

        self._env.after(end - self._env.now, over)
