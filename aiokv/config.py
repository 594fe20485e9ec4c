"""One typed configuration, put together from layers; a later layer wins.

    defaults < TOML file < environment (DMLC_* < AIOKV_*) < arguments

`load_config` is the only door: nothing reads the environment when a module is imported. Every value is checked where it
comes in, so that a mistake is reported with the place it came from. Times are seconds, sizes are bytes.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from aiokv.addresses import MAX_PORT, interface_address, is_loopback, is_wildcard, parse_address
from aiokv.errors import ConfigError
from aiokv.layers import (
    FILE,
    TRAINING,
    Layer,
    argument_layer,
    convert,
    environment_layer,
    file_layers,
    says,
    shown,
    types_of,
    unknown,
)
from aiokv.types import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_SCHEDULER_PORT: Final = 9091

_ROLES: Final = ", ".join(role.value for role in Role)

Text = Annotated[str, Meta(description="a text")]
Label = Annotated[str, Meta(max_length=200, description="a text of at most 200 characters")]
Cluster = Annotated[str, Meta(min_length=1, max_length=200, description="a text of 1 to 200 characters")]
Host = Annotated[str, Meta(min_length=1, description="a host name or address")]
Port = Annotated[int, Meta(ge=0, le=MAX_PORT, description="a port number from 0 to 65535")]
Count = Annotated[int, Meta(ge=1, description="a whole number of at least 1")]
Flag = Annotated[bool, Meta(description="true or false")]
Limit = Annotated[float, Meta(ge=0, description="a number of at least 0")]
Bytes = Annotated[int, Meta(ge=0, description="a whole number of at least 0")]
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
        ConfigError: the time-outs contradict each other, or something is missing for TLS.
    """

    role: Annotated[Role | None, Meta(description=f"one of {_ROLES}"), says("What this node does.")] = None
    cluster: Annotated[Cluster, says("Nodes of another cluster are refused.")] = "default"
    token: Annotated[Text, says("The shared secret of the cluster; never shown.")] = ""
    name: Annotated[Label, says("The node's name; empty: one is made.")] = ""
    scheduler_host: Annotated[Host, says("Where the scheduler is.")] = "127.0.0.1"
    scheduler_port: Annotated[Port, says("Where the scheduler listens.")] = DEFAULT_SCHEDULER_PORT
    bind_host: Annotated[
        Host, says("Where this node listens. A scheduler that is told nothing else listens at scheduler_host.")
    ] = "127.0.0.1"
    bind_port: Annotated[
        Port, says("0: any free port. A scheduler that is told nothing else listens at scheduler_port.")
    ] = 0
    advertise_host: Annotated[
        Text, says("The address under which others reach this node; empty: the one that they can see.")
    ] = ""
    advertise_port: Annotated[
        Port, says("The port under which others reach this node, where it is not the one that it listens at; 0: it is.")
    ] = 0
    interface: Annotated[Text, says("Listen at the address of this network interface.")] = ""
    num_workers: Annotated[Count, says("Workers of the cluster.")] = 1
    num_servers: Annotated[Count, says("Servers of the cluster.")] = 1
    num_places: Annotated[
        Bytes,
        says(
            "For so many places keys are cut; each server has some, and servers that join get some of those. "
            "0: one for each server. The scheduler's setting counts for all."
        ),
    ] = 0
    heartbeat: Annotated[Seconds, says("A node says that it is alive this often.")] = 2.0
    death_timeout: Annotated[Seconds, says("A node that has been silent for so long is counted as lost.")] = 10.0
    reconnect_grace: Annotated[
        Limit,
        says(
            "A node whose connection to the scheduler has ended is not lost if it is back in so many seconds, at most "
            "death_timeout. 0: it is lost at once."
        ),
    ] = 1.0
    settle_time: Annotated[
        Limit,
        says(
            "Where processes may join later, a scheduler waits for so many seconds from its start on before a cluster "
            "begins or goes on: members of an earlier one look for it every second. 0: it is the first one there."
        ),
    ] = 1.5
    call_timeout: Annotated[Seconds, says("How long a call waits that is told nothing else.")] = 60.0
    join_timeout: Annotated[Seconds, says("The cluster must be complete after this time.")] = 120.0
    on_worker_loss: Annotated[
        Literal["fail", "shrink", "respawn"],
        Meta(description="one of fail, shrink, respawn"),
        says(
            "When a worker is lost. fail: calls that need it fail. shrink: the others go on without it. respawn: they "
            "wait until another process has taken its name and place. The scheduler's setting counts for all."
        ),
    ] = "fail"
    respawn_timeout: Annotated[
        Seconds,
        says(
            "With respawn, and with shrink at min_workers: a worker whose place nobody has taken after this time is "
            "lost for good."
        ),
    ] = 30.0
    min_workers: Annotated[
        Count, says("With shrink, or where workers may join: fewer workers do not go on; they wait for others.")
    ] = 1
    max_workers: Annotated[
        Bytes,
        says(
            "Workers may join a running job until there are so many, also in the place of those that have left. 0: the "
            "job goes on with those of its beginning."
        ),
    ] = 0
    replication: Annotated[
        Literal[1, 2],
        Meta(description="1 or 2"),
        says(
            "On how many servers every parameter is. 2: when a server is lost, another one that has a copy takes its "
            "place, and nothing is lost. The scheduler's setting counts for all."
        ),
    ] = 1
    elastic_servers: Annotated[
        Flag,
        says(
            "Servers may come while the cluster is there, and take over parts of others that have more than one. The "
            "scheduler's setting counts for all. With replication = 2 they always may."
        ),
    ] = False
    chunk_bytes: Annotated[ChunkBytes, says("The most bytes of a parameter that move and are updated as one.")] = (
        512 * 1024
    )
    split_bytes: Annotated[Count, says("A parameter of at least this size is split over all servers.")] = 64 * 1024
    colocate: Annotated[
        Flag,
        says(
            "A worker also hosts a server, which it reaches in its own memory; then there are as many servers as "
            "workers."
        ),
    ] = False
    max_queued_bytes: Annotated[
        int,
        Meta(ge=1 << 16, description="a whole number of at least 65536"),
        says("What may wait to be sent to a peer that does not read; nothing more is read from it meanwhile."),
    ] = 256 << 20
    max_held_bytes: Annotated[
        Bytes,
        says(
            "What a server may hold of payloads that are no part of a value yet; beyond it, who sends more is refused. "
            "0: half of the machine's memory."
        ),
    ] = 0
    max_held_bytes_each: Annotated[
        Bytes, says("The same for the payloads of one connection. 0: as much as of all.")
    ] = 0
    max_connections: Annotated[Count, says("Connections that a listener has at a time; more are refused.")] = 4096
    max_handshakes: Annotated[
        Count, says("How many of them may be those of peers that have not proved yet that they know the token.")
    ] = 256
    connection_rate: Annotated[
        float,
        Meta(gt=0, le=1e9, description="a positive number"),
        says("Connections a second that a listener takes from one address, after a first burst of ten times as many."),
    ] = 100.0
    checksum: Annotated[
        Literal["off", "crc32c"],
        Meta(description="one of off, crc32c"),
        says("crc32c: every frame has a checksum and is refused when it does not fit. The same for all nodes."),
    ] = "off"
    tls_cert: Annotated[
        Text, says("Path of this node's certificate, and of those that lead to the authority, as PEM. Turns TLS on.")
    ] = ""
    tls_key: Annotated[Text, says("Path of the certificate's private key, as PEM, without a passphrase.")] = ""
    tls_ca: Annotated[
        Text, says("Path of the certificate of the cluster's own authority, as PEM; it must have signed all others.")
    ] = ""
    tls_mutual: Annotated[
        Flag, says("With TLS: a listener refuses who has no certificate of the authority, whatever else it knows.")
    ] = True
    tls_names: Annotated[
        Flag, says("With TLS: a listener's certificate must name the host or the address at which it was reached.")
    ] = False
    residual_folder: Annotated[
        Text,
        says(
            "A folder of a worker's machine: there it keeps, step by step, what compression has left of its gradients, "
            "for the process that takes its place when it is lost (on_worker_loss = 'respawn'); empty: nowhere."
        ),
    ] = ""
    checkpoint_folder: Annotated[
        Text,
        says(
            "A folder, or URL of one: there are the checkpoints of the cluster, and files are saved to and loaded from "
            "it and nowhere else; empty: anywhere."
        ),
    ] = ""
    checkpoint_every: Annotated[
        Bytes,
        says("The scheduler's: a checkpoint of the whole cluster after every so many rounds. 0: none is made so."),
    ] = 0
    checkpoint_seconds: Annotated[
        Limit, says("The scheduler's: a checkpoint of the whole cluster every so many seconds. 0: none is made so.")
    ] = 0.0
    checkpoint_keep: Annotated[Count, says("The scheduler's: how many checkpoints of the whole cluster stay.")] = 3
    resume: Annotated[
        Text,
        says(
            "The scheduler's: the servers begin with a checkpoint. latest: the newest complete one in "
            "checkpoint_folder, if there is one; or path or URL of a folder of checkpoints, or of one."
        ),
    ] = ""
    check_finite: Annotated[
        Flag, says("A worker refuses to push NaN and infinities, which takes a look at every gradient.")
    ] = False
    max_norm: Annotated[
        Limit,
        says("A worker refuses to push what has a larger Euclidean norm, all keys of the call together. 0: any may."),
    ] = 0.0
    max_norm_ratio: Annotated[
        Limit,
        says(
            "It refuses what has a norm so many times as large as the median of the last 64 that it has pushed of the "
            "same keys, from 16 of them on. 0: any may."
        ),
    ] = 0.0
    max_open_pushes: Annotated[
        int,
        Meta(ge=1, le=1024, description="a whole number from 1 to 1024"),
        says("Pushes of one key that a worker may have under way; calls that would push more of it wait."),
    ] = 16
    leave_on_sigterm: Annotated[
        Flag,
        says("A worker that gets SIGTERM, in its main thread, calls plan_leave: it leaves behind one of its steps."),
    ] = False
    shared_memory: Annotated[
        Literal["auto", "off"],
        Meta(description="one of auto, off"),
        says("auto: large payloads between processes of one host go through shared memory where there is (Linux)."),
    ] = "auto"
    shared_memory_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            le=32 << 20,
            multiple_of=4096,
            description="a multiple of 4096 from 1048576 (1 MiB) to 33554432 (32 MiB)",
        ),
        says(
            "Shared memory of one connection in each direction; one payload takes at most a quarter, larger ones are "
            "streamed. A server refuses more than its own setting."
        ),
    ] = 4 << 20
    backend: Annotated[
        Literal["auto", "reference", "cpu", "cuda"],
        Meta(description="one of auto, reference, cpu, cuda"),
        says("What computes sums and updates. auto: reference, and where Numba is installed cpu once a rule is set."),
    ] = "auto"
    device: Annotated[
        str,
        Meta(pattern=r"^(cpu|cuda(:\d+(,\d+)*)?)$", description="cpu, cuda, or cuda: with numbers, as cuda:0,1"),
        says("Where a server keeps its parameters and computes: cpu, all CUDA devices, or some of them."),
    ] = "cpu"
    loop: Annotated[
        Literal["auto", "uvloop", "asyncio"],
        Meta(description="one of auto, uvloop, asyncio"),
        says("The event loop. auto: uvloop where it is installed."),
    ] = "auto"
    plugins: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")], ...],
        Meta(description="a list of modules' names"),
        says(
            "Modules that a server imports, for the update rules and commands that they register. In the environment: "
            "names with commas between them."
        ),
    ] = ()

    def __post_init__(self) -> None:
        """Check what no value can say alone."""
        self._check_timeouts()
        if self.role is Role.SCHEDULER:
            self.check_workers()
            self.check_replication()
            self.check_places()
        self._check_tls()
        self._check_checkpoints()

    def _check_checkpoints(self) -> None:
        wishes = {
            "checkpoint_every": self.checkpoint_every,
            "checkpoint_seconds": self.checkpoint_seconds,
            "resume": "latest" if self.resume == "latest" else "",
        }
        got = " and ".join(f"{name} = {value!r}" for name, value in wishes.items() if value)
        if got and not self.checkpoint_folder:
            text = "without checkpoint_folder: set it to a path or an address where all nodes find the checkpoints"
            raise ConfigError(f"got {got} {text}", key="checkpoint_folder", got=got)

    def _check_timeouts(self) -> None:
        if not 0 < self.heartbeat < self.death_timeout < self.call_timeout <= self.join_timeout:
            got = self._shown(_TIMEOUTS)
            raise ConfigError(
                f"time-outs contradict each other: {_TIMEOUT_RULE} must hold, got {got}",
                expected=_TIMEOUT_RULE,
                got=got,
            )
        keeps_places = self.on_worker_loss == "shrink" or self.max_workers > 0
        waits = self.on_worker_loss == "respawn" or (keeps_places and self.min_workers > 1)
        if waits and self.death_timeout + self.respawn_timeout > self.call_timeout:
            rule = "death_timeout + respawn_timeout <= call_timeout"
            got = self._shown(_RESPAWN_TIMEOUTS)
            raise ConfigError(
                f"time-outs contradict each other: with on_worker_loss = {self.on_worker_loss!r}, {rule} must hold, or "
                f"calls would give up before the worker that they wait for can be back; got {got}",
                expected=rule,
                got=got,
            )

    def _shown(self, names: Sequence[str]) -> str:
        return ", ".join(f"{name} = {getattr(self, name):g}" for name in names)

    def check_workers(self) -> None:
        """Check that the number of workers lies between its limits; called as `check_replication` is.

        Raises:
            ConfigError: there are too few, or too many.
        """
        if self.min_workers > self.num_workers:
            text = f"min_workers = {self.min_workers} is more than num_workers = {self.num_workers}"
            raise ConfigError(text, expected=self.num_workers, got=self.min_workers)
        if 0 < self.max_workers < self.num_workers:
            text = f"max_workers = {self.max_workers} is less than num_workers = {self.num_workers}"
            raise ConfigError(text, expected=self.num_workers, got=self.max_workers)

    def _check_tls(self) -> None:
        if self.uses_tls and not self.tls_ca:
            raise ConfigError("tls_cert and tls_key need tls_ca, or this node could not tell who the others are")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key belong together: give both, or none of them")

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted; it must be the same for all nodes."""
        return bool(self.tls_ca or self.tls_cert or self.tls_key)

    def __repr__(self) -> str:
        """Show everything but the token."""
        fields = (f"{name}={shown(name, getattr(self, name))}" for name in self.__struct_fields__)
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

    def check_replication(self, servers: int | None = None) -> None:
        """Check that there are enough servers; who starts a cluster calls this, the others do not know how many.

        Args:
            servers: how many there are; None: `num_servers`.

        Raises:
            ConfigError: there are too few.
        """
        servers = self.num_servers if servers is None else servers
        if self.replication > servers:
            text = f"replication = {self.replication} needs at least {self.replication} servers, got {servers}"
            raise ConfigError(text, key="num_servers", expected=self.replication, got=servers)

    def check_places(self, servers: int | None = None) -> None:
        """Check that each server has a place; called as `check_replication` is.

        Args:
            servers: how many there are; None: `num_servers`.

        Raises:
            ConfigError: there are too few places.
        """
        servers = self.num_servers if servers is None else servers
        if 0 < self.num_places < servers:
            text = f"num_places = {self.num_places} is less than the number of servers, {servers}"
            raise ConfigError(text, key="num_places", expected=servers, got=self.num_places)

    def advertised_host(self, bound_host: str, local_host: str) -> str:
        """Return the address under which the others reach this node.

        Args:
            bound_host: where the listener is bound.
            local_host: this end's address of the connection to the scheduler; used when the listener is bound to every
                address. The driver knows it from that connection's socket.
        """
        return self.advertise_host or (local_host if is_wildcard(bound_host) else bound_host)


_TIMEOUTS: Final = ("heartbeat", "death_timeout", "call_timeout", "join_timeout")
_RESPAWN_TIMEOUTS: Final = ("death_timeout", "respawn_timeout", "call_timeout")
_TIMEOUT_RULE: Final = "heartbeat < death_timeout < call_timeout <= join_timeout"
_FIELDS: Final = types_of(Config)
_SHORT: Final = "scheduler"
"""Short form of scheduler_host and scheduler_port in every layer: "host:port"."""

_DMLC: Final = {
    "DMLC_ROLE": "role",
    "DMLC_PS_ROOT_URI": "scheduler_host",
    "DMLC_PS_ROOT_PORT": "scheduler_port",
    "DMLC_NUM_WORKER": "num_workers",
    "DMLC_NUM_SERVER": "num_servers",
    "DMLC_NODE_HOST": "advertise_host",
    "DMLC_INTERFACE": "interface",
}


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
    config, _ = trace_config(environ=environ, **arguments)
    return config


def trace_config(*, environ: Mapping[str, str] | None = None, **arguments: Any) -> tuple[Config, dict[str, str]]:
    """Put the configuration together as `load_config` does; return also where each setting that was given comes from.

    Raises:
        ConfigError: as `load_config`.
    """
    variables = os.environ if environ is None else environ
    given = argument_layer(arguments)
    # The settings of training are loaded by who trains.
    own = environment_layer(variables, "AIOKV_", (*_FIELDS, _SHORT, FILE), ignored=f"AIOKV_{TRAINING.upper()}_")
    dmlc: Layer = {_DMLC[name]: (value, name) for name, value in variables.items() if name in _DMLC and value}
    file = given.pop(FILE, None) or own.pop(FILE, None)
    own.pop(FILE, None)
    layers = [(file_layers(*file)[0], True)] if file else []
    layers += [(dmlc, False), (own, False), (given, True)]
    merged: Layer = {}
    for layer, strict in layers:
        _merge(merged, _checked(layer, strict=strict))
    return _build(merged), {name: origin for name, (_, origin) in merged.items()}


def _checked(layer: Layer, *, strict: bool) -> Layer:
    """Check a layer's names and values, and write its short forms out."""
    checked: Layer = {}
    for name, (value, origin) in layer.items():
        if name == _SHORT:
            continue
        if name not in _FIELDS:
            raise unknown("setting", name, origin, [*_FIELDS, _SHORT])
        checked[name] = (convert(name, value, _FIELDS[name], origin, strict=strict), origin)
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


def _merge(merged: Layer, layer: Layer) -> None:
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


def _build(merged: Layer) -> Config:
    values = {name: value for name, (value, _) in merged.items()}
    if values.get("interface"):
        values["bind_host"] = interface_address(values["interface"], merged["interface"][1])
    if values.get("role") is Role.SCHEDULER:
        # Everybody looks for the scheduler there, so listening anywhere else has to be asked for.
        for name in ("host", "port"):
            if f"scheduler_{name}" in values:
                values.setdefault(f"bind_{name}", values[f"scheduler_{name}"])
        values.setdefault("bind_port", DEFAULT_SCHEDULER_PORT)
    try:
        return Config(**values)
    except ConfigError as error:
        named = [name for name in _FIELDS if re.search(rf"\b{name} = ", error.message)]
        origins = [f"{name} from {merged[name][1]}" for name in named if name in merged]
        if not origins:
            raise
        others = "; the others are defaults" if len(origins) < len(named) else ""
        raise ConfigError(f"{error.message} ({', '.join(origins)}{others})", **error.details) from None
