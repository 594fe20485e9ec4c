"""Servers, standbys and links that are lost at any moments: every push counts once, the bits are as without that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from aiokv.core.keys import BUNDLE_START
from aiokv.policy import get_policy
from aiokv.types import STANDBY
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.core.copies.conftest import Array, Asked, Node, Script, Worker, World

STEPS = 5
SEEDS = hs.integers(0, 2**32)
LOST = ["primary", "standby", "link", "move", "tail", "tail link"]
DISASTERS = hs.lists(hs.tuples(hs.integers(1, 120), hs.sampled_from(LOST)), max_size=4)
"""How many events after the one before what is lost."""


def read(asked: Asked, dtype: str = "float32") -> Array:
    """Return the value that a request was answered with."""
    assert isinstance(asked.answer, m.Value), asked.answer
    return np.frombuffer(asked.value, dtype)


TABLE = (10, 2)
"""The shape of the table."""


def table_of(world: World, node: Node) -> bytes:
    """Return all rows of the table."""
    version = node.machine._catalog.chunks["t", 0].version
    return node.store.get_rows("t", 0, version, np.arange(10, dtype=np.int64).tobytes()).tobytes()


class Trainer:
    """What all workers do.

    Args:
        rule: the name of the update rule, and its parameters.
        policy: of the keys.
        alone: at which step a key of the bundle is used alone.
        again: at which step a key is deleted, and made again with another shape.
    """

    def __init__(self, rule: str, params: dict[str, Any], policy: str, alone: int, again: int) -> None:
        self.rule, self.params, self.policy, self.alone, self.again = rule, params, policy, alone, again

    def __call__(self, worker: Worker) -> Script:
        """Train."""
        big, a, b = (np.arange(size, dtype=np.float32) for size in (6, 2, 3))
        yield [worker.ask(m.SetOptimizer(self.rule, self.params, "sum", 60.0))]
        # Keys that have a gate, or decided rounds, are in no bundle.
        bundled = worker.init_bundle({"a": a, "b": b}, self.policy if get_policy(self.policy).is_plain else "asp")
        counted = worker.init("n", np.zeros(2, np.int64), "sum")
        halves = worker.init("h", np.ones(3, np.float16), self.policy)
        table = worker.init_rows("t", TABLE, {1: 1.0, 8: 2.0}, self.policy)
        yield [worker.init("w", big, self.policy), bundled, counted, worker.init("d", a, self.policy), halves, table]
        assert isinstance(bundled.answer, m.Bundled)
        number = bundled.answer.bundle
        first = [worker.pull("w", (6,)), worker.ask(m.PullBundle(number, 0, 60.0))]
        yield first
        values = [(read(one), one.answer.version) for one in first]  # type: ignore[union-attr]
        for step in range(1, STEPS + 1):
            if step == self.again:
                yield from self.make_again(worker)
            gradients = [np.round(value * self.factor(step)) + np.float32(step + worker.rank) for value, _ in values]
            (_, read_big), (_, read_pair) = values
            pushed = worker.push("w", gradients[0], read_big)
            added = worker.push("n", np.full(2, worker.rank + 1), step - 1)
            more = [worker.push("h", np.full(3, 1024 + worker.rank, np.float16), step - 1)]
            more.append(worker.push_rows("t", TABLE, {worker.rank: 1.0, 3: 2.0, 3 + step: 4.0}, step - 1))
            if step == self.alone:
                part = worker.push("a", gradients[1][:2], read_pair)
                other = worker.push("b", gradients[1][2:], read_pair)
                yield [pushed, added, *more, part, other]
                version = min(part.answer.version, other.answer.version)  # type: ignore[union-attr]
                pair = np.concatenate([read(part), read(other)]), version
            else:
                both = worker.push_bundle(number, ["a", "b"], gradients[1], read_pair)
                yield [pushed, added, *more, both]
                pair = read(both), both.answer.version  # type: ignore[union-attr]
            values = [(read(pushed), pushed.answer.version), pair]  # type: ignore[union-attr]

    def factor(self, step: int) -> np.float32:
        """Return how gradients depend on the values that were read; not at all where the order may be any."""
        return np.float32(0.25 * step) if self.policy == "bsp" else np.float32(0)

    def make_again(self, worker: Worker) -> Script:
        """Delete a key and make it again, while nobody uses it."""
        if worker.rank == 0:
            yield [worker.ask(m.Delete(("d",), 60.0))]
            worker.sequences.pop("d", None)
            yield [worker.init("d", np.ones(4, np.float32), self.policy)]

    def results(self, world: World) -> dict[str, bytes]:
        """Return the values in the end."""
        chunks = world.primary.machine._catalog.chunks
        bundle = ("a", BUNDLE_START)
        pair = [world.value(*bundle)] if bundle in chunks else [world.value("a"), world.value("b")]
        found = {"w": world.value("w"), "ab": np.concatenate(pair), "n": world.value("n", dtype="int64")}
        results = {name: value.tobytes() for name, value in found.items()}
        return results | {"h": world.value("h", dtype="float16").tobytes(), "t": table_of(world, world.primary)}


def lose(world: World, what: str) -> None:
    """Let something be lost, if the job may go on without."""
    if what == "link":
        for peer in [peer for peer in world.primary.links if peer < STANDBY]:
            world.cut(world.primary, peer)
    elif what == "move":
        world.move()
    elif what == "tail" and world.tail is not None:
        world.crash(world.tail)
    elif what == "tail link" and world.standby is not None:
        for peer in [peer for peer in world.standby.links if peer < STANDBY]:
            world.cut(world.standby, peer)
    elif what == "standby" and world.standby is not None and world.primary.alive:
        world.crash(world.standby)
    elif what == "primary" and world.state == "ready" and world.standby is not None and world.standby.alive:
        world.crash(world.primary)


RULES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"learning_rate": 1.0}),
    ("sgd", {"learning_rate": 0.5, "momentum": 0.9}),
    ("adam", {"learning_rate": 0.1}),
]


@pytest.mark.parametrize("policy", ["bsp", "ssp:1"])
def test_one_loss_after_the_other(make_world: Callable[..., World], policy: str) -> None:
    """Whatever is lost, and in whatever state, no push is lost with it and none counts twice."""
    trainer = Trainer("sgd", {"learning_rate": 1.0}, policy, alone=2, again=3)
    undisturbed, world = make_world(0), make_world(1)
    undisturbed.run(trainer)
    world.begin(trainer)
    disturb(world, [(50, "link"), (60, "primary"), (70, "link"), (40, "standby"), (60, "primary"), (90, "link")])
    assert trainer.results(world) == trainer.results(undisturbed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lost", LOST)
def test_a_place_that_moves_and_what_may_be_lost_meanwhile(
    make_world: Callable[..., World], lost: str, seed: int
) -> None:
    trainer = Trainer("sgd", {"learning_rate": 0.5, "momentum": 0.9}, "bsp", alone=2, again=3)
    undisturbed, world = make_world(0), make_world(seed)
    undisturbed.run(trainer)
    world.begin(trainer)
    while world.state != "ready":
        world.step()
    disturb(world, [(1, "move"), (10 * seed, lost), (60, "move"), (70, "primary")])
    assert trainer.results(world) == trainer.results(undisturbed)


@pytest.mark.no_cover
@pytest.mark.parametrize("rule", RULES, ids=str)
@settings(max_examples=40)
@given(SEEDS, DISASTERS, hs.integers(0, STEPS), hs.integers(0, STEPS))
def test_rounds_of_all_workers(
    make_world: Callable[..., World],
    rule: tuple[str, dict[str, Any]],
    seed: int,
    disasters: list[tuple[int, str]],
    alone: int,
    again: int,
) -> None:
    trainer = Trainer(*rule, "bsp", alone, again)
    undisturbed = make_world(0)
    undisturbed.run(trainer)
    world = make_world(seed)
    world.begin(trainer)
    disturb(world, disasters)
    assert trainer.results(world) == trainer.results(undisturbed)


def disturb(world: World, disasters: list[tuple[int, str]]) -> None:
    """Let things go on to their end, and some be lost on the way; then the standby has the same as its primary."""
    for pause, what in disasters:
        world.go_on(steps=pause)
        lose(world, what)
    world.go_on()
    world.settle()
    if world.standby is None:
        # It was dropped, and the scheduler finds another one after a while.
        world.hire()
        world.publish()
        world.settle()
    standby = world.standby
    assert standby is not None
    assert world.state == "ready"
    assert table_of(world, standby) == table_of(world, world.primary)
    chunks = [chunk for chunk in world.primary.machine._catalog.chunks.values() if chunk.is_dense]
    for chunk in chunks:
        named = (chunk.key, chunk.start, chunk.spec.dtype)
        assert world.value(*named, standby).tobytes() == world.value(*named).tobytes()


@pytest.mark.no_cover
@pytest.mark.parametrize("policy", ["asp", "ssp:1", "dssp:1:2", "sync_switch:0.5:5", "k_async:2", "round_robin"])
@settings(max_examples=40)
@given(SEEDS, DISASTERS, hs.integers(0, STEPS))
def test_other_policies(
    make_world: Callable[..., World], policy: str, seed: int, disasters: list[tuple[int, str]], again: int
) -> None:
    trainer = Trainer("sgd", {"learning_rate": 1.0}, policy, 0, again)
    world = make_world(seed)
    world.begin(trainer)
    disturb(world, disasters)
    total = sum(step + rank for step in range(1, STEPS + 1) for rank in range(2))
    assert world.value("w").tolist() == [element - total for element in range(6)]
    assert np.frombuffer(trainer.results(world)["ab"], np.float32).tolist() == [0 - total, 1 - total] + [
        element - total for element in range(3)
    ]
