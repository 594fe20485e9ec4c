"""A whole cluster of a scenario, and one run of it."""

from __future__ import annotations

import gc
import itertools
from typing import TYPE_CHECKING, Final

from aiokv.core.joiner import Joiner
from aiokv.core.scheduler.attention import CUT_OFF
from aiokv.core.scheduler.checkpoint_keeper import CheckpointPlan
from aiokv.core.scheduler.cluster_plan import ClusterPlan
from aiokv.core.scheduler.membership import Membership
from aiokv.core.server.coordinator import Coordinator
from aiokv.core.stimuli import NodeEnded
from aiokv.core.worker.session import Session
from aiokv.policy import get_policy
from aiokv.policy.adasync import AdaSync
from aiokv.types import Role
from sim.checks import Checks
from sim.clock import Clock
from sim.compute import step_times
from sim.disk import Disk
from sim.drops import Drops, Expiry, lifetime
from sim.learning import Losses, learns
from sim.network import Flights, Network
from sim.node import Node
from sim.origin import Origin, since
from sim.record import Run, WorkerRecord
from sim.saving import Saves, States
from sim.sections import SCHEDULER
from sim.service import Service
from sim.timeline import draw_timeline
from sim.trace import Trace
from sim.workload import Worker, serve
from sim.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    import simpy

    from aiokv.core.server.rounds.tallies import Tallies
    from sim.process import Process
    from sim.record import UpdateRecord
    from sim.scenario import Scenario
    from sim.timeline import Strike
    from sim.world import Machine

MAX_VALIDATED: Final = 64
"""Up to so many workers the state machines check themselves; they look at all that waits."""

VALIDATED: Final = 8
"""They do so after so many events of each: what is wrong with them mostly stays."""

PORT: Final = 9091
"""Every node is a host of its own, named like the node, and listens here."""


def simulate(
    scenario: Scenario,
    policy: str,
    seed: int,
    *,
    on_step: Callable[[], None] = lambda: None,
    check: bool = True,
    validated: int = VALIDATED,
    origin: Origin | None = None,
) -> Run:
    """Run a scenario once, until all nodes have stopped, or all workers have and the others do not follow in time.

    Args:
        scenario: what is simulated.
        policy: name of the synchronisation policy.
        seed: equal seeds give equal runs, and equal step times under every policy.
        on_step: is called whenever a worker has completed a step.
        check: look after every event whether all that must hold does.
        validated: with `check`, the state machines of small clusters check themselves too, each after so many events.
        origin: where the run begins in a job that is started again when it fails.

    Raises:
        PolicyError: unknown policy.
        InvariantError: something does not hold that must; a bug.
        RuntimeError: nothing is left to happen although nodes still wait; a bug of a state machine.
    """
    was_enabled = gc.isenabled()
    # Nearly all that a run makes is freed by counting references; looking for cycles would take a third of the time.
    gc.disable()
    try:
        return _Cluster(scenario, policy, seed, on_step, validated if check else 0, origin or Origin()).run()
    finally:
        if was_enabled:
            gc.enable()


class _Cluster:
    def __init__(
        self,
        scenario: Scenario,
        policy: str,
        seed: int,
        on_step: Callable[[], None],
        validated: int,
        origin: Origin,
    ) -> None:
        self._scenario = scenario
        self._policy = policy
        self._seed = seed
        self._on_step = on_step
        self._env = Clock()
        self._trace = Trace()
        timeline = draw_timeline(scenario, seed)
        if scenario.cluster.restarts:
            timeline = since(timeline, origin, seed)
        self._timeline = timeline
        self._origin = origin
        self._run = Run(scenario, policy, seed, poisoned=timeline.poisoned)
        self._checks = Checks(self._run, strict=True) if validated else None
        self._network = Network(
            self._env,
            scenario.network,
            rack_of=scenario.rack,
            disturbances=timeline.disturbances,
            seed=seed,
            metered=validated > 0,
        )
        self._saves = Saves(self._run, self._checks)
        by_loss = any(isinstance(get_policy(each), AdaSync) for each in self._run.policies)
        self._losses = Losses(self._run) if by_loss and learns(scenario) else None
        self._enough = self._env.event()
        if self._checks is not None:
            self._checks.dialogue.on_another = self._begin_anew
        life = lifetime(policy) if scenario.job.cancel else None
        self._expiry = None if life is None else Expiry(self._env, life)
        self._decides = any(get_policy(each).decides for each in self._run.policies)
        self._world = World(
            self._env,
            self._network,
            self._trace,
            self._run,
            Service(scenario.server, seed),
            timeline,
            States(scenario),
            Disk(self._run, scenario.cluster.checkpoint_write, timeline.torn),
            self._checks,
            self._count_update,
            validated if scenario.cluster.workers <= MAX_VALIDATED else 0,
            self._host,
        )
        self._siblings: dict[str, list[str]] = {}
        """Nodes in the process of another one, by its name."""
        self._run.checkpoints = self._world.disk.complete
        self._starts = 0
        self._nodes: dict[str, Node] = {}
        self._lives: dict[str, int] = {}
        self._workers: dict[str, Worker] = {}
        self._processes: dict[str, Process] = {}
        self._tallies: list[tuple[str, Tallies]] = []
        self._restarts = 0
        self._changed = self._env.event()
        self._start_scheduler()
        for name in scenario.servers:
            self._start_server(name)
        for name in scenario.workers:
            self._workers[name] = self._make_worker(name)
            self._start_worker(name)
        for strike in timeline.strikes:
            self._env.after(strike.at, self._strike, (strike,))
        for at, name, other in timeline.resets:
            self._env.after(at, self._reset, (name, other))

    # --- the run ---

    def run(self) -> Run:
        env, stop = self._env, self._scenario.stop
        limit = self._first_of(env.timeout(stop.time), self._enough)
        names = self._scenario.workers
        self._wait_for(names, limit)
        if not limit.triggered and stop.departures:
            # A scheduler whose cluster never became complete goes on listening, so the end needs a limit.
            grace = env.timeout(self._longest_end)
            self._wait_for(list(self._nodes), self._first_of(grace, limit))
            self._run.unstopped = [node.name for node in self._nodes.values() if node.ended is None]
        self._finish()
        return self._run

    @property
    def _longest_end(self) -> float:
        """Seconds in which all others stop that follow the workers: the last one may come to join yet, and only then
        it can be noticed that a worker is dead, if the scheduler does not take the silence of all for its own.
        """
        cluster = self._scenario.cluster
        last = max(self._timeline.starts.values(), default=0.0)
        return max(0.0, last - self._env.now) + cluster.join_timeout + max(cluster.death_timeout, CUT_OFF)

    def _first_of(self, *events: simpy.Event) -> simpy.Event:
        """Return an event that happens with the first of these.

        A condition of SimPy would be taken apart as soon as another one that it is part of is true.
        """
        first = self._env.event()

        def happened(_: simpy.Event) -> None:
            if not first.triggered:
                first.succeed()

        for event in events:
            if event.callbacks is None:
                happened(event)
            else:
                event.callbacks.append(happened)
        return first

    def _wait_for(self, names: list[str], limit: simpy.Event) -> None:
        """Let time go on until the nodes have ended and none of them is started again."""
        while not limit.triggered:
            over = self._env.all_of([self._nodes[name].over for name in names])
            self._env.run(until=(over & self._no_restarts()) | limit)
            if all(self._nodes[name].over.triggered for name in names) and not self._restarts:
                return

    def _no_restarts(self) -> simpy.Event:
        if self._changed.triggered:
            self._changed = self._env.event()
        if not self._restarts:
            self._changed.succeed()
        return self._changed

    def _finish(self) -> None:
        run, now = self._run, self._env.now
        # The stop rule has ended these in the middle of their work.
        stopped = [name for name, process in self._processes.items() if name in self._workers and process.is_alive]
        for name in stopped:
            self._processes[name].interrupt("the run is over")
        self._env.run(until=self._env.timeout(0.0))
        for name in stopped:
            run.worker_by_name[name].struck = False
        run.elapsed = max([node.ended for node in self._nodes.values() if node.ended is not None], default=now)
        run.digest = self._trace.digest
        for name, tallies in self._tallies:
            # Reads of the chunks of a server are held back side by side, and each of them counts there.
            chunks = max(1, len({(update.key, update.start) for update in run.updates if update.node == name}))
            for rank, tally in tallies.answer().ranks.items():
                run.held[rank] = max(run.held.get(rank, 0.0), tally.waited / chunks)
                run.duplicates[rank] = run.duplicates.get(rank, 0) + tally.duplicates
        run.in_flight = [token for node in self._nodes.values() for token in node.store.in_flight]
        run.links = self._network.traffic()
        for node in self._nodes.values():
            node.validate()
        if self._checks is not None:
            self._checks.finish(self._network)

    def _count_update(self, update: UpdateRecord) -> None:
        if self._expiry is not None:
            self._expiry.made(update)
        limit = self._scenario.stop.updates
        if limit and len(self._run.updates) == limit:
            self._enough.succeed()

    # --- nodes ---

    def _start_scheduler(self) -> None:
        self._starts += 1
        machine = Membership(self._plan(), incarnation=self._starts, started=self._env.now)
        self._add_node(SCHEDULER, machine, listens=True)

    def _plan(self) -> ClusterPlan:
        cluster = self._scenario.cluster
        checkpoints = CheckpointPlan("disk", self._starts, cluster.checkpoint_every, cluster.checkpoint_seconds)
        return ClusterPlan(
            num_workers=cluster.workers,
            num_servers=cluster.servers,
            heartbeat=cluster.heartbeat,
            death_timeout=cluster.death_timeout,
            chunk_bytes=cluster.chunk_bytes,
            split_bytes=cluster.split_bytes,
            on_worker_loss=cluster.on_worker_loss,
            respawn_timeout=cluster.respawn_timeout,
            min_workers=cluster.min_workers,
            max_workers=cluster.max_workers,
            reconnect_grace=cluster.reconnect_grace,
            replication=cluster.replication,
            num_places=cluster.places,
            settle_time=cluster.settle_time if self._starts > 1 else 0.0,
            checkpoints=checkpoints,
        )

    def _start_server(self, name: str, standby: int = -1) -> Node:
        coordinator = Coordinator(self._joiner(Role.SERVER, name, standby))
        node = self._add_node(name, coordinator, listens=True)
        if self._scenario.cluster.moves:
            node.server = coordinator
        self._tallies.append((name, coordinator.tallies))
        if self._decides:
            node.drops = Drops(self._run, name)
        timeout, start = self._scenario.cluster.join_timeout, self._timeline.starts.get(name, 0.0)
        self._processes[name] = self._env.process(serve(node, self._run, self._env, timeout, start))
        return node

    def _host(self, host: Node, index: int, name: str) -> None:
        """Start a standby in the process of a server, with which it ends."""
        node = self._start_server(name, index)
        self._siblings.setdefault(host.name, []).append(name)
        assert host.over.callbacks is not None, "it wants a node"
        assert node.over.callbacks is not None, "it has just begun"
        host.over.callbacks.append(lambda _: node.stop("its process has ended"))
        node.over.callbacks.append(lambda _: host.deliver(NodeEnded(name)))

    def _make_worker(self, name: str) -> Worker:
        scenario = self._scenario
        record = WorkerRecord(name)
        rank = len(self._run.workers)
        self._run.workers.append(record)
        factor = scenario.slow.get(name, 1.0)
        done = self._origin.done.get(name, 0)
        times = step_times(scenario.compute, factor=factor, seed=self._seed, worker=name, rank=rank)
        return Worker(
            scenario=scenario,
            record=record,
            times=itertools.islice(times, done, None) if done else times,
            on_step=self._on_step,
            on_failure=self._end_if_restarted,
            pace=self._timeline.paces.get(name),
            checks=self._checks,
            changes=self._run.changes,
            saves=self._saves,
            expiry=self._expiry,
            leaves=self._timeline.leaves.get(name),
            losses=self._losses,
            flights=Flights() if self._network.takes_time else None,
            is_complete=lambda: all(worker.rank >= 0 for worker in self._run.workers[: scenario.cluster.workers]),
        )

    def _start_worker(self, name: str) -> None:
        worker = self._workers[name]
        session = Session(self._joiner(Role.WORKER, name), policy=self._policy)
        node = self._add_node(name, session, listens=False, flights=worker.flights)
        start = self._timeline.starts.get(name, 0.0)
        self._processes[name] = self._env.process(worker.run(self._env, node, session, start))

    def _add_node(self, name: str, machine: Machine, *, listens: bool, flights: Flights | None = None) -> Node:
        address = (name, PORT) if listens else None
        node = self._nodes[name] = Node(self._world, name, machine, address, flights)
        return node

    def _joiner(self, role: Role, name: str, standby: int = -1) -> Joiner:
        advertised = (name, PORT) if role is Role.SERVER else ("", 0)
        life = self._lives[name] = self._lives.get(name, 0) + 1
        scheduler = (SCHEDULER, PORT)
        return Joiner(
            role=role, name=name, incarnation=life, scheduler=scheduler, advertised=advertised, standby=standby
        )

    # --- faults ---

    def _strike(self, strike: Strike) -> None:
        node = self._nodes[strike.node]
        if not node.alive:
            return
        if strike.kind == "pause":
            assert strike.after is not None, "a pause ends"
            for each in self._in_process(strike.node):
                each.pause(strike.after)
            return
        for each in self._in_process(strike.node):
            if strike.kind == "crash":
                each.crash(f"{strike.node} crashed")
            else:
                each.freeze()
        if strike.kind == "crash":
            self._end_if_restarted(strike.node)
        process = self._processes.get(strike.node)
        if process is not None and process.is_alive:
            process.interrupt(strike.kind)
        if strike.after is not None:
            self._restarts += 1
            self._env.after(strike.after, self._restart, (strike.node,))

    def _in_process(self, name: str) -> list[Node]:
        """Return all nodes in a process that are there."""
        nodes = [self._nodes[each] for each in (name, *self._siblings.get(name, ()))]
        return [node for node in nodes if node.alive]

    def _end_if_restarted(self, crashed: str = "") -> None:
        """End the run because the whole job is started again; a node has crashed, or a worker has failed."""
        cluster = self._scenario.cluster
        goes_on = cluster.on_worker_loss == "shrink" and crashed not in (SCHEDULER, *self._scenario.servers)
        if cluster.restarts and not goes_on and not self._enough.triggered:
            self._run.crashed = crashed
            self._enough.succeed()

    def _begin_anew(self) -> None:
        """End the run because the next cluster begins: nobody is left of the one that it is about."""
        self._run.begun_anew = True
        if not self._enough.triggered:
            self._enough.succeed()

    def _reset(self, name: str, other: str) -> None:
        self._nodes[name].reset(other)

    def _restart(self, name: str) -> None:
        """Start the program again, on the same host and under the same name."""
        self._restarts -= 1
        if name in self._workers:
            self._start_worker(name)
        elif name == SCHEDULER:
            self._start_scheduler()
        else:
            self._start_server(name)
        if not self._restarts and not self._changed.triggered:
            self._changed.succeed()
