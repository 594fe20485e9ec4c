"""What goes wrong, as a scenario file says it: a timeline, or processes that are drawn from the run's seed."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta

from sim.sections import Count, Positive, Probability, Seconds, Section

Nodes = str | tuple[str, ...]
"""A node's name, "workers", "servers", "rack-0" and so on, or a list of these."""
Lasting = Annotated[float, Meta(gt=0)]
"""Seconds, or inf."""


class Fault(Section, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all faults. `node` says which nodes are hit; several are hit at once."""

    node: Nodes


class Crash(Fault, frozen=True, kw_only=True, tag="crash"):
    """The process ends and its connections break; it may be started again, and crash again."""

    at: Seconds
    restart: Seconds | None = None
    """Seconds until it is started again; never if this is left out."""
    times: Count = 1
    """How often it crashes: more than once is a node that flaps."""
    every: Positive = 60.0
    """Seconds from one crash to the next."""
    drawn: bool = False
    """Each node crashes by itself, at random: after exponential times of the mean `every`, from `at` on."""


class Hang(Fault, frozen=True, kw_only=True, tag="hang"):
    """The machine falls silent for good; its connections stay open."""

    at: Seconds


class Pause(Fault, frozen=True, kw_only=True, tag="pause"):
    """The process is stopped for a while; what arrives waits."""

    at: Seconds
    duration: Positive
    times: Count = 1
    every: Positive = 60.0
    """Seconds from one pause to the next."""
    drawn: bool = False
    """Pauses come at random, as crashes do."""


class Late(Fault, frozen=True, kw_only=True, tag="late"):
    """The node is started late."""

    at: Positive


class Join(Fault, frozen=True, kw_only=True, tag="join"):
    """Another worker is started, which joins the running job: worker-N of N workers, and then the next ones.

    Or another server, server-N of N servers and so on, which gets some of the places that there are.
    """

    at: Positive


class Leave(Fault, frozen=True, kw_only=True, tag="leave"):
    """The worker leaves in good order after so many steps of its own, although its work is not done."""

    after: Count
    planned: bool = False
    """It says so then, and leaves behind the step after which the others do not count on it."""


class Slow(Fault, frozen=True, kw_only=True, tag="slow"):
    """Steps take `factor` times as long; on a server, its arithmetic does.

    A "ramp" grows from 1 to the factor over the duration and stays there. With "ar1" the logarithm of the factor
    wanders around that of `factor` with the standard deviation `sd` and the correlation `persistence` between steps.
    """

    factor: Positive
    shape: Literal["window", "ramp", "ar1"] = "window"
    at: Seconds = 0.0
    duration: Lasting = math.inf
    sd: Seconds = 0.2
    persistence: Probability = 0.9


class Bursts(Fault, frozen=True, kw_only=True, tag="bursts"):
    """Slow windows that come at random: exponential gaps and durations of these means, for each node by itself."""

    factor: Positive
    gap: Positive
    duration: Positive


class Spot(Fault, frozen=True, kw_only=True, tag="spot"):
    """Each node is taken away after a Weibull distributed life, and given back `restart` seconds later."""

    scale: Positive
    shape: Positive = 1.0
    restart: Seconds | None = None


class Link(Fault, frozen=True, kw_only=True, tag="link"):
    """The way from `node` to `to` is bad for a while; also the way back unless `both` is false.

    Connections are streams: a lost message comes later, a duplicate costs bytes, and what was overtaken is waited for.
    """

    to: Nodes
    both: bool = True
    at: Seconds = 0.0
    duration: Lasting = math.inf
    latency: Seconds = 0.0
    """Added to the latency."""
    bandwidth: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the sender's bandwidth that is left for a connection."""
    loss: Probability = 0.0
    duplicate: Probability = 0.0
    reorder: Probability = 0.0
    """Share of messages that take up to twice as long, so that later ones have to wait for them."""
    clog: bool = False
    """What is sent arrives when it is over."""
    cut: bool = False
    """As clogged, and new connections fail."""
    times: Count = 1
    """How often it is bad for the `duration`."""
    every: Positive = 60.0
    """Seconds from one time to the next."""
    drawn: bool = False
    """It becomes bad at random, as nodes crash: after exponential times of the mean `every` for which it is good."""


class Reset(Fault, frozen=True, kw_only=True, tag="reset"):
    """The connections between `node` and `to` end, and what is under way over them is lost; new ones can be made."""

    to: Nodes
    at: Seconds
    times: Count = 1
    """How often that happens."""
    every: Positive = 1.0
    """Seconds from one time to the next."""
    drawn: bool = False
    """They end at random, as nodes crash."""


class HeartbeatLoss(Fault, frozen=True, kw_only=True, tag="heartbeat-loss"):
    """The node's heartbeats do not arrive; everything else does."""

    at: Seconds
    duration: Lasting = math.inf


class Torn(Fault, frozen=True, kw_only=True, tag="torn"):
    """What the server writes for checkpoints of the cluster in a window is torn: the end of the file is missing.

    Nobody knows before it is read, unless the server has `noticed`: then that checkpoint is never complete.
    """

    at: Seconds = 0.0
    duration: Lasting = math.inf
    noticed: bool = False


class Poison(Fault, frozen=True, kw_only=True, tag="poison"):
    """The worker's gradient of a step, counted from 1, holds NaN."""

    step: Count


AnyFault = (
    Crash | Hang | Pause | Late | Join | Leave | Slow | Bursts | Spot | Link | Reset | HeartbeatLoss | Poison | Torn
)
