"""The handshake: both sides prove that they know the cluster's token, and neither reveals it. No bytes, no frames.

    initiator                                   listener
        Hello(cluster, nonce_i)          ->
                                         <-     Challenge(nonce_l, proof_l)
        Proof(proof_i)                   ->
                                         <-     Welcome()

    proof_l = HMAC-SHA256(token, "aiokv listener"  + fields)
    proof_i = HMAC-SHA256(token, "aiokv initiator" + fields)
    fields  = cluster, nonce_i, nonce_l, each behind its length in 4 bytes, little-endian

The label differs by side, so a proof can't be sent back to the side that made it; both nonces are fresh, so it can't be
used again. An initiator that was given a wrong address learns that before it has proved anything itself.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

from aiokv.errors import HandshakeError
from aiokv.wire.messages import Challenge, Hello, Message, Proof, Welcome

NONCE_BYTES: Final = 32

_LISTENER: Final = b"aiokv listener"
_INITIATOR: Final = b"aiokv initiator"


class Handshake:
    """One side of the handshake. `expected` is the message that must come next; None when the peer is authenticated."""

    __slots__ = ("_cluster", "_initiator", "_nonce", "_peer_nonce", "_token", "expected")

    def __init__(self, *, initiator: bool, cluster: str, token: bytes, nonce: bytes) -> None:
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"nonce must be {NONCE_BYTES} random bytes, got {len(nonce)}")
        self._initiator = initiator
        self._cluster = cluster
        self._token = token
        self._nonce = nonce
        self._peer_nonce = b""
        self.expected: type[Message] | None = Challenge if initiator else Hello

    def start(self) -> Message | None:
        """Return the first message of this side, if it speaks first."""
        return Hello(self._cluster, self._nonce) if self._initiator else None

    def receive(self, message: Message) -> Message | None:
        """Take the peer's next message and return the answer to it, if it has one.

        Raises:
            HandshakeError: another message than the expected one, another cluster, a wrong proof, or a replay.
        """
        if type(message) is not self.expected:
            expected = "none" if self.expected is None else self.expected.__name__
            got = type(message).__name__
            raise HandshakeError(f"expected handshake message {expected}, got {got}", expected=expected, got=got)
        match message:
            case Hello():
                return self._challenge(message)
            case Challenge():
                return self._prove(message)
            case Proof():
                self._verify(message.proof, _INITIATOR)
                self.expected = None
                return Welcome()
            case _:
                self.expected = None
                return None

    def _challenge(self, hello: Hello) -> Challenge:
        if hello.cluster != self._cluster:
            raise HandshakeError(
                f"expected a peer of cluster {self._cluster!r}, got one of cluster {hello.cluster!r}: "
                "check the scheduler address and the cluster id",
                expected=self._cluster,
                got=hello.cluster,
            )
        self._take_nonce(hello.nonce)
        self.expected = Proof
        return Challenge(self._nonce, self._sign(_LISTENER))

    def _prove(self, challenge: Challenge) -> Proof:
        self._take_nonce(challenge.nonce)
        self._verify(challenge.proof, _LISTENER)
        self.expected = Welcome
        return Proof(self._sign(_INITIATOR))

    def _take_nonce(self, nonce: bytes) -> None:
        if len(nonce) != NONCE_BYTES:
            raise HandshakeError(
                f"expected a nonce of {NONCE_BYTES} bytes, got {len(nonce)}", expected=NONCE_BYTES, got=len(nonce)
            )
        if nonce == self._nonce:
            raise HandshakeError("the peer sent this side's own nonce back: something reflects the connection")
        self._peer_nonce = nonce

    def _sign(self, label: bytes) -> bytes:
        nonces = (self._nonce, self._peer_nonce) if self._initiator else (self._peer_nonce, self._nonce)
        fields = (self._cluster.encode(), *nonces)
        signed = label + b"".join(struct.pack("<I", len(field)) + field for field in fields)
        return hmac.new(self._token, signed, hashlib.sha256).digest()

    def _verify(self, proof: bytes, label: bytes) -> None:
        if not hmac.compare_digest(proof, self._sign(label)):
            side = "listener" if self._initiator else "initiator"
            raise HandshakeError(
                f"the {side} has another token than this side: give every node of the cluster the same token"
            )
