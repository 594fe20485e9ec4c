"""Every error that aiokv raises, and the numeric code by which it travels.

    AiokvError
    ├── ConfigError                 settings that cannot work, or contradict each other
    │   └── StoreNameError          a store's name is no text (also TypeError)
    ├── MissingExtraError           an optional package is not installed (also ImportError)
    ├── DeviceMemoryError           a device has not enough memory (also MemoryError)
    ├── BindError                   the listening address is taken or not ours (also OSError)
    ├── ClosedError                 the client, server or scheduler is closed
    ├── ProtocolError               the peer does not speak this protocol
    │   ├── LimitError              a length over its limit
    │   │   └── OverloadedError     too many connections, or too much memory held
    │   ├── ChecksumError           a frame is not what was sent
    │   └── HandshakeError          wrong version, cluster, token or certificate
    ├── MembershipError
    │   ├── ClusterFullError        all places are taken
    │   ├── WorkerLostError         a worker that the call needs is gone
    │   ├── ServerLostError         a server that the call needs is gone
    │   ├── SchedulerLostError      the scheduler is gone
    │   │   └── OtherSettingsError  one is there that was started with other settings than the cluster has
    │   └── StaleEpochError         the cluster has gone on without this process (STALE_EPOCH)
    ├── CallTimeoutError            a deadline passed (also TimeoutError)
    │   ├── JoinTimeoutError        the cluster did not become complete in time
    │   ├── RoundTimeoutError       ranks did not contribute in time
    │   └── BarrierTimeoutError     ranks did not arrive in time
    ├── KeyUseError                 a key used in a way it can't be
    │   ├── UnknownKeyError         nobody has initialised it
    │   ├── AlreadyInitializedError it has another value already
    │   ├── KeyDeletedError         it was deleted while the call was pending
    │   └── SpecMismatchError       another shape or dtype than the key has
    ├── DataError                   a file is damaged, or of another format
    ├── CodecError                  unknown codec, wrong parameter, or another one is set
    ├── NotFiniteError              a NaN or an infinity where a codec needs numbers
    ├── NormLimitError              a gradient whose norm is over the worker's limit
    ├── OptimizerError              unknown rule, wrong parameter, or another rule is set
    ├── UpdateRefusedError          the update that a push belongs to was not made
    │   └── SumOverflowError        a sum of whole numbers does not fit the key's dtype
    ├── PolicyError                 unknown policy, wrong option, or another policy is set
    └── CommandError                unknown command, wrong parameter, or it failed on a server

A driver turns a peer's mistake into a frame with the code, the text and the details; the caller's side turns it back
into the same class.
"""

from __future__ import annotations

from typing import Any, ClassVar


class AiokvError(Exception):
    """Base of all errors of aiokv.

    Args:
        message: what was wrong, expected and got, and what to do, in one or two sentences.
        details: machine-readable facts under fixed names: `ranks`, `key`, `keys`, `round`, `server`, `address`,
            `expected`, `got`, `path`, `offset`. Only None, bool, int, float, str and lists of them, so that they can
            travel.
    """

    code: ClassVar[int] = 1
    retriable: ClassVar[bool] = False
    """True when the same call may succeed later without any change by the caller."""
    counted: ClassVar[bool] = False
    """True when a push that ends so still counts in its round; a server that answers another error has not taken it."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class ConfigError(AiokvError):
    """Settings that cannot work or contradict each other."""

    code = 2


class StoreNameError(ConfigError, TypeError):
    """The name of a store is no text."""

    code = 6


class MissingExtraError(AiokvError, ImportError):
    """An optional package is not installed; the message names the extra to install."""

    code = 3


class DeviceMemoryError(AiokvError, MemoryError):
    """A device has not enough memory; `details`: expected, the bytes that were wanted, got.

    From a push it comes before anything is sent, from a server when its device has no room for the update.
    """

    code = 7
    counted = True


class BindError(AiokvError, OSError):
    """The listening address is taken or not this machine's; `details`: address, errno."""

    code = 4


class ClosedError(AiokvError):
    """The object is closed, or was never opened."""

    code = 5


class ProtocolError(AiokvError):
    """The peer sent something that this protocol does not allow."""

    code = 10


class LimitError(ProtocolError):
    """A length in a header is over its limit; nothing was allocated."""

    code = 11


class OverloadedError(LimitError):
    """The node has as many connections as it may, or holds as many bytes; `details`: limit, expected, got, address."""

    code = 13
    retriable = True


class ChecksumError(ProtocolError):
    """A frame is not what the peer has sent; `details`: key, expected, got."""

    code = 14
    retriable = True


class HandshakeError(ProtocolError):
    """Protocol version, cluster id, token, certificate or checksums do not fit, or the handshake took too long."""

    code = 12


class MembershipError(AiokvError):
    """The cluster's members do not allow the call."""

    code = 20


class ClusterFullError(MembershipError):
    """All declared places are taken, or the name is."""

    code = 21


class WorkerLostError(MembershipError):
    """Workers that the call needs are gone; `details`: ranks, key, round."""

    code = 22
    counted = True


class ServerLostError(MembershipError):
    """A server that the call needs is gone; `details`: server, address, keys of which it had a part."""

    code = 23
    counted = True


class SchedulerLostError(MembershipError):
    """The scheduler is gone; `details`: address."""

    code = 24


class OtherSettingsError(SchedulerLostError):
    """The scheduler was started again with other settings than the cluster has; `details`: expected, got, address.

    The cluster goes on without it, and waits for one that has its settings.
    """

    code = 26


class StaleEpochError(MembershipError):
    """The cluster has gone on without this process: another one has its name and rank, or the others were told that it
    is lost; `details`: ranks. What it sends has no effect.
    """

    code = 25


class CallTimeoutError(AiokvError, TimeoutError):
    """The call's deadline passed; the message names what was missing."""

    code = 30
    retriable = True


class JoinTimeoutError(CallTimeoutError):
    """The cluster did not become complete in time; the message names the missing nodes."""

    code = 31


class RoundTimeoutError(CallTimeoutError):
    """Ranks did not contribute in time; `details`: ranks, key, round. What was pushed stays counted in its round."""

    code = 32
    retriable = False
    counted = True


class BarrierTimeoutError(CallTimeoutError):
    """Ranks did not arrive at a barrier in time; `details`: ranks. The barrier can be used again."""

    code = 33


class KeyUseError(AiokvError):
    """A key of the wrong type, out of range, or of the other kind than the cluster uses."""

    code = 40


class UnknownKeyError(KeyUseError):
    """Nobody has initialised the key; `details`: key."""

    code = 41


class AlreadyInitializedError(KeyUseError):
    """The key was initialised with another value already; `details`: key."""

    code = 42


class KeyDeletedError(KeyUseError):
    """The key was deleted while the call was pending; `details`: key. Its rounds are no more."""

    code = 44
    counted = True


class SpecMismatchError(KeyUseError):
    """Another shape or dtype than the key has; `details`: key, expected, got."""

    code = 43


class DataError(AiokvError):
    """A file is damaged or of another format; `details`: path, and offset, expected and got where they are known."""

    code = 60


class CodecError(AiokvError):
    """Unknown codec of gradients, wrong parameter, or other workers have set another one."""

    code = 70


class NotFiniteError(AiokvError):
    """An array has a NaN or an infinity, which no codec can send; `details`: key, expected, got.

    From a push it comes before anything is sent, from a server when it is a value that was asked for.
    """

    code = 71
    counted = True


class NormLimitError(AiokvError):
    """The norm of a gradient is over the worker's limit, or no number; `details`: keys, expected, got.

    It comes before anything is sent.
    """

    code = 72


class OptimizerError(AiokvError):
    """Unknown update rule, wrong parameter, or another rule is already set."""

    code = 50


class UpdateRefusedError(AiokvError):
    """The update that a push belongs to was not made: the value stays, the round is over; `details`: key, round."""

    code = 52
    counted = True


class SumOverflowError(UpdateRefusedError):
    """A sum of whole numbers does not fit the key's dtype; `details`: key, round."""

    code = 53


class PolicyError(AiokvError):
    """Unknown policy, wrong option, or the key has another policy."""

    code = 51


class CommandError(AiokvError):
    """Unknown command, wrong parameter, or it failed on a server; `details`: expected, got, server, path."""

    code = 55


def _all_subclasses(cls: type[AiokvError]) -> list[type[AiokvError]]:
    found = [cls]
    for child in cls.__subclasses__():
        found += _all_subclasses(child)
    return found


BY_CODE: dict[int, type[AiokvError]] = {cls.code: cls for cls in _all_subclasses(AiokvError)}


def from_code(code: int, message: str, details: dict[str, Any]) -> AiokvError:
    """Rebuild an error that travelled; an unknown code becomes a plain `AiokvError`."""
    error = BY_CODE.get(code, AiokvError)(message)
    # Not as keyword arguments: the other side chose the names.
    error.details = details
    return error


def is_counted(code: int) -> bool:
    """Say whether a push that a server has answered with this error still counts in its round."""
    return BY_CODE.get(code, AiokvError).counted
