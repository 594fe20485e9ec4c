"""The handshake by messages: proofs as OpenSSL computes them, and every way to get them wrong."""

from __future__ import annotations

import pytest

from aiokv.errors import HandshakeError
from aiokv.wire.auth import Handshake
from aiokv.wire.messages import Challenge, Hello, Message, Proof, Welcome

NONCE_I = bytes(range(32))
NONCE_L = bytes(range(32, 64))
# printf 'aiokv listener' + 02000000 'ml' 20000000 NONCE_I 20000000 NONCE_L | openssl dgst -sha256 -hmac secret
PROOF_L = bytes.fromhex("6a37e912b28f04d77c7b1f9fc90fe2d437cc61da2d1ec2b0660cb8f198ef0ae5")
PROOF_I = bytes.fromhex("261c9e870759c380367c604cd5458b850c467b8ea280d689e1490ee07a04aa9e")


def initiator(token: bytes = b"secret", cluster: str = "ml") -> Handshake:
    return Handshake(initiator=True, cluster=cluster, token=token, nonce=NONCE_I)


def listener(token: bytes = b"secret", cluster: str = "ml") -> Handshake:
    return Handshake(initiator=False, cluster=cluster, token=token, nonce=NONCE_L)


def test_the_initiator_speaks_first_and_says_its_cluster() -> None:
    assert initiator().start() == Hello("ml", NONCE_I)


def test_the_listener_waits() -> None:
    assert listener().start() is None


def test_the_listener_proves_that_it_knows_the_token() -> None:
    assert listener().receive(Hello("ml", NONCE_I)) == Challenge(NONCE_L, PROOF_L)


def test_the_initiator_proves_that_it_knows_the_token() -> None:
    side = initiator()
    assert side.receive(Challenge(NONCE_L, PROOF_L)) == Proof(PROOF_I)
    assert side.expected is Welcome


def test_the_listener_is_done_with_the_right_proof() -> None:
    side = listener()
    side.receive(Hello("ml", NONCE_I))
    assert side.receive(Proof(PROOF_I)) == Welcome()
    assert side.expected is None


def test_the_initiator_is_done_with_the_welcome() -> None:
    side = initiator()
    side.receive(Challenge(NONCE_L, PROOF_L))
    assert side.receive(Welcome()) is None
    assert side.expected is None


def test_the_initiator_refuses_a_listener_with_another_token() -> None:
    with pytest.raises(HandshakeError, match="the listener has another token"):
        initiator(b"other").receive(Challenge(NONCE_L, PROOF_L))


def test_the_listener_refuses_an_initiator_with_another_token() -> None:
    side = listener(b"other")
    side.receive(Hello("ml", NONCE_I))
    with pytest.raises(HandshakeError, match="the initiator has another token"):
        side.receive(Proof(PROOF_I))


def test_another_cluster_is_refused_with_both_names() -> None:
    with pytest.raises(HandshakeError, match="expected a peer of cluster 'ml', got one of cluster 'dev'") as caught:
        listener().receive(Hello("dev", NONCE_I))
    assert caught.value.details == {"expected": "ml", "got": "dev"}


def test_the_listeners_own_proof_is_not_accepted_from_the_initiator() -> None:
    side = listener()
    challenge = side.receive(Hello("ml", NONCE_I))
    assert isinstance(challenge, Challenge)
    with pytest.raises(HandshakeError, match="another token"):
        side.receive(Proof(challenge.proof))


@pytest.mark.parametrize("proof", [b"", PROOF_I[:-1], PROOF_I + b"\0"])
def test_a_proof_of_another_length_is_refused(proof: bytes) -> None:
    side = listener()
    side.receive(Hello("ml", NONCE_I))
    with pytest.raises(HandshakeError, match="another token"):
        side.receive(Proof(proof))


def test_an_initiator_refuses_its_own_nonce() -> None:
    with pytest.raises(HandshakeError, match="own nonce"):
        initiator().receive(Challenge(NONCE_I, PROOF_L))


def test_a_listener_refuses_its_own_nonce() -> None:
    with pytest.raises(HandshakeError, match="own nonce"):
        listener().receive(Hello("ml", NONCE_L))


@pytest.mark.parametrize("nonce", [b"", NONCE_I[:-1], NONCE_I + b"\0"])
def test_a_nonce_of_another_length_is_refused(nonce: bytes) -> None:
    with pytest.raises(HandshakeError, match=f"expected a nonce of 32 bytes, got {len(nonce)}"):
        listener().receive(Hello("ml", nonce))


def test_an_own_nonce_of_another_length_is_a_bug() -> None:
    with pytest.raises(ValueError, match="nonce must be 32 random bytes, got 16"):
        Handshake(initiator=True, cluster="ml", token=b"", nonce=b"n" * 16)


@pytest.mark.parametrize("message", [Challenge(NONCE_L, PROOF_L), Proof(PROOF_I), Welcome()])
def test_a_message_out_of_order_is_refused(message: Message) -> None:
    with pytest.raises(HandshakeError, match=f"expected handshake message Hello, got {type(message).__name__}"):
        listener().receive(message)


def test_nothing_is_accepted_after_the_handshake() -> None:
    side = listener()
    side.receive(Hello("ml", NONCE_I))
    side.receive(Proof(PROOF_I))
    with pytest.raises(HandshakeError, match="expected handshake message none, got Proof"):
        side.receive(Proof(PROOF_I))


def test_fields_cannot_be_shifted_into_each_other() -> None:
    first = listener(cluster="ml").receive(Hello("ml", NONCE_I))
    longer = Handshake(initiator=False, cluster="ml\0", token=b"secret", nonce=NONCE_L)
    second = longer.receive(Hello("ml\0", NONCE_I[1:] + b"\0"))
    assert isinstance(first, Challenge)
    assert isinstance(second, Challenge)
    assert first.proof != second.proof
