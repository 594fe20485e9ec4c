"""A scenario: what is simulated, read from a TOML file. Times are seconds, sizes are bytes."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from aiokv.core.keys import check_key, check_kind, check_spec
from aiokv.core.merging import Merging
from aiokv.errors import AiokvError, ConfigError
from aiokv.optim import make_optimizer
from aiokv.policy import get_policy
from sim.assertions import LEARNED, OF_JOB, parse_assertion
from sim.compute import Law, Recorded, read_trace
from sim.decoding import closest, decode, mistake
from sim.faults import AnyFault, Join, Leave, Link, Nodes, Poison, Reset, Torn
from sim.models import MODELS
from sim.problems import WORKLOADS
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
from sim.updating import check_rule

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
        raise mistake(file, text, *found)
    return msgspec.structs.replace(scenario, name=scenario.name or Path(file).stem)


Found = tuple[str, str] | None
"""The path of a key and what is wrong with it."""


def first_mistake(scenario: Scenario) -> Found:
    """Return the first thing in a scenario that can't be."""
    checks = (
        *(_check_policies, _check_changes, _check_restarts, _check_times, _check_places, _check_joins, _check_names),
        *(_check_tensors, _check_trace, _check_learning, _check_assertions),
    )
    return next((found for check in checks if (found := check(scenario)) is not None), None)


def _check_policies(scenario: Scenario) -> Found:
    for policy in scenario.policies:
        try:
            get_policy(policy)
        except AiokvError as error:
            return "policies", str(error)
    if len(set(scenario.policies)) < len(scenario.policies):
        return "policies", f"a policy stands there twice: {', '.join(scenario.policies)}"
    return None


def _check_changes(scenario: Scenario) -> Found:
    before = 0
    for number, change in enumerate(scenario.change):
        place = f"change[{number}]"
        try:
            policies = [get_policy(policy) for policy in (*scenario.policies, change.policy)]
        except AiokvError as error:
            return f"{place}.policy", str(error)
        if any(policy.keeps_sum for policy in policies):
            return f"{place}.policy", "keys of policy sum keep it, and no other key can get it"
        if not before < change.after < scenario.steps:
            return f"{place}.after", f"expected {before + 1} to {scenario.steps - 1}, got {change.after}"
        before = change.after
    if scenario.change and scenario.job.cancel:
        return "job.cancel", "when a gradient is too old depends on the policy; leave out [[change]]"
    keeps_places = scenario.cluster.on_worker_loss == "respawn" or scenario.cluster.min_workers > 1
    if scenario.change and keeps_places:
        return (
            "cluster.min_workers" if scenario.cluster.min_workers > 1 else "cluster.on_worker_loss",
            "a worker that comes back does not know of other policies; leave out [[change]]",
        )
    return None


def _check_restarts(scenario: Scenario) -> Found:
    stop = scenario.stop
    if not scenario.cluster.restarts:
        return None
    if scenario.cluster.on_worker_loss == "respawn":
        return (
            "cluster.restarts",
            'workers come back by themselves with on_worker_loss = "respawn"; leave one of them out',
        )
    if scenario.change:
        return "cluster.restarts", "a job that is started again begins with its first policy; leave out [[change]]"
    if scenario.learning.workload != "none":
        return "cluster.restarts", "losses are those of one run; leave out [learning]"
    if stop.updates or stop.time < StopSection().time:
        return "cluster.restarts", "a job is started again until it is done; leave out [stop]"
    return None


def _check_times(scenario: Scenario) -> Found:
    if scenario.warmup >= scenario.steps:
        return "warmup", f"expected less than steps = {scenario.steps}, got {scenario.warmup}"
    if scenario.job.save_every and scenario.job.overlap:
        return "job.save_every", "nobody may push while all save; set overlap = false"
    first = scenario.workers[0]
    if scenario.job.save_every and scenario.steps_of(first) < scenario.steps:
        return "job.save_every", f"{first} writes, so it has to take all steps; leave it out of [uneven]"
    if scenario.job.cancel and scenario.job.overlap:
        return "job.cancel", "a computation whose layers are pushed one by one can't be abandoned; set overlap = false"
    if scenario.job.between and (scenario.job.overlap or scenario.job.cancel):
        return "job.between", "with overlap or cancel a step is not one push and one pull; set it to 0"
    if scenario.job.cancel and any(tensor.group for tensor in scenario.tensor):
        return "job.cancel", "keys of different groups go through different rounds; leave the groups out"
    cluster = scenario.cluster
    if not cluster.heartbeat < cluster.death_timeout < cluster.call_timeout <= cluster.join_timeout:
        got = ", ".join(
            f"{name} = {getattr(cluster, name):g}"
            for name in ("heartbeat", "death_timeout", "call_timeout", "join_timeout")
        )
        return "cluster", f"expected heartbeat < death_timeout < call_timeout <= join_timeout, got {got}"
    return None


def _check_places(scenario: Scenario) -> Found:
    """Look at the places for parts of the keys, and at the servers that join to get some."""
    cluster, more = scenario.cluster, scenario.more_servers
    if 0 < cluster.places < cluster.servers:
        return "cluster.places", f"expected {cluster.servers} at least, one for each server, got {cluster.places}"
    place = next((number for number, fault in enumerate(scenario.fault) if isinstance(fault, Join)), 0)
    expected = [f"server-{cluster.servers + number}" for number in range(len(more))]
    if more != expected:
        return f"fault[{place}].node", f"expected {', '.join(expected)}, in the order in which they come, got {more}"
    if more and not cluster.moves:
        return "cluster.places", f"expected more than {cluster.servers}, for servers join, got {cluster.places}"
    return None


def _check_joins(scenario: Scenario) -> Found:
    """Look at the workers that come and go while others train."""
    cluster, job, comers = scenario.cluster, scenario.job, scenario.comers
    expected = [f"worker-{cluster.workers + number}" for number in range(len(comers))]
    place = next((number for number, fault in enumerate(scenario.fault) if isinstance(fault, Join)), 0)
    if comers != expected:
        return f"fault[{place}].node", f"expected {', '.join(expected)}, in the order in which they come, got {comers}"
    if comers and cluster.workers + len(comers) > cluster.max_workers:
        most = cluster.workers + len(comers)
        return "cluster.max_workers", f"expected {most}, for that many workers are there, got {cluster.max_workers}"
    moves = comers or any(isinstance(fault, Leave) for fault in scenario.fault)
    for path, is_set in (
        ("cluster.restarts", cluster.restarts),
        ("job.cancel", job.cancel),
        ("job.overlap", job.overlap),
        ("job.save_every", job.save_every),
        ("learning.workload", scenario.learning.workload != "none"),
    ):
        if moves and is_set:
            return path, "the workers are the same from the beginning to the end there; leave out joins and leaves"
    changed = (change.policy for change in scenario.change)
    for policy in (get_policy(text) for text in (*scenario.policies, *changed)):
        if comers and not policy.admits:
            return "policies", f"nobody can join a running job with {policy}; leave out the joins"
    return None


def _check_names(scenario: Scenario) -> Found:
    for table, workers in (("slow", list(scenario.slow)), ("uneven", list(scenario.uneven))):
        for name in workers:
            if name not in scenario.workers:
                last = scenario.workers[-1]
                hint = closest(name, scenario.workers)
                return f"{table}.{name}", f"no such worker{hint}; there are worker-0 to {last}"
    for name, steps in scenario.uneven.items():
        if steps > scenario.steps:
            return f"uneven.{name}", f"expected at most steps = {scenario.steps}, got {steps}"
    for number, fault in enumerate(scenario.fault):
        for field in ("node", "to") if isinstance(fault, Link | Reset) else ("node",):
            try:
                names = scenario.select(getattr(fault, field))
            except ConfigError as error:
                return f"fault[{number}].{field}", str(error)
        if isinstance(fault, Torn) and not set(names) <= set(scenario.servers):
            return f"fault[{number}].node", f"expected servers, got {fault.node!r}"
        if isinstance(fault, Poison | Leave) and not set(names) <= set(scenario.workers):
            return f"fault[{number}].node", f"expected workers, got {fault.node!r}"
    return None


def _check_tensors(scenario: Scenario) -> Found:
    kind: type | None = None
    seen: list[str | int] = []
    if scenario.tensor and all(tensor.group for tensor in scenario.tensor):
        idle = set(range(scenario.cluster.workers)).difference(*(tensor.group for tensor in scenario.tensor))
        if idle:
            return "tensor", f"expected that every worker has a tensor, but rank {min(idle)} is in no group"
    for number, tensor in enumerate(scenario.tensor):
        try:
            kind = check_kind(check_key(tensor.key), kind)
            check_spec(tensor.key, tensor.spec)
        except AiokvError as error:
            return f"tensor[{number}]", str(error)
        if tensor.key in seen:
            return f"tensor[{number}].key", f"key {tensor.key!r} stands there twice"
        if tensor.group and max(tensor.group) >= scenario.cluster.workers:
            last = scenario.cluster.workers - 1
            return f"tensor[{number}].group", f"expected ranks from 0 to {last}, got {list(tensor.group)}"
        seen.append(tensor.key)
    return None


def _check_trace(scenario: Scenario) -> Found:
    if not isinstance(scenario.compute, Recorded):
        return None
    try:
        rows = read_trace(scenario.compute)
    except ConfigError as error:
        return "compute.file", str(error)
    if len(rows) < scenario.cluster.workers:
        return "cluster.workers", f"expected at most the trace's {len(rows)} workers, got {scenario.cluster.workers}"
    if len(rows[0]) < scenario.steps:
        return "steps", f"expected at most the trace's {len(rows[0])} steps, got {scenario.steps}"
    return None


def _check_learning(scenario: Scenario) -> Found:
    learning = scenario.learning
    if learning.workload not in WORKLOADS and not re.fullmatch(r"[\w.]+:\w+", learning.workload):
        hint = closest(learning.workload, WORKLOADS)
        expected = f"{', '.join(WORKLOADS)} or module:function"
        return "learning.workload", f"expected {expected}, got {learning.workload!r}{hint}"
    try:
        rule = make_optimizer(learning.optimizer, learning.params)
        Merging(learning.reduction, learning.staleness_rate).check(rule)
        check_rule(rule)
    except AiokvError as error:
        return "learning.optimizer", str(error)
    return None


def _check_assertions(scenario: Scenario) -> Found:
    for number, text in enumerate(scenario.assertions):
        try:
            metric = parse_assertion(text, scenario.policies).metric
        except ConfigError as error:
            return f"assertions[{number}]", str(error)
        if metric in LEARNED and scenario.learning.workload == "none":
            return f"assertions[{number}]", f"{metric!r} needs a workload: set learning.workload"
        if metric in OF_JOB and not scenario.cluster.restarts:
            return f"assertions[{number}]", f"{metric!r} needs a job that is started again: set cluster.restarts"
        if metric.endswith("_to_target") and scenario.learning.target_loss is None:
            return f"assertions[{number}]", f"{metric!r} needs a target: set learning.target_loss"
    return None
