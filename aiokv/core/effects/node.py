"""What every machine may want done: connections, messages, the log, the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.core.effects.payloads import URGENT
from aiokv.core.records import Record, field

if TYPE_CHECKING:
    from aiokv.core.effects.payloads import Payload
    from aiokv.errors import AiokvError
    from aiokv.types import Peer
    from aiokv.wire.messages import Message


class Connect(Record):
    """Open a connection to `host:port` after `delay` seconds; ends in `Connected` or `ConnectFailed`.

    One that is being opened under the same number is given up, and nothing is heard of it.
    """

    peer: Peer
    host: str
    port: int
    delay: float = 0.0


class Send(Record, gc=False):
    """Send a message under a request id, followed by the payload; of what waits, the highest priority leaves first."""

    peer: Peer
    request: int
    message: Message
    payload: Payload | None = None
    priority: int = URGENT


class Report(Send, gc=False):
    """Send `Waiting`, and in it this node's counters, which its driver keeps."""


class Refuse(Record):
    """Answer a request with an error. The peer lives on."""

    peer: Peer
    request: int
    error: AiokvError


class Disconnect(Record):
    """Close a connection, or give up one that is being opened; nothing follows."""

    peer: Peer
    reason: str


class Log(Record):
    """One line for the operator; `level` as in `logging` ("info", "warning", "error").

    What went wrong has a name besides, an `event`, by which it is counted, with `facts` for programs.
    """

    level: str
    text: str
    event: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class Stop(Record):
    """This node's work is over. `failed` when it did not end as it should."""

    reason: str
    failed: bool = False
