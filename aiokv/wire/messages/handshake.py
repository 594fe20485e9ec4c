"""How two nodes get to know each other, and share memory."""

from __future__ import annotations

from aiokv.wire.messages.base import Message

# --- handshake: the only frames before authentication ---


class Hello(Message):
    """First frame of the side that connected."""

    cluster: str
    nonce: bytes


class Challenge(Message):
    """The listener's nonce, and its proof that it knows the token."""

    nonce: bytes
    proof: bytes


class Proof(Message):
    """The connecting side's proof that it knows the token."""

    proof: bytes


class Welcome(Message):
    """The listener accepts; every other frame type is allowed from here on."""


class Goodbye(Message):
    """Why this side closes the connection: an error code of `aiokv.errors` and a sentence."""

    code: int
    reason: str


# --- whether the other side is still there; see `wire.liveness` ---


class Ping(Message):
    """Asks for a `Pong`: this side has heard nothing for a while."""


class Pong(Message):
    """This side is there."""


# --- shared memory, between two processes of one host; see `wire.shared` ---


class Share(Message):
    """The side that connected names memory that it has made: its process, its descriptor there, the bytes of each ring
    and what stands at the memory's start.
    """

    pid: int
    descriptor: int
    ring_bytes: int
    nonce: bytes


class Shared(Message):
    """The listener has opened the memory: here is what stands behind the nonce. Empty: it could not, or will not."""

    proof: bytes


class Freed(Message):
    """All payloads before this position of the receiver's own ring are copied: it may write there again."""

    position: int
