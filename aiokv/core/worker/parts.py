"""The records of a worker's directory: what is known of a key, and the messages that a call is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import URGENT, CallBuffer, CallMemory, CallTensors, EncodedParts, Replica
from aiokv.core.records import Record, field
from aiokv.core.stimuli import KeyOptions

if TYPE_CHECKING:
    from aiokv.types import Key, Peer, Rank, Round, TensorSpec, Version
    from aiokv.wire import messages as m

Tensors = list[tuple["Key", "TensorSpec"]]

Lane = tuple[str, tuple["Rank", ...]]
"""A policy's text and a group: keys with the same have their rounds decided together."""


class KnownBundle(Record, eq=False):
    """Keys that go together in one message; `number` is the server's, `pushed` and `version` are as in `Known`."""

    server: Peer
    number: int
    keys: tuple[Key, ...]
    nbytes: int
    pushed: int = 0
    version: Version = 0


class Known(Record, eq=False):
    """One key. `spec` and `options` are set when this worker has initialised it; the rest counts while it is in no
    bundle.

    `pushed` is this worker's number of pushes, `versions` the last version received of each chunk, by first element, or
    by first row of a key that `is_sparse`. With `goes_on` the next push may have been made before, by a process whose
    place this one has. Where rounds are decided for all keys at once (`lane` is set), `clock` is
    that of the last push, and `round` the last round that was read of the first chunk. Of a key that `is_eager` servers
    send fresh values ahead of reads.
    """

    spec: TensorSpec | None = None
    is_sparse: bool = False
    options: KeyOptions = field(default_factory=KeyOptions)
    lane: Lane | None = None
    is_eager: bool = False
    round: Round = 0
    clock: int = 0
    goes_on: bool = False
    bundle: KnownBundle | None = None
    pushed: int = 0
    versions: dict[int, Version] = field(default_factory=dict)


class Pushed(Record, eq=False, gc=False):
    """One push of a key or bundle that is under way; `left` of its messages are not answered.

    `dropped` says why it counts nowhere.
    """

    left: int = 0
    dropped: str = ""


class Part(Record, eq=False, gc=False):
    """One message of a transfer: to whom, what memory of the call goes with it, and into which the answer comes.

    `push` is set when it pushes, `replica` when the answer may be a compressed difference. With `is_ahead` it was asked
    for before its user has.
    """

    peer: Peer
    message: m.Message
    sends: CallMemory | CallTensors | EncodedParts | None
    receives: CallMemory | CallTensors | CallBuffer | None
    key: Key
    start: int = 0
    bundle: KnownBundle | None = None
    push: Pushed | None = None
    priority: int = URGENT
    replica: Replica | None = None
    is_ahead: bool = False

    @property
    def nbytes(self) -> int:
        """How many bytes the answer has, unless it is a compressed difference; 0 when that is not known."""
        if self.receives is None or isinstance(self.receives, CallBuffer):
            return 0
        if isinstance(self.receives, CallTensors):
            return self.receives.nbytes
        return self.receives.stop - self.receives.start

    def fits(self, nbytes: int) -> bool:
        """Tell whether an answer may have so many bytes."""
        if isinstance(self.receives, CallMemory):
            return nbytes == self.receives.stop - self.receives.start
        return nbytes > 0 if isinstance(self.receives, CallBuffer) else nbytes == self.nbytes


class Cut(Record, eq=False):
    """A chunk of a tensor: its server, how messages begin that are about it, and which bytes of the tensor it is."""

    server: Peer
    head: tuple[Key, tuple[int, ...], str, int, int]
    begin: int
    end: int


class Single(Record, eq=False):
    """A tensor of a call that is in no bundle: its number, its key and how it is cut."""

    tensor: int
    key: Key
    cuts: list[Cut]


class Leaving(Record, eq=False):
    """Keys of one policy and group that are to have another policy."""

    old: str
    group: tuple[Rank, ...]
    keys: tuple[Key, ...]


class Plan(Record, eq=False):
    """How the keys of a call go together; good until a bundle is made or taken apart.

    `keys` are those of the singles and the first of each bundle.
    """

    tensors: Tensors
    bundles: list[tuple[KnownBundle, tuple[int, ...]]]
    singles: list[Single]
    keys: list[Key]
