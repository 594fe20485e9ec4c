"""Compression of payloads: what the workers have agreed on, and which peers values can be differences for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiokv.codec import PRECISIONS, Codec, OneBit, make_codec
from aiokv.core.effects import ForgetReplicas
from aiokv.errors import CodecError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokv.core.effects import Effect
    from aiokv.core.roster import Roster
    from aiokv.types import Key, Peer, Rank
    from aiokv.wire.messages import SetCompression

MAX_CHANGES = 100_000
"""How often compression may change in the life of a cluster: a server remembers each change."""


@dataclass(slots=True, frozen=True)
class Compression:
    """How a worker's gradients and the values that it receives are compressed; None: not at all."""

    push: Codec | None = None
    pull: Codec | None = None

    def __str__(self) -> str:
        pulls = f", values with {self.pull}" if self.pull else ""
        return f"gradients with {self.push}{pulls}"


def make_compression(
    name: str, params: Mapping[str, Any], pull_name: str = "", pull_params: Mapping[str, Any] | None = None
) -> Compression:
    """Validate the codecs of gradients and of values; an empty name is none.

    Raises:
        CodecError: unknown codec, wrong parameter, or one that can't be for values.
    """
    push = make_codec(name, params) if name else None
    pull = make_codec(pull_name, pull_params or {}) if pull_name else None
    if isinstance(pull, OneBit) or (pull is not None and not pull.error_feedback):
        # 1bit says 1 or -1 where nothing has changed; without error feedback what was not said is never said.
        expected = "another codec than 1bit, with error_feedback"
        raise CodecError(f"values can't be compressed with {pull}: it must be {expected}", expected=expected)
    return Compression(push, pull)


def is_compressible(dtype: str, size: int) -> bool:
    """Tell whether a codec can compress a tensor; the others are sent as they are."""
    return dtype in PRECISIONS and size > 0


def check_length(codec: Codec, sizes: list[int], nbytes: int) -> None:
    """Refuse a payload that can't say so many values: those of a part of a tensor, or of several whole ones.

    Raises:
        ProtocolError: no encoder makes a payload of that length.
    """
    if len(sizes) == 1:
        codec.check_nbytes(sizes[0], nbytes)
        return
    expected = sum(map(codec.whole_nbytes, sizes))
    if nbytes != expected:
        raise codec.malformed(f"of {len(sizes)} tensors", f"{expected} bytes", f"{nbytes}")


class Codecs:
    """The codecs that a server's workers have set.

    A worker's first change of its compression must be every other worker's first change, its second one their second
    one, and so on. So it is noticed when workers differ, and nobody has to wait for the others. Which codec a payload
    has is said by its message: payloads of several codecs, and plain ones, may be under way at the same time.
    """

    def __init__(self) -> None:
        self._changes: list[tuple[Compression, Rank, SetCompression]] = []
        self._numbered: dict[int, Codec] = {}

    def set(self, message: SetCompression, rank: Rank, roster: Roster) -> list[Codec]:
        """Take a worker's change; return the codecs that are new.

        Raises:
            CodecError: unknown codec, wrong parameter, or another worker's change is another one.
            ProtocolError: a change was left out.
        """
        wanted = make_compression(message.name, message.params, message.pull_name, message.pull_params)
        if not 1 <= message.change <= min(len(self._changes) + 1, MAX_CHANGES):
            raise ProtocolError(f"change {message.change} of compression, but {len(self._changes)} were made so far")
        if message.change > len(self._changes):
            self._changes.append((wanted, rank, message))
        known, first, _ = self._changes[message.change - 1]
        if known != wanted:
            raise CodecError(
                f"rank {roster.label(rank)} compresses {wanted}, but rank {roster.label(first)} compresses {known}: "
                "set the same on all workers, in the same order",
                ranks=[first, rank],
                expected=str(known),
                got=str(wanted),
            )
        return self._enter(wanted)

    def _enter(self, wanted: Compression) -> list[Codec]:
        codecs = [codec for codec in (wanted.push, wanted.pull) if codec is not None]
        new = [codec for codec in codecs if codec.number not in self._numbered]
        self._numbered |= {codec.number: codec for codec in new}
        return new

    @property
    def revision(self) -> int:
        """How many changes were made."""
        return len(self._changes)

    def saved(self) -> tuple[tuple[Rank, SetCompression], ...]:
        """Return all changes in their order, as they were asked for first, each with the rank that has."""
        return tuple((rank, message) for _, rank, message in self._changes)

    def resume(self, changes: Sequence[tuple[Rank, SetCompression]]) -> list[Codec]:
        """Go on with changes of which those that are known here are the first ones; return the codecs that are new.

        Raises:
            CodecError: unknown codec, or wrong parameter.
        """
        new: list[Codec] = []
        for rank, message in changes[len(self._changes) :]:
            wanted = make_compression(message.name, message.params, message.pull_name, message.pull_params)
            self._changes.append((wanted, rank, message))
            new += self._enter(wanted)
        return new

    def find(self, number: int) -> Codec:
        """Return the codec with a number.

        Raises:
            CodecError: no worker has set it.
        """
        codec = self._numbered.get(number)
        if codec is None:
            raise CodecError(f"no worker has set the codec with number {number}: call set_gradient_compression first")
        return codec


class Replicas:
    """Which chunks a server's peers have replicas of: what they keep to make values of compressed differences."""

    def __init__(self) -> None:
        self._known: dict[Peer, dict[tuple[Key, int], None]] = {}

    def add(self, peer: Peer, key: Key, start: int) -> bool:
        """Enter a replica; return whether there is one already."""
        known = self._known.setdefault(peer, {})
        found = (key, start) in known
        known[key, start] = None
        return found

    def forget_chunk(self, key: Key, start: int) -> None:
        """Take out all replicas of a chunk that is no more."""
        for known in self._known.values():
            known.pop((key, start), None)

    def forget_peer(self, peer: Peer) -> list[Effect]:
        """Take out the replicas of a peer that is gone."""
        return [] if self._known.pop(peer, None) is None else [ForgetReplicas(peer)]
