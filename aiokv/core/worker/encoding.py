"""What becomes of a worker's messages when their payloads are compressed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.compression import is_compressible
from aiokv.core.effects import CallMemory, CallTensors, Encode, EncodedParts, Replica, Settle
from aiokv.core.keys import BUNDLE_START
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.codec import Codec
    from aiokv.core.worker.call import Call
    from aiokv.core.worker.directory import Directory
    from aiokv.core.worker.parts import Part, Tensors
    from aiokv.types import Key


class Encodings:
    """Which of a worker's pushes have to be encoded first.

    Args:
        directory: knows how tensors are cut.
    """

    __slots__ = ("_directory", "_owing", "begun", "calls")

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._owing: dict[Key, None] = {}
        """Keys of which something may be left that was pushed and not sent."""
        self.begun = False
        """Whether there were any."""
        self.calls: dict[int, Call] = {}
        """Calls that are being encoded. They are held, and are sent even when their caller waits no longer."""

    @property
    def newest_clock(self) -> int:
        """The clock of the last push, also if that is still being encoded."""
        keys = {key: None for call in self.calls.values() for key, _ in call.tensors}
        return self._directory.counts.next_clock(keys) if keys else self._directory.counts.clock

    def owe(self, keys: Iterable[Key]) -> None:
        """Take note that something of keys is left that was not sent."""
        self._owing.update(dict.fromkeys(keys))
        self.begun = True

    def settle(self, part: Part, sent: EncodedParts, *, counted: bool) -> Settle:
        """Let go of what was encoded for a part."""
        if not counted:
            self.owe([part.key] if part.bundle is None else part.bundle.keys)
        return Settle(sent, counted)

    def forget(self, keys: list[Key]) -> None:
        """The keys are no more."""
        for key in keys:
            self._owing.pop(key, None)

    def encode(self, call: int, tensors: Tensors, codec: Codec | None) -> Encode | None:
        """Return what has to be done before a push can be sent, if it can't be sent as it is."""
        if codec is None and not self._owing:
            return None
        found = [
            (tensor, key, self._directory.layout.cuts(key, spec))
            for tensor, (key, spec) in enumerate(tensors)
            if is_compressible(spec.dtype, spec.size)
        ]
        if not found or (codec is None and not any(key in self._owing for _, key, _ in found)):
            return None
        for _, key, _ in found:
            if codec is not None and codec.error_feedback:
                self.owe([key])
            else:
                # It goes with this push.
                self._owing.pop(key, None)
        return Encode(call, codec, found)


def refer_to_encoded(parts: list[Part], encode: Encode) -> None:
    """Let the parts of a push send what was encoded."""
    number = encode.codec.number if encode.codec else 0
    encoded = {tensor for tensor, _, _ in encode.tensors}
    for part in parts:
        memory = part.sends
        if isinstance(memory, CallMemory) and memory.tensor in encoded:
            part.sends = EncodedParts(memory.call, ((memory.tensor, part.start),))
        elif isinstance(memory, CallTensors) and memory.tensors[0] in encoded:
            # The keys of a bundle have one dtype: all are encoded, or none.
            part.sends = EncodedParts(memory.call, tuple((tensor, 0) for tensor in memory.tensors))
        else:
            continue
        assert isinstance(part.message, m.Push | m.PushBundle), "only pushes are encoded"
        part.message.codec = number


def ask_compressed(parts: list[Part], tensors: Tensors, codec: Codec) -> None:
    """Let the parts of a pull or push-pull ask for compressed values, where they can be compressed."""
    for part in parts:
        memory = part.receives
        if not isinstance(part.message, m.Push | m.PushBundle | m.Pull | m.PullBundle):
            # Rows are received as they are.
            continue
        if isinstance(memory, CallMemory):
            spec = tensors[memory.tensor][1]
            start, dtype, size = part.start, spec.dtype, (memory.stop - memory.start) // spec.itemsize
        elif isinstance(memory, CallTensors):
            specs = [tensors[tensor][1] for tensor in memory.tensors]
            start, dtype, size = BUNDLE_START, specs[0].dtype, sum(spec.size for spec in specs)
        else:
            continue
        if is_compressible(dtype, size):
            part.message.value_codec = codec.number
            part.replica = Replica(part.peer, part.key, start, dtype, size, codec, memory)
