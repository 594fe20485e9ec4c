"""A server's memory in simulated time: whose gradients lie in it, when its arithmetic is done, and what it has made."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from aiokv.core import effects as fx
from aiokv.core import stimuli as st
from aiokv.core.server.copies.followed_calls import push_in
from aiokv.wire import messages as m
from sim.ledger import Ledger
from sim.record import DivideRecord, UpdateRecord
from sim.tokens import kept

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.server.coordinator import Coordinator
    from aiokv.types import Key, Slot
    from sim.node import Node
    from sim.saving import States
    from sim.tokens import Token
    from sim.world import World

_COPIES: Final = (m.Replicate, m.Copy)
LANDING: Final = frozenset((m.Push, m.PushBundle, *_COPIES, m.CopyPush, m.CopyContribution, m.Init, m.InitBundle))
"""Messages whose payload gets a slot."""


def nbytes_of(payload: fx.Payload | None, states: States) -> int:
    """Return how long a payload is."""
    match payload:
        case fx.CallMemory():
            return payload.stop - payload.start
        case (
            fx.StoredChunk() | fx.CallTensors() | fx.StoredRows() | fx.StoredSum() | fx.StoredSlots() | fx.StoredCopy()
        ):
            return payload.nbytes
        case fx.StoredChunks(chunks):
            return sum(chunk.nbytes for chunk in chunks)
        case fx.StoredState():
            return states.nbytes(payload)
        case None | fx.EncodedParts() | fx.StoredDifference():
            # Nothing is compressed in a simulation.
            return 0


class Store:
    """What a server has, without the values. A worker has one too, in which nothing ever lies.

    Args:
        world: what all nodes share.
        node: the server.
    """

    __slots__ = ("_free_at", "_held", "_node", "_waited", "_world", "applying", "ledger", "takes_time")

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node
        self._free_at = 0.0
        """When it has nothing to compute any longer."""
        self.takes_time = world.service.takes_time
        """Whether its arithmetic takes any time."""
        self._waited = False
        """Whether the server has a standby for which answers wait."""
        self._held: deque[Callable[[], None]] = deque()
        """What sends answers that wait until the standby has what they say."""
        self.ledger = Ledger()
        self.applying: dict[tuple[Key, int], list[Token]] = {}
        """The gradients of updates that are being made."""

    @property
    def in_flight(self) -> list[Token]:
        """Gradients that have arrived and are in no update yet."""
        return self.ledger.remaining + [token for tokens in self.applying.values() for token in tokens]

    # --- slots ---

    def land(self, sender: str, message: m.Message, nbytes: int) -> Slot | None:
        """Give a payload a place, unless there is none."""
        token: Token | None
        if type(message) is m.Push or type(message) is m.PushBundle:
            token = (sender, message.sequence)
        elif isinstance(message, _COPIES):
            place = (message.key if isinstance(message, m.Replicate) else message.keys[0], message.start)
            self._world.standing.arrived(place, message.version, self._world.env.now)
            # What a primary sends is in its own ledger.
            token = None
        elif isinstance(message, m.CopyPush | m.CopyContribution):
            [worker] = [worker.name for worker in self._world.run.workers if worker.rank == message.rank]
            sequence = push_in(message).sequence if isinstance(message, m.CopyPush) else message.sequence
            token = (worker, sequence)
        else:
            token = (sender, 0)
        if not nbytes:
            return None
        if self.takes_time:
            self._work(self._world.service.receive(nbytes))
        return self.ledger.land(token)

    def combine(self, effect: fx.Combine) -> None:
        """Sum what lies in several slots."""
        for source in effect.sources:
            self.fold(effect.target, source)

    def fold(self, target: Slot, source: Slot) -> None:
        """Add what lies in one slot to another."""
        self.ledger.fold(target, source)
        if self.takes_time:
            self.compute()

    def compute(self) -> float:
        """Do a pass over a chunk, and return when it is done."""
        return self._work(self._world.service.fold())

    def _work(self, duration: float) -> float:
        """Give it something to compute, after all that it has to compute already; return when it is done."""
        begin, paces = max(self._world.env.now, self._free_at), self._world.timeline.paces
        # A standby is on the machine of the server in whose process it is.
        pace = paces.get(self._node.name.partition("/")[0]) if paces else None
        self._free_at = begin + duration if pace is None else pace.finish(begin, duration)[0]
        return self._free_at

    # --- updates ---

    def apply(self, effect: fx.Apply) -> None:
        """Make a version, and tell the state machine when it is made."""
        env, node, tokens = self._world.env, self._node, self.ledger.take(effect.slot)
        if self._waited and not node.holds_copy:
            self._world.standing.make(self._update(effect, tokens), waits=True)
        if not self.takes_time and self._free_at <= env.now and not node.is_paused:
            self._made(effect, tokens)
            return
        self.applying[effect.key, effect.start] = tokens
        done = self._work(self._world.service.apply())
        if done > env.now:
            env.after(done - env.now, self._applied, (effect, tokens))
        else:
            self._applied(effect, tokens)

    def _applied(self, effect: fx.Apply, tokens: list[Token]) -> None:
        if not self._node.alive:
            return
        if self._node.is_paused:
            self._node.afterwards(lambda: self._applied(effect, tokens))
            return
        del self.applying[effect.key, effect.start]
        self._made(effect, tokens)

    def _made(self, effect: fx.Apply, tokens: list[Token]) -> None:
        if not self._node.holds_copy:
            self._world.standing.make(self._update(effect, tokens), waits=self._waited)
        self._node.deliver(st.Applied(effect.key, effect.start, effect.version))

    def _update(self, effect: fx.Apply, tokens: list[Token]) -> UpdateRecord:
        key, start, version, now = effect.key, effect.start, effect.version, self._world.env.now
        return UpdateRecord(now, key, start, version, effect.ranks, effect.staleness, kept(tokens), self._node.name)

    def norms(self, effect: fx.Norms) -> None:
        """Answer with zeros: a pass over the memory of the sum, and no arithmetic."""
        env = self._world.env
        zeros = [(0.0,) * effect.rule.norm_counts[effect.phase]]
        normed = st.Normed(effect.key, effect.start, effect.version, effect.phase, zeros)
        done = self.compute()
        if done > env.now:
            env.after(done - env.now, self._node.deliver, (normed,))
        else:
            self._node.deliver(normed)

    def divide(self, effect: fx.Divide) -> None:
        """Write down that a chunk is now one chunk of each of its keys."""
        if not self._node.holds_copy:
            division = DivideRecord(0, effect.key, effect.start, [part for part, _ in effect.parts])
            self._world.standing.divide(division, self._node.name)

    # --- what a standby is to have first ---

    def look_at_copies(self, server: Coordinator, now: float) -> None:
        """Take note when the server begins to wait for its standby, and when it does so no longer."""
        if server.waits_for_standby != self._waited:
            self._waited = not self._waited
            if not self._waited and server.serves:
                self._world.standing.alone(self._node.name, now)

    def hold(self, send: Callable[[], None]) -> None:
        """Let an answer wait."""
        self._held.append(send)

    def let_go(self, count: int) -> None:
        """Send so many of the answers that wait, the oldest first."""
        for _ in range(count):
            self._held.popleft()()
