"""A scenario: what is simulated, read from a TOML file. Times are seconds, sizes are bytes."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from aiokv.errors import ConfigError
from sim.compute import Law, Recorded
from sim.decoding import closest, decode, mistake
from sim.faults import AnyFault, Join, Nodes
from sim.mistakes import first_mistake
from sim.models import MODELS
from sim.sections import (
    SCHEDULER,
    ChangeSection,
    ClusterSection,
    Count,
    JobSection,
    LearningSection,
    NetworkSection,
    Positive,
    Section,
    ServerSection,
    StopSection,
    TensorSection,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.resources.abc import Traversable


class Scenario(Section, frozen=True, kw_only=True):
    """What is simulated.

    Every worker joins, initialises the tensors and then takes `steps` steps: compute, then push and pull all tensors.
    The first `warmup` steps are left out of the statistics: no later moment looks like the one at which all start.
    """

    name: Annotated[str, Meta(pattern=r"^[\w.-]*$", max_length=100)] = ""
    """Also names the files that are written; the stem of the file unless it says another."""
    title: str = ""
    policies: Annotated[tuple[str, ...], Meta(min_length=1)] = ("bsp", "asp")
    steps: Count
    warmup: Annotated[int, Meta(ge=0)] = 0
    cluster: ClusterSection
    compute: Law
    slow: dict[str, Positive] = msgspec.field(default_factory=dict)
    """How many times slower than the law a worker is, by name."""
    uneven: dict[str, Count] = msgspec.field(default_factory=dict)
    """How many steps a worker takes, by name, if not as many as the others."""
    network: NetworkSection = NetworkSection()
    server: ServerSection = ServerSection()
    job: JobSection = JobSection()
    tensor: Annotated[tuple[TensorSection, ...], Meta(min_length=1)] = (TensorSection(key="weights", shape=(1024,)),)
    """In the order in which a step needs them."""
    fault: tuple[AnyFault, ...] = ()
    change: tuple[ChangeSection, ...] = ()
    """Other policies from some steps on, in this order."""
    stop: StopSection = StopSection()
    learning: LearningSection = LearningSection()
    assertions: tuple[str, ...] = ()
    """What must be true of the results, as in "p95_step < 80 ms" or "asp.staleness_mean <= 7"."""

    @property
    def workers(self) -> list[str]:
        """Names of the workers, by rank; those that join come behind the others."""
        return [f"worker-{rank}" for rank in range(self.cluster.workers)] + self.comers

    @property
    def comers(self) -> list[str]:
        """Names of the workers that join while others train, in the order in which they come."""
        return [name for name in self._joining if not name.startswith("server")]

    @property
    def more_servers(self) -> list[str]:
        """Names of the servers that join while workers train, in the order in which they come."""
        return [name for name in self._joining if name.startswith("server")]

    @property
    def _joining(self) -> list[str]:
        joins = sorted((fault for fault in self.fault if isinstance(fault, Join)), key=lambda fault: fault.at)
        return [name for join in joins for name in ([join.node] if isinstance(join.node, str) else join.node)]

    @property
    def servers(self) -> list[str]:
        """Names of the servers, those that join behind the others."""
        return [f"server-{index}" for index in range(self.cluster.servers)] + self.more_servers

    @property
    def nodes(self) -> list[str]:
        """Names of all nodes."""
        return [SCHEDULER, *self.servers, *self.workers]

    def steps_of(self, worker: str) -> int:
        """Return how many steps a worker takes."""
        return self.uneven.get(worker, self.steps)

    def rack(self, node: str) -> int:
        """Return the number of the rack in which a node stands."""
        if node == SCHEDULER:
            return 0
        # A standby is on the machine of the server in whose process it is.
        process = node.partition("/")[0]
        return int(process.rpartition("-")[2]) % self.cluster.racks

    @property
    def tensors(self) -> list[TensorSection]:
        """The tensors of the model, or those that the file lists."""
        if self.job.model:
            return [TensorSection(key=name, shape=shape) for name, shape in MODELS[self.job.model]()]
        if not self.comers:
            return list(self.tensor)
        everybody = tuple(range(self.cluster.workers))
        # A group of all who are there from the beginning is everybody, also those who join.
        return [
            msgspec.structs.replace(tensor, group=()) if tensor.group == everybody else tensor for tensor in self.tensor
        ]

    def select(self, nodes: Nodes) -> list[str]:
        """Return the names of the nodes that are meant.

        Raises:
            ConfigError: nothing has such a name.
        """
        found: list[str] = []
        for name in (nodes,) if isinstance(nodes, str) else nodes:
            groups = {"workers": self.workers, "servers": self.servers}
            groups |= {f"rack-{rack}": self.in_rack(rack) for rack in range(self.cluster.racks)}
            known = self.nodes
            if name not in known and name not in groups:
                raise ConfigError(f"no node {name!r}{closest(name, [*known, *groups])}", got=name)
            found += groups.get(name, [name])
        return list(dict.fromkeys(found))

    def in_rack(self, rack: int) -> list[str]:
        """Return the workers and servers of a rack."""
        return [name for name in (*self.servers, *self.workers) if self.rack(name) == rack]


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of scenario files, after reading them as TOML."""
    return msgspec.json.schema(Scenario)


def shipped_scenarios() -> list[str]:
    """Return the names of the scenarios that come with the simulator."""
    return sorted(entry.name.removesuffix(".toml") for entry in _shipped().iterdir() if entry.name.endswith(".toml"))


def _shipped() -> Traversable:
    return resources.files("sim") / "scenarios"


def read_source(source: str) -> tuple[bytes, str]:
    """Return the content of a scenario file, and its name for messages.

    Args:
        source: path of a TOML file, or the name of a scenario that comes with the simulator.

    Raises:
        ConfigError: no such file.
    """
    if source in shipped_scenarios():
        file = f"{source}.toml"
        return (_shipped() / file).read_bytes(), file
    try:
        return Path(source).read_bytes(), source
    except FileNotFoundError:
        known = ", ".join(shipped_scenarios())
        hint = closest(source, shipped_scenarios())
        raise ConfigError(f"no scenario file {source!r}; scenarios that come along: {known}{hint}") from None
    except OSError as error:
        raise ConfigError(f"can't read the scenario {source!r}: {error.strerror}") from None


def load_scenario(source: str, changes: Sequence[tuple[str, Any]] = ()) -> Scenario:
    """Read a scenario.

    Args:
        source: path of a TOML file, or the name of a scenario that comes with the simulator.
        changes: keys, as in "cluster.workers", and values that stand in for those of the file.

    Raises:
        ConfigError: no such file, or something in it that can't be; names the file, the line and the key.
    """
    return parse_scenario(*read_source(source), changes)


def parse_scenario(content: bytes, file: str, changes: Sequence[tuple[str, Any]] = ()) -> Scenario:
    """Make a scenario of the content of a TOML file.

    Args:
        content: the file's bytes, UTF-8.
        file: its path, for messages; the stem is the scenario's name unless it gives one.
        changes: keys and values that stand in for those of the file.

    Raises:
        ConfigError: something in it that can't be; names the file, the line and the key.
    """
    text, scenario = decode(content, file, Scenario, changes)
    if isinstance(scenario.compute, Recorded):
        path = str(Path(file).parent / scenario.compute.file)
        scenario = msgspec.structs.replace(scenario, compute=msgspec.structs.replace(scenario.compute, file=path))
    found = first_mistake(scenario)
    if found is not None:
        raise mistake(file, text, *found, changes)
    return msgspec.structs.replace(scenario, name=scenario.name or Path(file).stem)
