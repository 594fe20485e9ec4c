"""TLS: what a node shows, what it asks for, and what went wrong. The only place that knows `ssl`.

A node belongs to the cluster when the cluster's own authority has signed its certificate. Names in certificates count
with `tls_names` only: nodes are reached at addresses that nobody knows beforehand.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, Final

from aiokv.errors import ConfigError, HandshakeError

if TYPE_CHECKING:
    from aiokv.config import Config

SECONDS: Final = 5.0
"""How long the other side may take for the handshake of TLS, and for its farewell."""

TIMES: Final[dict[str, Any]] = {"ssl_handshake_timeout": SECONDS, "ssl_shutdown_timeout": SECONDS}

PLAIN_HINT: Final = "this side uses TLS, the other one does not: turn it on for both or for neither"

UNHEARD: Final = "the listener ended the connection without a word; it may not accept this node's certificate"

_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST"})
"""What OpenSSL says of bytes that are no TLS."""


def listener_context(config: Config) -> ssl.SSLContext | None:
    """Return what a listener shows, and whom it lets in; None: it uses no TLS.

    Raises:
        ConfigError: it has no certificate, or a file can't be used.
    """
    if not config.uses_tls:
        return None
    if not config.tls_cert:
        text = "a node that listens with TLS needs a certificate of its own: set tls_cert and tls_key"
        raise ConfigError(text, key="tls_cert")
    context = _context(config, ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED if config.tls_mutual else ssl.CERT_NONE
    return context


def initiator_context(config: Config) -> ssl.SSLContext | None:
    """Return what a node that connects shows, and whom it believes; None: it uses no TLS.

    Raises:
        ConfigError: a file can't be used.
    """
    if not config.uses_tls:
        return None
    context = _context(config, ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = config.tls_names
    return context


def _context(config: Config, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    # Every Python that runs this has it, and it has no switches that could be set wrong.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    setting, path = "tls_ca", config.tls_ca
    try:
        context.load_verify_locations(path)
        if config.tls_cert:
            setting, path = "tls_cert", config.tls_cert
            # Without a function OpenSSL would ask at the terminal.
            context.load_cert_chain(path, config.tls_key, password=_no_passphrase)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{setting}: can't use {path!r}: {reason}", key=setting, got=path) from None
    return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase; give one that has none")


def is_plain(error: OSError) -> bool:
    """Say whether a handshake failed because the other side does not speak TLS."""
    return isinstance(error, ssl.SSLError) and error.reason in _NO_TLS


def describe(error: OSError) -> str:
    """Return why a handshake failed, in words for people."""
    if is_plain(error):
        return PLAIN_HINT
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"the TLS handshake failed: {error.reason.lower().replace('_', ' ')}"
    return f"the TLS handshake failed: {str(error) or 'the other side has ended the connection'}"


def refusal(error: OSError, address: str) -> HandshakeError | None:
    """Return why the side that connects can't trust the listener; None: the connection broke, so it may try again."""
    if is_plain(error) or isinstance(error, ssl.SSLCertVerificationError):
        return HandshakeError(f"no connection to {address}: {describe(error)}", address=address)
    return None
