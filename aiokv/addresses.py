"""Addresses as text: "host:port", those of this machine, and those of network interfaces."""

from __future__ import annotations

import ipaddress
from typing import Any, Final

from aiokv.errors import ConfigError, MissingExtraError

MAX_PORT: Final = 65535


def interface_address(name: str, origin: str) -> str:
    """Return the address of a network interface, of IPv4 if it has one.

    Args:
        name: of the interface, such as "eth0".
        origin: where the name comes from, for errors.

    Raises:
        ConfigError: there is no such interface, or it has no address.
        MissingExtraError: psutil is not installed.
    """
    try:
        import psutil  # noqa: PLC0415 - only who names an interface needs it
    except ImportError:
        raise MissingExtraError(
            f"finding the address of interface {name!r} needs the package 'psutil': pip install psutil, "
            f"or give the address as bind_host"
        ) from None
    interfaces = psutil.net_if_addrs()
    families = ("AF_INET", "AF_INET6")
    found = {
        family: entry.address
        for entry in reversed(interfaces.get(name, []))
        if (family := entry.family.name) in families
    }
    for family in families:
        if family in found:
            return found[family]
    known = ", ".join(sorted(interfaces))
    problem = "has no IP address" if name in interfaces else "does not exist"
    raise ConfigError(
        f"interface {name!r} (from {origin}) {problem}; there are: {known}",
        key="interface",
        source=origin,
        expected=known,
        got=name,
    )


def parse_address(text: Any) -> tuple[str, int]:
    """Split "host:port"; an IPv6 address stands in brackets, "[::1]:9091".

    Raises:
        ConfigError: it is not of that form.
    """
    expected = "host:port, with an IPv6 address in brackets"
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    host_ok = bool(colon and host) and (bracketed or ":" not in host)
    port_ok = port.isascii() and port.isdigit() and len(port) <= len(str(MAX_PORT)) and int(port) <= MAX_PORT
    if not host_ok or not port_ok:
        raise ConfigError(f"expected {expected}, got {text!r}", expected=expected, got=repr(text))
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Write an address as "host:port", the form that `parse_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach an address: 127.0.0.0/8, ::1 or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_wildcard(host: str) -> bool:
    """Say whether an address means all of this machine's addresses: 0.0.0.0 or ::."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
