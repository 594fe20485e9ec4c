"""What a server wants done besides: answers that wait, the rule, codecs, commands, other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.records import Record

if TYPE_CHECKING:
    from aiokv.codec import Codec
    from aiokv.commands import Command
    from aiokv.core.effects.node import Refuse, Send
    from aiokv.optim import Optimizer
    from aiokv.types import Peer


class Hold(Record):
    """Make an answer as it is to be now, but let it wait until `LetGo`."""

    answer: Send | Refuse


class LetGo(Record):
    """Send the oldest answers that wait, so many of them."""

    count: int


class Configure(Record):
    """A first update rule is set: begin with a new optimizer state, and prepare what the rule needs."""

    optimizer: Optimizer


class Prepare(Record):
    """Payloads of this codec are to be expected."""

    codec: Codec


class ForgetReplicas(Record):
    """The peer is gone, and what it keeps with it."""

    peer: Peer


class Execute(Record):
    """Run a command, which may take its time, as server number `index`; ends in `Executed`."""

    peer: Peer
    request: int
    command: Command
    index: int


class StartNode(Record):
    """Start another node of servers in this process, with a name, as the standby of an index; ends in `NodeEnded`."""

    index: int
    name: str
