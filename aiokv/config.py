"""One typed configuration, put together from layers; a later layer wins.

    defaults < TOML file < environment (DMLC_* < AIOKV_*) < arguments

`load_config` is the only door: nothing reads the environment when a module is imported. Every value is checked where it
comes in, so that a mistake is reported with the place it came from. Times are seconds, sizes are bytes.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import tomllib
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from aiokv.errors import AiokvError, ConfigError, MissingExtraError
from aiokv.types import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Config", "format_address", "is_loopback", "is_wildcard", "load_config", "parse_address"]

DEFAULT_SCHEDULER_PORT: Final = 9091
MAX_PORT: Final = 65535

_ROLES: Final = ", ".join(role.value for role in Role)

Text = Annotated[str, Meta(description="a text")]
Label = Annotated[str, Meta(max_length=200, description="a text of at most 200 characters")]
Cluster = Annotated[str, Meta(min_length=1, max_length=200, description="a text of 1 to 200 characters")]
Host = Annotated[str, Meta(min_length=1, description="a host name or address")]
Port = Annotated[int, Meta(ge=0, le=MAX_PORT, description="a port number from 0 to 65535")]
Count = Annotated[int, Meta(ge=1, description="a whole number of at least 1")]
Seconds = Annotated[float, Meta(gt=0, le=1e9, description="a positive number of seconds")]
ChunkBytes = Annotated[
    int,
    Meta(
        ge=4 << 10, le=64 << 20, multiple_of=64, description="a multiple of 64 from 4096 (4 KiB) to 67108864 (64 MiB)"
    ),
]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one node. Make it with `load_config`, which checks every value.

    Raises:
        ConfigError: the time-outs contradict each other.
    """

    role: Annotated[Role | None, Meta(description=f"one of {_ROLES}")] = None
    cluster: Cluster = "default"
    """Nodes of another cluster are refused."""
    token: Text = ""
    """The shared secret of the cluster; never shown."""
    name: Label = ""
    """The node's name; empty: the driver makes one."""
    scheduler_host: Host = "127.0.0.1"
    scheduler_port: Port = DEFAULT_SCHEDULER_PORT
    bind_host: Host = "127.0.0.1"
    """Where this node listens. A scheduler that is told nothing else listens at scheduler_host."""
    bind_port: Port = 0
    """0: any free port. A scheduler that is told nothing else listens at scheduler_port."""
    advertise_host: Text = ""
    """The address under which others reach this node; empty: derived, see `advertised_host`."""
    interface: Text = ""
    """Listen at the address of this network interface."""
    num_workers: Count = 1
    num_servers: Count = 1
    heartbeat: Seconds = 2.0
    """A node says that it is alive this often."""
    death_timeout: Seconds = 10.0
    """A node that has been silent for so long is counted as lost."""
    call_timeout: Seconds = 60.0
    join_timeout: Seconds = 120.0
    """The cluster must be complete after this time."""
    chunk_bytes: ChunkBytes = 512 * 1024
    """The most bytes of a parameter that move and are updated as one."""
    split_bytes: Annotated[int, Meta(ge=1, description="a whole number of at least 1")] = 64 * 1024
    """A parameter of at least this size is split over all servers."""
    colocate: bool = False
    """A worker also hosts a server, which it reaches in its own memory; then there are as many servers as workers."""
    max_queued_bytes: Annotated[int, Meta(ge=1 << 16, description="a whole number of at least 65536")] = 256 << 20
    """What may wait to be sent to a peer that does not read; nothing more is read from it until that has left."""
    max_open_pushes: Annotated[int, Meta(ge=1, le=1024, description="a whole number from 1 to 1024")] = 16
    """How many pushes of one key a worker may have under way; calls that would push more of it wait for their turn."""
    shared_memory: Annotated[Literal["auto", "off"], Meta(description="one of auto, off")] = "auto"
    """"auto": large payloads between processes of one host go through shared memory where the system has it (Linux)."""
    shared_memory_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            le=32 << 20,
            multiple_of=4096,
            description="a multiple of 4096 from 1048576 (1 MiB) to 33554432 (32 MiB)",
        ),
    ] = 4 << 20
    """Shared memory of one connection in each direction; one payload takes at most a quarter. Larger ones are streamed.

    A server refuses a connection's memory that is larger than its own setting.
    """
    backend: Annotated[
        Literal["auto", "reference", "cpu", "cuda"], Meta(description="one of auto, reference, cpu, cuda")
    ] = "auto"
    """What computes sums and updates. "auto": reference, and where Numba is installed cpu once a rule is set."""
    loop: Annotated[Literal["auto", "uvloop", "asyncio"], Meta(description="one of auto, uvloop, asyncio")] = "auto"

    def __post_init__(self) -> None:
        """Check what no value can say alone."""
        if not 0 < self.heartbeat < self.death_timeout < self.call_timeout <= self.join_timeout:
            got = ", ".join(f"{name} = {getattr(self, name):g}" for name in _TIMEOUTS)
            raise ConfigError(
                f"time-outs contradict each other: {_TIMEOUT_RULE} must hold, got {got}",
                expected=_TIMEOUT_RULE,
                got=got,
            )

    def __repr__(self) -> str:
        """Show everything but the token."""
        fields = (f"{name}={_shown(name, getattr(self, name))}" for name in self.__struct_fields__)
        return f"Config({', '.join(fields)})"

    def check_token(self) -> None:
        """Check that a node which listens on a network has a token; every listener calls this before it binds.

        Raises:
            ConfigError: the token is empty and bind_host is not an address of this machine's loopback.
        """
        if not self.token and not is_loopback(self.bind_host):
            raise ConfigError(
                f"listening at {self.bind_host} needs a token, or anyone on that network could join cluster "
                f"{self.cluster!r}: set AIOKV_TOKEN, the same for all nodes, or listen at 127.0.0.1",
                key="token",
                got=self.bind_host,
            )

    def advertised_host(self, bound_host: str, local_host: str) -> str:
        """Return the address under which the others reach this node.

        Args:
            bound_host: where the listener is bound.
            local_host: this end's address of the connection to the scheduler; used when the listener is bound to every
                address. The driver knows it from that connection's socket.
        """
        return self.advertise_host or (local_host if is_wildcard(bound_host) else bound_host)


_TIMEOUTS: Final = ("heartbeat", "death_timeout", "call_timeout", "join_timeout")
_TIMEOUT_RULE: Final = "heartbeat < death_timeout < call_timeout <= join_timeout"
_FIELDS: Final = {field.name: field.type for field in msgspec.structs.fields(Config)}
_SHORT: Final = "scheduler"
"""Short form of scheduler_host and scheduler_port in every layer: "host:port"."""
_FILE: Final = "config"
"""The name of the TOML file, in the environment and the arguments."""

_DMLC: Final = {
    "DMLC_ROLE": "role",
    "DMLC_PS_ROOT_URI": "scheduler_host",
    "DMLC_PS_ROOT_PORT": "scheduler_port",
    "DMLC_NUM_WORKER": "num_workers",
    "DMLC_NUM_SERVER": "num_servers",
    "DMLC_NODE_HOST": "advertise_host",
    "DMLC_INTERFACE": "interface",
}

_Layer = dict[str, tuple[Any, str]]
"""Setting -> (value, where it came from)."""


def load_config(*, environ: Mapping[str, str] | None = None, **arguments: Any) -> Config:
    """Put the configuration together from the file, the environment and the arguments.

    The file's settings stand at its top level, under the names of the fields of `Config`. Its path is the argument
    `config` or AIOKV_CONFIG. Environment variables are AIOKV_<FIELD>; an empty one counts as not set. Every layer
    also knows `scheduler`, "host:port", for scheduler_host and scheduler_port.

    Args:
        environ: the environment; None: that of this process.
        arguments: fields of `Config`, `scheduler` or `config`; None counts as not given.

    Raises:
        ConfigError: an unknown name, a value that can't be, settings that contradict each other, or no such file.
    """
    variables = os.environ if environ is None else environ
    dmlc, own = _environment_layers(variables)
    given: _Layer = {name: (value, f"argument {name!r}") for name, value in arguments.items() if value is not None}
    file = given.pop(_FILE, None) or own.pop(_FILE, None)
    own.pop(_FILE, None)
    layers = [(_file_layer(*file), True)] if file else []
    layers += [(dmlc, False), (own, False), (given, True)]
    merged: _Layer = {}
    for layer, strict in layers:
        _merge(merged, _checked(layer, strict=strict))
    return _build(merged)


def _environment_layers(variables: Mapping[str, str]) -> tuple[_Layer, _Layer]:
    names = {f"AIOKV_{name.upper()}": name for name in (*_FIELDS, _SHORT, _FILE)}
    dmlc: _Layer = {_DMLC[name]: (value, name) for name, value in variables.items() if name in _DMLC and value}
    own: _Layer = {}
    for name, value in variables.items():
        if not name.startswith("AIOKV_"):
            continue
        if name not in names:
            raise _unknown("environment variable", name, "the environment", list(names))
        if value:
            own[names[name]] = (value, name)
    return dmlc, own


def _file_layer(path: Any, origin: str) -> _Layer:
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file {str(path)!r} (from {origin}): {error.strerror or error}",
            key=_FILE,
            source=origin,
            got=str(path),
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}", key=_FILE, source=origin, got=str(path)) from None
    return {name: (value, str(path)) for name, value in values.items()}


def _checked(layer: _Layer, *, strict: bool) -> _Layer:
    """Check a layer's names and values, and write its short forms out."""
    checked: _Layer = {}
    for name, (value, origin) in layer.items():
        if name == _SHORT:
            continue
        if name not in _FIELDS:
            raise _unknown("setting", name, origin, [*_FIELDS, _SHORT])
        checked[name] = (_convert(name, value, origin, strict=strict), origin)
    if _SHORT in layer:
        value, origin = layer[_SHORT]
        try:
            host, port = parse_address(value)
        except ConfigError as error:
            raise ConfigError(f"{_SHORT}: {error.message} (from {origin})", **error.details) from None
        for name, part in (("scheduler_host", host), ("scheduler_port", port)):
            other, where = checked.setdefault(name, (part, origin))
            if other != part:
                raise ConfigError(
                    f"{_SHORT} = {value!r} (from {origin}) and {name} = {other!r} (from {where}) "
                    f"contradict each other; give one of them",
                    key=name,
                    expected=part,
                    got=other,
                )
    return checked


def _convert(name: str, value: Any, origin: str, *, strict: bool) -> Any:
    wanted = _FIELDS[name]
    try:
        return msgspec.convert(value, wanted, strict=strict)
    except msgspec.ValidationError:
        expected = wanted.__metadata__[-1].description
        got = _shown(name, value)
        raise ConfigError(
            f"{name} must be {expected}, got {got} (from {origin})", key=name, source=origin, expected=expected, got=got
        ) from None


def _merge(merged: _Layer, layer: _Layer) -> None:
    """Put a layer over the others. An interface is another way to say bind_host, so each takes the other's place."""
    has_interface = bool(layer.get("interface", ("", ""))[0])
    if has_interface and "bind_host" in layer:
        origins = f"{layer['interface'][1]}, {layer['bind_host'][1]}"
        raise ConfigError(
            f"interface and bind_host both say where to listen: give one of them (from {origins})", key="interface"
        )
    if has_interface:
        merged.pop("bind_host", None)
    elif "bind_host" in layer:
        merged.pop("interface", None)
    merged.update(layer)


def _build(merged: _Layer) -> Config:
    values = {name: value for name, (value, _) in merged.items()}
    if values.get("interface"):
        values["bind_host"] = _interface_address(values["interface"], merged["interface"][1])
    if values.get("role") is Role.SCHEDULER:
        # Everybody looks for the scheduler there, so listening anywhere else has to be asked for.
        for name in ("host", "port"):
            if f"scheduler_{name}" in values:
                values.setdefault(f"bind_{name}", values[f"scheduler_{name}"])
        values.setdefault("bind_port", DEFAULT_SCHEDULER_PORT)
    try:
        return Config(**values)
    except ConfigError as error:
        origins = ", ".join(f"{name} from {merged[name][1]}" for name in _TIMEOUTS if name in merged)
        raise ConfigError(f"{error.message} ({origins}; the others are defaults)", **error.details) from None


def _interface_address(name: str, origin: str) -> str:
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


def _unknown(kind: str, name: str, origin: str, known: list[str]) -> AiokvError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
    where = "" if origin == "the environment" or origin.startswith("argument") else f" in {origin}"
    return ConfigError(
        f"unknown {kind} {name!r}{where}; {hint}",
        key=name,
        source=origin,
        expected=close[0] if close else None,
        got=name,
    )


def _shown(name: str, value: Any) -> str:
    if name == "token":
        return "'***'" if value else "''"
    return repr(value.value) if isinstance(value, Role) else repr(value)


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
