"""How a worker or a server takes its place in the cluster and keeps it: connect, register, heartbeat."""

from __future__ import annotations

from aiokv.core.deadlines import earliest
from aiokv.core.effects import Complete, Connect, Disconnect, Effect, Fail, Log, Send
from aiokv.errors import AiokvError, HandshakeError, JoinTimeoutError
from aiokv.types import SCHEDULER, Incarnation, Role
from aiokv.wire.messages import Heartbeat, Register, ServerEntry, View

REGISTER_REQUEST = 1
"""Request id of the one `Register`; other requests count from 2."""

FIRST_DELAY = 0.05
LAST_DELAY = 1.0
LOG_EVERY = 5.0

MARGIN = 0.5
"""Seconds that an answer has to get here, at most."""

SHARE = 0.1
"""The part of a time-out that an answer has to get here, when that is less."""


def retry_delay(attempt: int) -> float:
    """Return the seconds to wait before attempt number `attempt` (from 1): doubling, at most a second."""
    return min(LAST_DELAY, FIRST_DELAY * 2.0 ** min(attempt - 1, 10))


def answer_time(timeout: float) -> float:
    """Return the seconds that the other side gets to answer, so that its reasons are here before our own deadline."""
    # Without `min`, since it is asked for with every call.
    return timeout - MARGIN if timeout * SHARE > MARGIN else timeout - SHARE * timeout


class Joiner:
    """The part of a state machine that deals with the scheduler. Owned by a `Session` or a `Coordinator`.

    Args:
        role: worker or server.
        name: the node's name, unique in the cluster.
        incarnation: number of this process's life under that name.
        scheduler: host and port of the scheduler.
        advertised: host and port under which others reach this node; ("", 0) for a worker.
        standby: index of the server of whose parameters this node is to hold a copy; -1: of none.
    """

    def __init__(
        self,
        *,
        role: Role,
        name: str,
        incarnation: Incarnation,
        scheduler: tuple[str, int],
        advertised: tuple[str, int],
        standby: int = -1,
    ) -> None:
        self.role = role
        self.name = name
        self.incarnation = incarnation
        self.scheduler = scheduler
        self.advertised = advertised
        self.standby = standby
        self.view: View | None = None
        self.connected = False
        self.joined = False
        self._call: int | None = None
        self._timeout = 0.0
        self._join_by = 0.0
        self._attempt = 0
        self._reason = "no answer yet"
        self._log_from = 0.0
        self._heartbeat_at: float | None = None
        self._heard = 0.0
        self._is_over = False
        self.is_refused = False
        """Whether the scheduler that is connected can't go on with the cluster, but another one could."""
        self.due: float | None = None
        """When `tick` wants to be called. It is asked for after every stimulus, and hardly ever another one."""

    @property
    def address(self) -> str:
        """The scheduler's address as people write it."""
        return "{}:{}".format(*self.scheduler)

    @property
    def joining(self) -> bool:
        """True from `join` until it has succeeded or failed."""
        return self._call is not None

    @property
    def join_by(self) -> float:
        """The time at which joining fails."""
        return self._join_by

    def _find_due(self) -> None:
        wanted = self._heartbeat_at
        if self.connected and self.view is not None:
            silent = self._heard + self.view.death_timeout
            wanted = silent if wanted is None or silent < wanted else wanted
        self.due = wanted if self._call is None else earliest(wanted, self._join_by)

    def heard(self, now: float) -> None:
        """Take note that something came from the scheduler."""
        self._heard = now
        self._find_due()

    def silence(self, now: float) -> str:
        """Return why the scheduler counts as lost when it has been silent for too long; else nothing."""
        if not self.connected or self.view is None or now < self._heard + self.view.death_timeout:
            return ""
        return f"no heartbeat for {now - self._heard:.1f} s"

    def join(self, call: int, timeout: float, now: float) -> list[Effect]:
        """Begin to join; ends in `Complete(call)` or `Fail(call, error)`."""
        self._call, self._timeout, self._join_by = call, timeout, now + timeout
        self._find_due()
        return [Connect(SCHEDULER, *self.scheduler)]

    def entry_of(self, view: View) -> ServerEntry | None:
        """Return what a view says of this server, if it serves a part of the keys."""
        return next((entry for entry in view.servers if entry.name == self.name), None)

    @property
    def number(self) -> int:
        """Rank of a worker, index of a server; -1 for a server that serves nothing, at least not yet."""
        assert self.view is not None, "it has its place"
        if self.role is Role.SERVER:
            entry = self.entry_of(self.view)
            return -1 if entry is None else entry.index
        return next(entry.rank for entry in self.view.workers if entry.name == self.name)

    def on_connected(self, now: float) -> list[Effect]:
        """Register over the new connection, unless it comes too late."""
        if not self._reconnects:
            return [Disconnect(SCHEDULER, "the join is over")]
        self.connected, self._heard = True, now
        self._find_due()
        self._reason = "registered, but the cluster is not complete"
        host, port = self.advertised
        head = (self.role, self.name, self.incarnation, host, port)
        if self.view is None:
            left = answer_time(max(0.0, self._join_by - now))
            return [Send(SCHEDULER, REGISTER_REQUEST, Register(*head, left, standby=self.standby))]
        known = (self.number, self.view.epoch, self.standby, self.view.founder)
        again = Register(*head, self.view.death_timeout, *known)
        text = f"{self.name} is connected to the scheduler at {self.address} again"
        found = Log("warning", text, "scheduler_found", {"address": self.address})
        return [Send(SCHEDULER, REGISTER_REQUEST, again), found]

    @property
    def _reconnects(self) -> bool:
        return (self.joining or self.joined) and not self._is_over

    @property
    def is_registered(self) -> bool:
        """Whether the scheduler knows this node over the present connection."""
        return self.connected and self._heartbeat_at is not None

    def leave(self) -> None:
        """Stop to connect again when the connection to the scheduler ends."""
        self._is_over = True

    def on_connect_failed(self, reason: str, error: AiokvError | None, now: float) -> list[Effect]:
        """Try again, later and later, and say whom the node waits for; give up when the scheduler refused it."""
        if not self.joining:
            if not self._reconnects:
                return []
            self._attempt += 1
            return [Connect(SCHEDULER, *self.scheduler, delay=retry_delay(self._attempt))]
        if error is not None and not error.retriable:
            return self.fail(error)
        self._attempt += 1
        self._reason = reason
        effects: list[Effect] = [Connect(SCHEDULER, *self.scheduler, delay=retry_delay(self._attempt))]
        if now >= self._log_from:
            self._log_from = now + LOG_EVERY
            left = self._join_by - now
            text = f"{self.name} waits for the scheduler at {self.address} ({reason}); tries again for {left:.0f} s"
            effects.append(Log("warning", text, "scheduler_unreachable", {"reason": reason, "seconds_left": left}))
        return effects

    def on_view(self, view: View, now: float) -> bool:
        """Begin with heartbeats and take over a newer view; return whether it is one."""
        if self._heartbeat_at is None:
            self._heartbeat_at, self._attempt = now + view.heartbeat, 0
        is_news = self.view is None or view.epoch > self.view.epoch
        if is_news:
            self.view = view
        self._find_due()
        return is_news

    def tell_view(self) -> list[Effect]:
        """Tell a scheduler that was started again what the cluster was."""
        return [] if self.view is None else [Send(SCHEDULER, 0, self.view)]

    def cannot_return(self, error: AiokvError, does: str) -> list[Effect]:
        """Stay connected to a scheduler that was started with other settings, until it is ended, and say so."""
        self.is_refused = True
        text = f"the scheduler at {self.address} can't go on with the cluster: {error.message}; {self.name} {does}"
        return [Log("error", text, "scheduler_differs", error.details | {"address": self.address})]

    def refused(self, error: AiokvError | None) -> list[Effect]:
        """End a join when the connection has ended because the two sides do not fit: they would not do so later."""
        return self.fail(error) if isinstance(error, HandshakeError) else []

    def on_lost(self, reason: str) -> list[Effect]:
        """The connection to the scheduler is gone: nothing to send heartbeats to. Make another one."""
        self.connected = self.is_refused = False
        self._heartbeat_at = None
        self._reason = f"the connection has ended: {reason}"
        self._find_due()
        if not self._reconnects:
            return []
        self._attempt += 1
        return [Connect(SCHEDULER, *self.scheduler, delay=retry_delay(self._attempt))]

    def complete(self) -> list[Effect]:
        """The node has all that it needs: the join is over."""
        if self._call is None:
            return []
        call, self._call = self._call, None
        self._find_due()
        self.joined = True
        return [Complete(call)]

    def fail(self, error: AiokvError) -> list[Effect]:
        """The join is over without success."""
        if self._call is None:
            return []
        call, self._call = self._call, None
        self.on_lost("the join failed")
        return [Disconnect(SCHEDULER, "the join failed"), Fail(call, error)]

    def tick(self, now: float, waiting_for: str = "") -> list[Effect]:
        """Send a heartbeat when it is time, and end a join that took too long.

        Args:
            now: the time.
            waiting_for: whom the join waits for when it is not the scheduler.
        """
        effects: list[Effect] = []
        if self._heartbeat_at is not None and now >= self._heartbeat_at and self.view is not None:
            self._heartbeat_at = now + self.view.heartbeat
            self._find_due()
            effects.append(Send(SCHEDULER, 0, Heartbeat()))
        if self.joining and now >= self._join_by:
            missing = waiting_for or f"the scheduler at {self.address} ({self._reason})"
            text = f"{self.name} could not join within {self._timeout:g} s: waiting for {missing}"
            effects += self.fail(JoinTimeoutError(text, address=self.address))
        return effects
