"""A whole cluster of a scenario, and one run of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import simpy

from aiokv.core.coordinator import Coordinator
from aiokv.core.joiner import Joiner
from aiokv.core.membership import ClusterPlan, Membership
from aiokv.core.session import Session
from aiokv.types import Role
from sim.clock import after
from sim.compute import step_times
from sim.network import Network
from sim.node import Machine, Node, World
from sim.record import Run, WorkerRecord
from sim.scenario import SCHEDULER
from sim.trace import Trace
from sim.workload import Worker, serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.scenario import FaultSection, Scenario

PORT: Final = 9091
"""Every node is a host of its own, named like the node, and listens here."""


def simulate(
    scenario: Scenario,
    policy: str,
    seed: int,
    *,
    on_step: Callable[[], None] = lambda: None,
    validate: bool = False,
) -> Run:
    """Run a scenario once, until all nodes have stopped, or all workers have and the others do not follow in time.

    Args:
        scenario: what is simulated.
        policy: name of the synchronisation policy.
        seed: equal seeds give equal runs, and equal step times under every policy.
        on_step: is called whenever a worker has completed a step.
        validate: check the invariants of every state machine after every stimulus.

    Raises:
        PolicyError: unknown policy.
        RuntimeError: nothing is left to happen although nodes still wait; a bug of a state machine.
    """
    return _Cluster(scenario, policy, seed, on_step, validate).run()


class _Cluster:
    def __init__(self, scenario: Scenario, policy: str, seed: int, on_step: Callable[[], None], validate: bool) -> None:
        self._scenario = scenario
        self._policy = policy
        self._seed = seed
        self._on_step = on_step
        self._env = simpy.Environment()
        self._trace = Trace()
        self._run = Run(scenario, policy, seed)
        net = scenario.network
        network = Network(self._env, latency=net.latency, bandwidth=net.bandwidth)
        self._world = World(self._env, network, self._trace, self._run, scenario.server, validate)
        self._nodes: dict[str, Node] = {}
        self._processes: dict[str, simpy.Process] = {}
        self._add_scheduler()
        for name in scenario.servers:
            self._add_server(name)
        for name in scenario.workers:
            self._add_worker(name)
        for fault in scenario.fault:
            self._plan_fault(fault)

    def run(self) -> Run:
        workers = [self._nodes[name] for name in self._scenario.workers]
        self._env.run(until=self._all_over(workers))
        # A scheduler whose cluster never became complete goes on listening, so the end needs a limit.
        grace = self._env.timeout(self._scenario.cluster.join_timeout)
        self._env.run(until=self._all_over(list(self._nodes.values())) | grace)
        self._run.unstopped = [node.name for node in self._nodes.values() if node.ended is None]
        self._run.elapsed = max(node.ended or 0.0 for node in self._nodes.values())
        self._run.digest = self._trace.digest
        self._run.in_flight = [token for node in self._nodes.values() for token in node.ledger.remaining]
        return self._run

    def _all_over(self, nodes: list[Node]) -> simpy.Event:
        return self._env.all_of([node.over for node in nodes])

    def _add_scheduler(self) -> None:
        cluster = self._scenario.cluster
        plan = ClusterPlan(
            num_workers=cluster.workers,
            num_servers=cluster.servers,
            heartbeat=cluster.heartbeat,
            death_timeout=cluster.death_timeout,
            chunk_bytes=cluster.chunk_bytes,
            split_bytes=cluster.split_bytes,
        )
        self._add_node(SCHEDULER, Membership(plan), listens=True)

    def _add_server(self, name: str) -> None:
        node = self._add_node(name, Coordinator(self._joiner(Role.SERVER, name)), listens=True)
        timeout = self._scenario.cluster.join_timeout
        self._processes[name] = self._env.process(serve(node, self._run, self._env, timeout))

    def _add_worker(self, name: str) -> None:
        session = Session(self._joiner(Role.WORKER, name), policy=self._policy)
        node = self._add_node(name, session, listens=False)
        record = WorkerRecord(name)
        self._run.workers.append(record)
        factor = self._scenario.slow.get(name, 1.0)
        times = step_times(self._scenario.compute, factor=factor, seed=self._seed, worker=name)
        worker = Worker(
            node=node,
            session=session,
            scenario=self._scenario,
            record=record,
            times=times,
            on_step=self._on_step,
        )
        self._processes[name] = self._env.process(worker.run(self._env))

    def _add_node(self, name: str, machine: Machine, *, listens: bool) -> Node:
        node = self._nodes[name] = Node(self._world, name, machine, (name, PORT) if listens else None)
        return node

    def _joiner(self, role: Role, name: str) -> Joiner:
        advertised = (name, PORT) if role is Role.SERVER else ("", 0)
        return Joiner(role=role, name=name, incarnation=1, scheduler=(SCHEDULER, PORT), advertised=advertised)

    # --- faults ---

    def _plan_fault(self, fault: FaultSection) -> None:
        after(self._env, fault.at, lambda: self._strike(fault))

    def _strike(self, fault: FaultSection) -> None:
        node = self._nodes[fault.node]
        if not node.alive:
            return
        if fault.kind == "crash":
            node.stop(f"{fault.node} crashed")
        else:
            node.freeze()
        process = self._processes.get(fault.node)
        if process is not None and process.is_alive:
            process.interrupt(fault.kind)
