"""One call of a worker's user: what it asks for, what it still waits for, and what has come of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from aiokv.core.compression import Compression
from aiokv.core.effects import CallBuffer
from aiokv.core.keys import name_keys
from aiokv.core.records import Record, field
from aiokv.core.stimuli import Operation, Transfer
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.core.effects import Encode
    from aiokv.core.worker.changing import Change
    from aiokv.core.worker.parts import Part, Tensors
    from aiokv.core.worker.read_ahead import Ahead
    from aiokv.core.worker.whole_reads import WholeReads
    from aiokv.types import Key, Peer

UNCOMPRESSED = Compression()

NO_CALL = -1
"""Stands for the call of a request that the session makes for itself; what it reads ahead has smaller numbers."""


class Call(Record, eq=False, gc=False):
    """A user's call that is not answered yet.

    `open` is the id of the request that it still waits for, or, where there are several, a table of them; 0: none.
    `until` is when it gives up; -inf: that has come. `held` is set while nothing has been sent, because of the key that
    it names. `encode` is set once its turn has come, if it is to be encoded first. `last` goes to the
    scheduler when the servers have answered. A `change` lets later calls of its keys wait until it is over. `reads` are
    of values that are to be of one round. `ahead` is what it has taken over of what was asked for ahead of it.
    """

    number: int
    verb: str
    timeout: float
    open: int | dict[int, None] = 0
    tensors: Tensors = field(default_factory=list)
    transfer: Transfer | None = None
    held: Key | None = None
    result: Any = None
    compression: Compression = UNCOMPRESSED
    encode: Encode | None = None
    last: m.Message | None = None
    change: Change | None = None
    reads: WholeReads | None = None
    ahead: Sequence[Ahead] = ()
    until: float = math.inf

    @property
    def requests(self) -> list[int]:
        """The ids of the requests that it waits for."""
        if isinstance(self.open, dict):
            return list(self.open)
        return [self.open] if self.open else []

    def ask(self, request: int) -> None:
        """Let it wait for another request."""
        # Most have one, and a table of it would take as much memory as all the rest.
        if not self.open:
            self.open = request
        elif isinstance(self.open, dict):
            self.open[request] = None
        else:
            self.open = {self.open: None, request: None}

    def answered(self, request: int) -> None:
        """Let it wait for a request no longer."""
        if self.open == request:
            self.open = 0
        else:
            assert isinstance(self.open, dict), "it waits for several"
            del self.open[request]

    @property
    def what(self) -> str:
        """The call in words, for errors."""
        keys = name_keys(tuple(key for key, _ in self.tensors))
        return f"{self.verb} of {keys}" if self.transfer else self.verb

    @property
    def is_own(self) -> bool:
        """Whether it is no user's call, but reads a key ahead."""
        return self.number < NO_CALL

    @property
    def pushes(self) -> bool:
        """Whether it brings contributions, or first values."""
        return self.transfer is not None and self.transfer.operation is not Operation.PULL

    @property
    def keys(self) -> list[Key]:
        """Its keys, each once."""
        return list(dict.fromkeys(key for key, _ in self.tensors))

    def keep(self, peer: Peer, part: Part | None, message: m.Message) -> None:
        """Take what an answer says into the result."""
        match message:
            case m.RulesState() | m.Tally():
                self.result = [*(self.result or []), message]
            case m.CommandResult(result) if isinstance(self.result, dict):
                self.result[peer] = result
            case m.Met(said) if said:
                self.result = dict(said)
            case m.Pushes() if part is not None and isinstance(self.result, list):
                self.result.append((part.key, message))
            case m.Reached(number):
                self.result = number
            case m.State(version) if part is not None and isinstance(part.receives, CallBuffer):
                self.result = {} if self.result is None else self.result
                self.result[part.receives.number] = version
