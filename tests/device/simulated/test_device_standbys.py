"""Servers on devices that have standbys, over TCP: one that is lost changes no bit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.config import load_config
from aiokv.errors import UpdateRefusedError
from aiokv.kernels.cuda.work import Works
from aiokv.kernels.work import Add
from aiokv.net.inquiry import ask_waiting
from aiokv.store.device import DeviceStore
from aiokv.types import Role
from aiokv.wire import messages as m
from tests.device.simulated.test_device_cluster import SETTINGS, cluster, gradients

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.one_loop("standbys on both loops are in tests/net")

STEPS, LOSS = 4, 2
TABLE = (40, 3)


async def copied(nodes: list[Any]) -> None:
    """Wait until every server that is left has a standby that is ready."""
    (host, port), alive = (nodes[0].config.scheduler_host, nodes[0].config.scheduler_port), len(nodes)
    config = load_config(environ={}, scheduler=f"{host}:{port}", **SETTINGS)
    for _ in range(2000):
        answer = (await ask_waiting(config, timeout=5.0))["scheduler"]
        assert isinstance(answer, m.Waiting)
        states = [member.state for member in answer.members if member.role is Role.SERVER]
        if sum("ready" in state for state in states) == alive:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"this is all that has come of it: {states}")


async def crash(node: Any) -> None:
    """End a server as kill -9 would: nothing more leaves it, nor any of its siblings."""
    for each in [node, *(node.siblings[name] for name in node.siblings)]:
        each._closed = True
        for link in [*each._links.values(), *each._others]:
            link.abort()
    await node.close()


async def train(
    kv: Any, rule: str, params: dict[str, Any], dtype: str, codec: str, at_loss: Callable[[], Awaitable[None]]
) -> dict[str, bytes]:
    """Make steps whose gradients depend on the weights, and of rows too if the rule can; return all weights."""
    await kv.set_optimizer(rule, **params)
    if codec:
        await kv.set_gradient_compression(codec)
    weights = gradients(99, dtype)
    await kv.init(weights)
    has_rows = rule in {"adam", "sgd"}
    if has_rows:
        await kv.init("table", aiokv.RowSparse.empty(TABLE))
    for step in range(STEPS):
        if step == LOSS and kv.rank == 0:
            await at_loss()
        scale = 1 + kv.rank + step / 7
        slopes = {key: np.asarray(weight * np.float32(scale), dtype) for key, weight in weights.items()}
        await kv.pushpull(slopes, out=weights)
        if has_rows:
            ids = np.array([kv.rank, 2, 20 + step])
            await kv.push("table", aiokv.RowSparse(ids, np.full((3, TABLE[1]), scale, np.float32), TABLE))
    found = {key: weight.tobytes() for key, weight in weights.items()}
    if has_rows:
        found["table"] = (await kv.row_sparse_pull("table", row_ids=np.arange(TABLE[0]))).values.tobytes()
    return found


CASES: dict[str, tuple[str, dict[str, Any], str, str, dict[str, Any]]] = {
    "sums in float32": ("adam", {"multi_precision": True}, "bfloat16", "", {}),
    "norms over servers": ("lamb", {}, "float32", "", {}),
    "payloads that a device decodes": ("sgd", {"momentum": 0.9}, "float32", "2bit", {}),
    "a rule that looks at earlier values": ("dcasgd", {}, "float32", "", {}),
    "calls that count as a whole": ("sgd", {"momentum": 0.9}, "float16", "", {"on_worker_loss": "shrink"}),
    "a standby beside a server on the host": ("sgd", {"momentum": 0.9}, "float32", "", {"on_host": (1, 2)}),
}


@pytest.mark.parametrize(("rule", "params", "dtype", "codec", "settings"), CASES.values(), ids=CASES)
async def test_a_server_on_a_device_that_dies_changes_no_bit_of_what_is_trained(
    rule: str, params: dict[str, Any], dtype: str, codec: str, settings: dict[str, Any]
) -> None:
    found = []
    for device, replication in (("cpu", 1), ("cuda", 2)):
        how: dict[str, Any] = {
            "servers": 3,
            "policy": "bsp",
            "replication": replication,
            "reconnect_grace": 0.1,
            **settings,
        }
        async with cluster(device, **how) as (nodes, workers):

            async def lose(nodes: list[Any] = nodes, device: str = device) -> None:
                if device == "cuda":
                    await copied(nodes)
                    assert isinstance(nodes[0].store, DeviceStore)
                    await crash(nodes[0])

            named = (rule, params, dtype, codec, lose)
            found.append(await asyncio.gather(*(train(kv, *named) for kv in workers)))
    assert found[0] == found[1]


async def test_a_server_on_a_device_that_leaves_changes_no_bit_and_fails_no_call() -> None:
    found = []
    for device in ("cpu", "cuda"):
        async with cluster(device, servers=3, policy="bsp") as (nodes, workers):

            async def leave(nodes: list[Any] = nodes, device: str = device) -> None:
                if device == "cuda":
                    assert nodes[0].leave()
                    assert not (await nodes[0].wait_stopped()).failed

            found.append(await asyncio.gather(*(train(kv, "adam", {}, "float32", "", leave) for kv in workers)))
    assert found[0] == found[1]


async def test_a_sum_that_a_device_could_not_make_is_an_error_and_the_standby_gets_what_its_server_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The push counts and the value stays: -1, then no step, then -1 again."""
    caplog.set_level("INFO", "aiokv")
    launch, broken = Works.launch, list[bool]()

    def break_down(works: Works, given: Any, stream: Any) -> None:
        if broken and isinstance(given[0][0], Add):
            raise ZeroDivisionError("no such kernel")
        launch(works, given, stream)

    monkeypatch.setattr(Works, "launch", break_down)

    async def step(kv: Any) -> float:
        return float((await kv.pushpull("w", np.ones(5, np.float32)))[0])

    async with cluster("cuda", servers=2, policy="bsp", replication=2, reconnect_grace=0.1) as (nodes, workers):

        async def begin(kv: Any) -> float:
            await kv.set_optimizer("sgd", learning_rate=0.5)
            await kv.init({"w": np.zeros(5, np.float32)})
            return await step(kv)

        assert await asyncio.gather(*map(begin, workers)) == [-1, -1]
        await copied(nodes)
        broken.append(True)
        for error in await asyncio.gather(*map(step, workers), return_exceptions=True):
            assert isinstance(error, UpdateRefusedError)
        broken.clear()
        (home,) = [node for node in nodes if node.store._kept]
        assert f"{home.name} can't copy to its standby" in caplog.text
        assert await asyncio.gather(*map(step, workers)) == [-2, -2]
        await crash(home)
        assert await asyncio.gather(*map(step, workers)) == [-3, -3]
