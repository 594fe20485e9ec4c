"""A scenario: what is simulated, read from a TOML file. Times are seconds, sizes are bytes."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta

from aiokv.core.keys import check_key, check_kind, check_spec
from aiokv.errors import AiokvError, ConfigError
from aiokv.policy import get_policy
from aiokv.types import TensorSpec
from sim.compute import Law
from sim.decoding import closest, decode, mistake

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Bytes = Annotated[int, Meta(ge=1, le=1 << 40)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]

SCHEDULER: Final = "scheduler"


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts of a scenario."""


class ClusterSection(Section, frozen=True, kw_only=True):
    """How many nodes there are, and the settings that they share (as in `aiokv.config`)."""

    workers: Count
    servers: Count = 1
    heartbeat: Positive = 2.0
    death_timeout: Positive = 10.0
    call_timeout: Positive = 60.0
    join_timeout: Positive = 120.0
    chunk_bytes: Bytes = 512 * 1024
    split_bytes: Bytes = 64 * 1024


class NetworkSection(Section, frozen=True, kw_only=True):
    """Every connection: seconds under way, and bytes per second in each direction."""

    latency: Seconds = 0.0
    bandwidth: Annotated[float, Meta(gt=0)] = math.inf


class ServerSection(Section, frozen=True, kw_only=True):
    """Seconds that a server's arithmetic takes for a chunk: to add a contribution, to apply an update."""

    fold: Seconds = 0.0
    apply: Seconds = 0.0


class TensorSection(Section, frozen=True, kw_only=True):
    """A parameter that every step pushes and pulls."""

    key: str | int
    shape: tuple[Annotated[int, Meta(ge=1)], ...]
    dtype: str = "float32"

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype as the library writes them."""
        return TensorSpec(self.shape, self.dtype)


class FaultSection(Section, frozen=True, kw_only=True):
    """What happens to a node at a time: it crashes (its connections break) or hangs (it only falls silent)."""

    kind: Literal["crash", "hang"]
    node: str
    at: Seconds


class Scenario(Section, frozen=True, kw_only=True):
    """What is simulated.

    Every worker joins, initialises the tensors and then takes `steps` steps: compute, then push and pull all tensors.
    The first `warmup` steps are left out of the statistics: no later moment looks like the one at which all start.
    """

    name: Annotated[str, Meta(pattern=r"^[\w.-]*$", max_length=100)] = ""
    """Also names the picture; the stem of the file unless it says another."""
    title: str = ""
    policies: Annotated[tuple[str, ...], Meta(min_length=1)] = ("bsp", "asp")
    steps: Count
    warmup: Annotated[int, Meta(ge=0)] = 0
    cluster: ClusterSection
    compute: Law
    slow: dict[str, Positive] = {}
    """How many times slower than the law a worker is, by name."""
    network: NetworkSection = NetworkSection()
    server: ServerSection = ServerSection()
    tensor: Annotated[tuple[TensorSection, ...], Meta(min_length=1)] = (TensorSection(key="weights", shape=(1024,)),)
    fault: tuple[FaultSection, ...] = ()

    @property
    def workers(self) -> list[str]:
        """Names of the workers, by rank."""
        return [f"worker-{rank}" for rank in range(self.cluster.workers)]

    @property
    def servers(self) -> list[str]:
        """Names of the servers, by index."""
        return [f"server-{index}" for index in range(self.cluster.servers)]


def shipped_scenarios() -> list[str]:
    """Return the names of the scenarios that come with the simulator."""
    return sorted(entry.name.removesuffix(".toml") for entry in _shipped().iterdir() if entry.name.endswith(".toml"))


def _shipped() -> Traversable:
    return resources.files("sim") / "scenarios"


def load_scenario(source: str) -> Scenario:
    """Read a scenario.

    Args:
        source: path of a TOML file, or the name of a scenario that comes with the simulator.

    Raises:
        ConfigError: no such file, or something in it that can't be; names the file, the line and the key.
    """
    if source in shipped_scenarios():
        file = f"{source}.toml"
        return parse_scenario((_shipped() / file).read_bytes(), file)
    path = Path(source)
    try:
        return parse_scenario(path.read_bytes(), source)
    except FileNotFoundError:
        known = ", ".join(shipped_scenarios())
        hint = closest(source, shipped_scenarios())
        raise ConfigError(f"no scenario file {source!r}; scenarios that come along: {known}{hint}") from None
    except OSError as error:
        raise ConfigError(f"can't read the scenario {source!r}: {error.strerror}") from None


def parse_scenario(content: bytes, file: str) -> Scenario:
    """Make a scenario of the content of a TOML file.

    Args:
        content: the file's bytes, UTF-8.
        file: its path, for messages; the stem is the scenario's name unless it gives one.

    Raises:
        ConfigError: something in it that can't be; names the file, the line and the key.
    """
    text, scenario = decode(content, file, Scenario)
    for check in (_check_policies, _check_times, _check_names, _check_tensors):
        found = check(scenario)
        if found is not None:
            raise mistake(file, text, *found)
    return msgspec.structs.replace(scenario, name=scenario.name or Path(file).stem)


Found = tuple[str, str] | None
"""The path of a key and what is wrong with it."""


def _check_policies(scenario: Scenario) -> Found:
    for policy in scenario.policies:
        try:
            get_policy(policy)
        except AiokvError as error:
            return "policies", str(error)
    if len(set(scenario.policies)) < len(scenario.policies):
        return "policies", f"a policy stands there twice: {', '.join(scenario.policies)}"
    return None


def _check_times(scenario: Scenario) -> Found:
    if scenario.warmup >= scenario.steps:
        return "warmup", f"expected less than steps = {scenario.steps}, got {scenario.warmup}"
    cluster = scenario.cluster
    if not cluster.heartbeat < cluster.death_timeout < cluster.call_timeout <= cluster.join_timeout:
        got = ", ".join(
            f"{name} = {getattr(cluster, name):g}"
            for name in ("heartbeat", "death_timeout", "call_timeout", "join_timeout")
        )
        return "cluster", f"expected heartbeat < death_timeout < call_timeout <= join_timeout, got {got}"
    return None


def _check_names(scenario: Scenario) -> Found:
    for name in scenario.slow:
        if name not in scenario.workers:
            last = scenario.workers[-1]
            return f"slow.{name}", f"no such worker{closest(name, scenario.workers)}; there are worker-0 to {last}"
    nodes = [SCHEDULER, *scenario.servers, *scenario.workers]
    for number, fault in enumerate(scenario.fault):
        if fault.node not in nodes:
            return f"fault[{number}].node", f"no node {fault.node!r}{closest(fault.node, nodes)}"
    return None


def _check_tensors(scenario: Scenario) -> Found:
    kind: type | None = None
    seen: list[str | int] = []
    for number, tensor in enumerate(scenario.tensor):
        try:
            kind = check_kind(check_key(tensor.key), kind)
            check_spec(tensor.key, tensor.spec)
        except AiokvError as error:
            return f"tensor[{number}]", str(error)
        if tensor.key in seen:
            return f"tensor[{number}].key", f"key {tensor.key!r} stands there twice"
        seen.append(tensor.key)
    return None
