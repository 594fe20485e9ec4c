"""The parts of a scenario file. Times are seconds, sizes are bytes."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from aiokv.types import TensorSpec
from sim.laws import Latency

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Bytes = Annotated[int, Meta(ge=1, le=1 << 40)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Probability = Annotated[float, Meta(ge=0, lt=1)]

SCHEDULER: Final = "scheduler"


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts of a scenario."""


class ClusterSection(Section, frozen=True, kw_only=True):
    """How many nodes there are, and the settings that they share (as in `aiokv.config`).

    Nodes of a kind are dealt out to the racks in turn: worker-0 is in rack-0, worker-1 in rack-1 and so on.
    """

    workers: Count
    servers: Count = 1
    places: Annotated[int, Meta(ge=0)] = 0
    """For so many places keys are cut, and servers may join that get some; 0: one for each server."""
    racks: Count = 1
    heartbeat: Positive = 2.0
    death_timeout: Positive = 10.0
    call_timeout: Positive = 60.0
    join_timeout: Positive = 120.0
    on_worker_loss: Literal["fail", "shrink", "respawn"] = "fail"
    respawn_timeout: Positive = 30.0
    min_workers: Count = 1
    max_workers: Annotated[int, Meta(ge=0)] = 0
    """Workers may join while others train until there are so many; 0: none."""
    reconnect_grace: Seconds = 0.0
    settle_time: Seconds = 1.5
    """So long a scheduler that is started again waits for members; the first one knows that it is the first."""
    replication: Literal[1, 2] = 1
    """On how many servers every parameter is."""
    checkpoint_every: Annotated[int, Meta(ge=0)] = 0
    """A checkpoint of the whole cluster after so many rounds; 0: none."""
    checkpoint_seconds: Seconds = 0.0
    """One every so many seconds; 0: none."""
    checkpoint_write: Seconds = 0.0
    """How long a server writes its part; it goes on meanwhile."""
    restarts: Annotated[int, Meta(ge=0, le=1000)] = 0
    """So often all nodes are started again when the job has failed, from its newest whole checkpoint or save."""
    restart_seconds: Seconds = 30.0
    """From the failure until then."""
    reseed: bool = False
    """When all servers are lost, a job goes on from the weights of the worker with the most steps, if there is one."""
    chunk_bytes: Bytes = 512 * 1024
    split_bytes: Bytes = 64 * 1024

    @property
    def cuts(self) -> int:
        """For how many places keys are cut."""
        return max(self.places, self.servers)

    @property
    def moves(self) -> bool:
        """Whether places may go over to other nodes."""
        return self.replication > 1 or self.places > self.servers


class NetworkSection(Section, frozen=True, kw_only=True):
    """How long messages are under way, and what a network card carries in each direction."""

    latency: Seconds | Latency = 0.0
    """Seconds, or a law that they are drawn from. What one connection carries stays in order."""
    jitter: Seconds = 0.0
    """Mean of an exponential time on top of the latency."""
    rack_latency: Seconds = 0.0
    """On top of that between different racks."""
    bandwidth: Annotated[float, Meta(gt=0)] = math.inf
    """Bytes a second of each node's card, in each direction."""
    sharing: Literal["fair", "fifo"] = "fair"
    """Transfers share cards max-min fairly, or cards carry one transfer after the other."""
    loss: Probability = 0.0
    """Share of messages that have to be sent again, because a packet of them was lost."""
    retransmit: Positive = 0.2
    """Seconds until a lost message is sent again; twice as long each further time."""


class ServerSection(Section, frozen=True, kw_only=True):
    """Seconds that a server's arithmetic takes."""

    fold: Seconds = 0.0
    """For each contribution that is added to a chunk."""
    apply: Seconds = 0.0
    """For each update of a chunk."""
    per_message: Seconds = 0.0
    """For each message with a payload."""
    per_byte: Seconds = 0.0
    """For each byte of payload that arrives."""
    law: Literal["constant", "exponential"] = "constant"
    """Whether these times are exact or means of exponential ones."""


class JobSection(Section, frozen=True, kw_only=True):
    """What a worker does in a step besides computing."""

    model: Literal["", "resnet-50", "vgg-16"] = ""
    """Push and pull the tensors of this network; instead of [[tensor]]."""
    overlap: bool = False
    """Push the gradient of a layer as soon as it is computed, and wait for a layer's parameters where it is needed."""
    forward: Annotated[float, Meta(gt=0, lt=1)] = 1 / 3
    """Share of a step's time that is the forward pass; layers take equal times."""
    priorities: bool = True
    """With `overlap`: layers that are needed first leave first."""
    cancel: bool = False
    """A worker abandons a computation, and reads again, as soon as its gradient would be dropped; without overlap."""
    checkpoint_interval: Seconds = 0.0
    """Every worker saves a checkpoint at the first step after so long; 0: never."""
    checkpoint_cost: Seconds = 0.0
    """Seconds that it does not compute then."""
    save_every: Annotated[int, Meta(ge=0)] = 0
    """All workers call `save` together after so many steps each time: worker-0 reads all servers and writes; 0: never.
    Not with `overlap`.
    """
    save_state: Annotated[float, Meta(ge=0)] = 0.0
    """Bytes that the update rule keeps for each byte of weights, such as 1 for momentum and 2 for adam."""
    save_bandwidth: Annotated[float, Meta(gt=0)] = math.inf
    """Bytes a second at which worker-0 writes."""
    separate: bool = False
    """Push and pull with two calls of their own, both at once, instead of one that does both."""
    between: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of a step's time that is other work between its push and its pull, such as loading the next batch; they are
    two calls then. Not with `overlap` or `cancel`.
    """
    barrier_every: Annotated[int, Meta(ge=0)] = 0
    """All workers meet at a barrier after so many steps each time; 0: never. Not with `overlap`."""
    linger: Seconds = 0.0
    """A worker with fewer steps than the others finishes, and leaves so many seconds later."""

    @property
    def is_one_call(self) -> bool:
        """Whether what is read is the version that has just been made of what was pushed."""
        return not (self.separate or self.between)


class ChangeSection(Section, frozen=True, kw_only=True):
    """All keys get another policy, in every worker after the same step."""

    after: Count
    """Steps that a worker has taken when it asks for it."""
    policy: str


class StopSection(Section, frozen=True, kw_only=True):
    """Ends a run before all workers have taken all steps and have left."""

    time: Positive = 1e9
    """When so many seconds have passed."""
    updates: Annotated[int, Meta(ge=0)] = 0
    """When so many updates of chunks are made; 0: no limit."""
    departures: bool = True
    """Whether workers leave in good order at the end. With thousands of them, that takes longer than the training."""


class LearningSection(Section, frozen=True, kw_only=True):
    """What the workers optimise. It takes no simulated time, and when steps end does not depend on it.

    Gradients are computed at the version that their worker had read, and updates are made in the simulated order: those
    of the first chunk of the first tensor.
    """

    workload: str = "none"
    """"quadratic": x^2 / 2 from x = 1. "digits": softmax regression on handwritten digits. "module:function": what the
    function returns, called with the seed and the number of workers: the parameters to start from,
    gradient(parameters, worker, push), which uses the same data for the same worker and push, and loss(parameters).
    """
    noise: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Standard deviation of what is added to each gradient of the quadratic."""
    batch: Count = 32
    """Images that a gradient of the digits is the mean over."""
    optimizer: str = "sgd"
    """The update rule, by its name in `aiokv.optim`: sgd, nag, adam or dcasgd."""
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    """Its parameters, such as learning_rate and momentum."""
    reduction: Literal["sum", "mean", "mean_of_world", "median", "trimmed_mean"] = "mean"
    """What becomes of the gradients of an update."""
    staleness_rate: Literal["1", "1/max(1,tau)", "1/(1+tau)"] = "1"
    """What each gradient is multiplied by before that; tau is its staleness."""
    target_loss: float | None = None
    """The loss that `time_to_target` waits for."""
    loss_every: Count = 1
    """The loss is computed after so many updates each time, and at the end."""


class TensorSection(Section, frozen=True, kw_only=True):
    """A parameter that every step pushes and pulls."""

    key: str | int
    shape: tuple[Annotated[int, Meta(ge=1)], ...]
    dtype: str = "float32"
    group: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    """Ranks that push and pull it, and whose gradients make its updates; all of them if it is empty."""

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype as the library writes them."""
        return TensorSpec(self.shape, self.dtype)
