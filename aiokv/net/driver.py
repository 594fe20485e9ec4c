"""What the three asyncio drivers share: feed a state machine, perform its effects, keep its links and its timer."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import ssl
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import structs

from aiokv.addresses import format_address
from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import AiokvError, ProtocolError
from aiokv.net import tls
from aiokv.net.checksums import load_checksum
from aiokv.net.memory import MemoryLink
from aiokv.net.shared import Segments
from aiokv.net.tcp import Link, in_words
from aiokv.telemetry import Counters, EventLog, Profile, take_note
from aiokv.wire.messages import Error, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiokv.config import Config
    from aiokv.net.link import AnyLink
    from aiokv.net.tether import Moved
    from aiokv.types import Peer
    from aiokv.wire.receiver import Frame, Head, Landing

CLOSE_SECONDS = 1.0
"""How long a closing node lets its last frames flow before it cuts the connections."""

BUSY_SECONDS = 1e-3
"""What has to wait while a driver is busy looks so often whether it still is."""

_serial = itertools.count()

Log = EventLog[st.Stimulus, ef.Effect]


@dataclass(slots=True, eq=False)
class Attempt:
    """A connection that is being opened: what does it, and the link while its handshake is not done."""

    task: asyncio.Task[None] | None = None
    link: AnyLink | None = None

    def give_up(self) -> None:
        """Open it no longer."""
        if self.task is not None:
            self.task.cancel()
        if self.link is not None:
            self.link.abort()


class Machine(Protocol):
    """What `Coordinator`, `Session` and `Membership` have in common."""

    def handle(self, stimulus: st.Stimulus, *, now: float) -> list[ef.Effect]:
        """Take in one stimulus and return what is to be done."""

    def deadline(self) -> float | None:
        """Return the time at which a `Tick` is wanted."""


def make_name(config: Config, role: str) -> str:
    """Return the configured name, or one that no other node has."""
    return config.name or f"{role}-{socket.gethostname()}-{os.getpid()}-{next(_serial)}"


def make_incarnation() -> int:
    """Return a number that is larger in every later life of a node."""
    return time.time_ns()


def _reason(error: OSError) -> str:
    """Return why no connection could be made."""
    if isinstance(error, ssl.SSLError):
        return tls.describe(error)
    if isinstance(error, TimeoutError) and not error.errno:
        return "no answer"
    return in_words(error)


async def _connect_later(owner: Moved, peer: Peer, host: str, port: int, delay: float) -> None:
    await asyncio.sleep(delay)
    await owner.connect(peer, host, port)


def _between(link: AnyLink) -> str:
    """Return who is at the other end, for a line of the log."""
    return f"{'to' if link.initiator else 'from'} {link.remote}"


class Driver:
    """Moves one state machine. Subclasses say where payloads are and perform the effects that only their node has.

    Args:
        config: this node's settings.
        log: where stimuli and effects are recorded, if they are.
    """

    _slow: frozenset[type] = frozenset()
    """Which effects, or effects with which payloads, may be deferred; the others are performed without asking."""

    def __init__(self, config: Config, log: Log | None = None) -> None:
        self.config = config
        self.counters: Counters = Counters()
        self.neighbours: dict[tuple[str, int], Driver] = {}
        """Nodes of this process and loop, by the address under which others reach them."""
        self.profile = Profile()
        """What this node records of its own work, while that is asked for."""
        self._log = log
        self._machine: Machine
        self._loop: asyncio.AbstractEventLoop
        self._links: dict[Peer, AnyLink] = {}
        self._others: dict[AnyLink, None] = {}
        """Connections whose handshake is not done, or that are closing: everything that is not in `_links`."""
        self._dirty: dict[AnyLink, None] = {}
        self._next_peer: Peer = 0
        self._stimuli: deque[st.Stimulus] = deque()
        self._done: deque[st.Stimulus] = deque()
        """What came of effects: the machine hears of it before anything else, or it would not know its own state."""
        self._effects: Iterator[ef.Effect] = iter(())
        """What the machine has wanted last and is not performed yet."""
        self._handled: tuple[st.Stimulus, float] | None = None
        self._refused: dict[str, list[AiokvError]] = {}
        """What was refused since the last line about that, by the names of the errors."""
        self._pumping = False
        self._aside: asyncio.Task[None] | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        self._connecting: dict[asyncio.Task[None], None] = {}
        self._attempts: dict[Peer, Attempt] = {}
        self._closed = False
        self._checksum = load_checksum(config.checksum)
        self._initiator_context = tls.initiator_context(config)
        self._segments: Segments | None = None
        # With TLS everything goes through it.
        if config.shared_memory == "auto" and not config.uses_tls:
            self._segments = Segments(config.shared_memory_bytes, self.counters)

    @property
    def _owner(self) -> Moved:
        """What the event loop holds of this driver."""
        return self

    # --- the machine ---

    def _start(self, machine: Machine) -> None:
        self._loop = asyncio.get_running_loop()
        self._machine = machine

    def feed(self, *stimuli: st.Stimulus) -> None:
        """Give stimuli to the machine, one after the other, and perform what it wants after each."""
        self._stimuli.extend(stimuli)
        if self._pumping or self._closed or self.busy:
            return
        self._pumping = True
        slow = self._slow
        try:
            while self._aside is None:
                # An iterator goes on where it was, when a thread has computed in between.
                for effect in self._effects:
                    if slow and type(getattr(effect, "payload", effect)) in slow and self._defer(effect):
                        break
                    self._perform(effect)
                else:
                    if self._handled is not None:
                        self._record(*self._handled)
                    waiting = self._done or self._stimuli
                    if not waiting:
                        break
                    self._handle(waiting.popleft())
        finally:
            self._pumping = False
        for link in self._dirty:
            link.flush()
        self._dirty.clear()
        if self._refused:
            self._note_refusals()
        self._arm_timer()

    def note(self, level: str, event: str, text: str, facts: dict[str, Any]) -> None:
        """Write a line for the operator, and count it. See `aiokv.telemetry.take_note`."""
        take_note(self.counters, level, event, text, facts)

    def note_from_thread(self, level: str, event: str, text: str, facts: dict[str, Any]) -> None:
        """Do the same for what goes on in another thread."""
        self._loop.call_soon_threadsafe(self.note, level, event, text, facts)

    def _note_refusals(self) -> None:
        """Count what was refused; one line says what has the same reason, such as all calls that need a lost worker."""
        refused, self._refused = self._refused, {}
        for name, errors in refused.items():
            event, first = f"refused.{name}", errors[0]
            self.note("info", event, f"{len(errors)} refused: {first}", first.details | {"requests": len(errors)})
            self.counters[event] += len(errors) - 1

    def _handle(self, stimulus: st.Stimulus) -> None:
        now = self._loop.time()
        if self.profile.running:
            # The loop's clock stands still while it runs a callback, and is coarse.
            self._handled = stimulus, time.perf_counter()
        effects = self._machine.handle(stimulus, now=now)
        if self._log is not None:
            self._log.add(now, stimulus, effects)
        self._effects = iter(effects)

    def _record(self, stimulus: st.Stimulus, begin: float) -> None:
        self._handled = None
        if self.profile.running:
            self.profile.add(stimulus, begin, time.perf_counter())

    # --- what takes long ---

    @property
    def busy(self) -> bool:
        """Whether a thread computes for an effect: until it is done nothing is decided and nothing more is read."""
        return self._aside is not None

    def _deferred(self, effect: ef.Effect) -> Callable[[], Callable[[], None]] | None:
        """Return what to compute in a thread for an effect, which returns what performs it; None: perform it at once.

        Meanwhile the loop receives payloads into memory of their own, and does nothing else with what is stored.
        """
        return None

    def _defer(self, effect: ef.Effect) -> bool:
        """Tell whether a thread computes for an effect before it is performed; begin with that."""
        compute = self._deferred(effect)
        if compute is not None:
            self._aside = self._loop.create_task(self._compute_aside(compute))
            self._set_reading()
        return compute is not None

    async def _compute_aside(self, compute: Callable[[], Callable[[], None]]) -> None:
        try:
            perform = await asyncio.to_thread(compute)
        finally:
            self._aside = None
        if not self._closed:
            self._set_reading()
            perform()
            self.feed()

    def _set_reading(self) -> None:
        for link in self._links.values():
            link.set_reading()

    def _arm_timer(self) -> None:
        deadline = None if self._closed else self._machine.deadline()
        if self._timer is not None:
            # A timer that fires too early is cheaper than a new one for every stimulus: its `Tick` finds nothing due.
            if deadline is not None and self._timer_at <= deadline:
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer, self._timer_at = self._loop.call_at(deadline, self._owner.tick), deadline

    def tick(self) -> None:
        """Take note that the timer has fired."""
        self._timer = None
        self.feed(st.Tick())

    # --- effects ---

    def _perform(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Report(peer, request, Waiting() as waiting):
                self._send(ef.Send(peer, request, structs.replace(waiting, counters=dict(self.counters))))
            case ef.Send():
                self._send(effect)
            case ef.Refuse(peer, request, error):
                self._refused.setdefault(type(error).__name__, []).append(error)
                answer = Error(error.code, error.message, error.details)
                self._send(ef.Send(peer, request, answer, priority=ef.URGENT))
            case ef.Connect(peer, host, port, delay):
                self._begin_to_connect(peer, host, port, delay)
            case ef.Disconnect(peer, reason):
                self._give_up(peer)
                link = self._links.pop(peer, None)
                if link is not None:
                    text, facts = f"closing the connection {_between(link)}: {reason}", {"reason": reason}
                    self.note("debug", "disconnected", text, facts | {"address": link.remote})
                    self._others[link] = None
                    link.refuse(ProtocolError(reason))
            case ef.Log(level, text, event, facts):
                self.note(level, event, text, facts)
            case _:
                self._perform_own(effect)

    def _perform_own(self, effect: ef.Effect) -> None:
        """Perform an effect that only this kind of node has."""
        raise NotImplementedError(effect)

    def _memory(self, payload: ef.Payload) -> tuple[memoryview, Callable[[], None] | None]:
        """Return a payload's bytes, and what to call when they are sent."""
        raise NotImplementedError(payload)

    def _send(self, effect: ef.Send, made: memoryview | None = None, sent: Callable[[], None] | None = None) -> None:
        """Send a message with its payload, which may have been made before; `sent` is called when it has left."""
        link = self._links.get(effect.peer)
        if link is None:
            if sent is not None:
                sent()
            return
        self._dirty[link] = None
        payload = effect.payload
        if payload is None:
            link.send_message(effect.request, effect.message, priority=effect.priority)
            return
        view, sent = self._memory(payload) if made is None else (made, sent)
        # Only what lies in the caller's own memory has to be given back; tensors that go together were copied.
        call = payload.call if isinstance(payload, ef.CallMemory) else -1
        given = view if view.nbytes else None
        link.send_message(effect.request, effect.message, given, sent, call=call, priority=effect.priority)

    # --- connections ---

    def _make_link(self, peer: Peer, *, initiator: bool, remote: str) -> Link:
        config = self.config
        return Link(
            self._owner,
            initiator=initiator,
            cluster=config.cluster,
            token=config.token,
            peer=peer,
            remote=remote,
            max_queued_bytes=None if initiator else config.max_queued_bytes,
            segments=self._segments,
            checksum=self._checksum,
            patience=config.death_timeout,
            system_patience=config.call_timeout,
        )

    def _begin_to_connect(self, peer: Peer, host: str, port: int, delay: float) -> None:
        self._give_up(peer)
        attempt = self._attempts[peer] = Attempt()
        attempt.task = task = self._loop.create_task(_connect_later(self._owner, peer, host, port, delay))
        self._connecting[task] = None
        task.add_done_callback(self._connecting.pop)

    def _give_up(self, peer: Peer) -> None:
        """Open the connection under this number no longer, if it is being opened."""
        attempt = self._attempts.pop(peer, None)
        if attempt is not None:
            attempt.give_up()

    def _is_given_up(self, link: AnyLink) -> bool:
        attempt = self._attempts.get(link.peer)
        return link.initiator and (attempt is None or attempt.link is not link)

    async def connect(self, peer: Peer, host: str, port: int) -> None:
        """Open a connection, until that is given up."""
        attempt = self._attempts[peer]
        neighbour = self.neighbours.get((host, port))
        if neighbour is not None:
            self._connect_in_memory(attempt, peer, neighbour)
            return
        where = format_address(host, port)
        attempt.link = link = self._make_link(peer, initiator=True, remote=where)
        self._others[link] = None
        context = self._initiator_context
        secure: dict[str, Any] = {} if context is None else {"ssl": context, **tls.TIMES}
        try:
            async with asyncio.timeout(self.config.death_timeout):
                await self._loop.create_connection(lambda: link, host, port, **secure)
        except OSError as error:
            del self._others[link], self._attempts[peer]
            refusal = tls.refusal(error, where)
            self.feed(st.ConnectFailed(peer, _reason(error), refusal))
        except asyncio.CancelledError:
            self._others.pop(link, None)
            link.abort()
            raise

    def _connect_in_memory(self, attempt: Attempt, peer: Peer, neighbour: Driver) -> None:
        """Connect to a node of this process. Both ends are trusted: there is nobody in between."""
        attempt.link = here = MemoryLink(self._owner, peer=peer, initiator=True)
        there = MemoryLink(neighbour._owner, peer=neighbour._next_peer, initiator=False)
        neighbour._next_peer += 1
        here.join(there)
        for driver, link in ((neighbour, there), (self, here)):
            driver._others[link] = None
            driver.link_up(link)

    def land(self, link: AnyLink, head: Head) -> Landing:
        """Choose where a payload goes."""
        raise NotImplementedError(head)

    def link_up(self, link: AnyLink) -> None:
        """Enter a connection that is authenticated."""
        if self._closed or self._is_given_up(link):
            link.abort()
            return
        del self._others[link]
        self._links[link.peer] = link
        if link.initiator:
            del self._attempts[link.peer]
            self.feed(st.Connected(link.peer))

    def frames_received(self, link: AnyLink, frames: list[Frame]) -> None:
        """Make stimuli of whole frames."""
        if self._links.get(link.peer) is not link:
            return
        self.counters["frames_received"] += len(frames)
        self.feed(*(self._received(link.peer, frame) for frame in frames))

    def _received(self, peer: Peer, frame: Frame) -> st.Received:
        """Make a stimulus of a whole frame."""
        return st.Received(peer, frame.request, frame.message, frame.slot, frame.nbytes)

    def link_down(self, link: AnyLink, reason: str, error: AiokvError | None) -> None:
        """Take out a connection that is over."""
        self._others.pop(link, None)
        if not link.established:
            self._handshake_failed(link, reason, error)
        elif self._links.get(link.peer) is link:
            if error is not None:
                event = f"connections_ended.{type(error).__name__}"
                facts = error.details | {"address": link.remote}
                self.note("info", event, f"a connection {_between(link)} has ended: {error}", facts)
            del self._links[link.peer]
            self.feed(st.PeerLost(link.peer, reason, error))

    def _handshake_failed(self, link: AnyLink, reason: str, error: AiokvError | None) -> None:
        if self._is_given_up(link):
            return
        facts = {"reason": reason, "address": link.remote}
        if link.initiator:
            del self._attempts[link.peer]
            text = f"the connection {_between(link)} was not made: {reason}"
            self.note("info", "handshakes_failed", text, facts)
            self.feed(st.ConnectFailed(link.peer, reason, error))
        else:
            text = f"refused a connection {_between(link)} before it was authenticated: {reason}"
            self.note("warning", "handshakes_failed", text, facts)

    async def _close_links(self) -> None:
        """Close every connection, the last frames first; cut those that do not end in time."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._aside is not None:
            # A thread can't be stopped.
            await asyncio.wait([self._aside])
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        links = [*self._links.values(), *self._others]
        for link in links:
            link.close()
        if links:
            await asyncio.wait([link.ended for link in links], timeout=CLOSE_SECONDS)
        for link in links:
            link.abort()
            await link.ended
        self._links.clear()
        self._others.clear()
