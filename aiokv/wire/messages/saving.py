"""What is saved and loaded: by one worker, or of the whole cluster."""

from __future__ import annotations

from typing import Any

from aiokv.wire.messages.base import Message

# --- saving: what one worker reads from the servers, and gives to those of another cluster ---


class GetState(Message):
    """Answer `State`: elements, or rows, [start, stop) of a key, which are a chunk, and what the rule keeps for them.

    Without `arrays` the payload has no arrays, only what is said of them; `names` are those that it has, all if empty.
    """

    key: str | int
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    arrays: bool
    timeout: float
    names: tuple[str, ...] = ()


class State(Message):
    """Payload: arrays by name in the safetensors format (see `aiokv.checkpoint.saving`), at `version`."""

    version: int


class PutState(Message):
    """Payload: what a `State` had. It takes the place of what is there; versions and sequences go on. Answered `Done`.

    What is not in the payload stays: without values only the state of the rule changes. A key that is not there is
    made if there is a `policy`; what follows is as in `Init` and, of a `sparse` one, in `InitRows`. `first` is where
    the chunk begins whose rows from `start` on these are.
    """

    key: str | int
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    timeout: float
    policy: str = ""
    group: tuple[int, ...] = ()
    sparse: bool = False
    first: int = 0
    lazy: bool = True
    initializer: dict[str, Any] = {}


class GetRules(Message):
    """Answer `RulesState`."""

    timeout: float


class RulesState(Message):
    """The update rule and what became of it; `name` is empty when none is set.

    `changes` are, by the first clock that they are for, the parameters that have changed. `clock` is that of the newest
    update.
    """

    name: str
    params: dict[str, Any]
    reduction: str
    changes: tuple[tuple[int, dict[str, Any]], ...]
    clock: int
    staleness_rate: str = "1"


class PutRules(Message):
    """Go on with a rule, its changes and a clock, as `RulesState` had them. Answered `Done`.

    A `trial` only asks whether it can be.
    """

    name: str
    params: dict[str, Any]
    reduction: str
    changes: tuple[tuple[int, dict[str, Any]], ...]
    clock: int
    timeout: float
    staleness_rate: str = "1"
    trial: bool = False


# --- checkpoints of the whole cluster, between the scheduler and all others; see `core.server.cluster_checkpoints` ---


class CheckpointAt(Message):
    """The scheduler wants a checkpoint of all updates up to a clock, and no other one any longer. Answered by
    `CheckpointClock`.
    """

    clock: int


class CheckpointClock(Message):
    """It will be made, if the newest clock so far is not past that one; otherwise it can't be any longer.

    A server that is still writing an earlier one answers when it has done so.
    """

    clock: int
    newest: int


class CheckpointFile(Message):
    """A file of a checkpoint: its name, its length, and the BLAKE2b of it and of its first `head_nbytes`, in hex."""

    name: str
    nbytes: int
    checksum: str
    head_nbytes: int
    head_checksum: str


class CheckpointPart(Message):
    """To the scheduler: a server has written its part of the checkpoint of a clock, or a worker is past that clock.

    A worker has a file only if it compresses. With a `reason` there will be no such part.
    """

    clock: int
    file: CheckpointFile | None = None
    reason: str = ""


class CheckpointRest(Message):
    """To the servers: all workers are past the clock, so what has not changed since then will not change any more.

    Said again, long afterwards: what is not made by now is waited for no longer.
    """

    clock: int


class CheckpointDropped(Message):
    """From the scheduler: there will be no checkpoint of this clock."""

    clock: int
