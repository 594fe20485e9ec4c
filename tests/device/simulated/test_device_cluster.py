"""A cluster over TCP whose servers keep their keys on a device, and one on the host: the same bits."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import aiokv
from aiokv.kernels.cuda.work import Works
from aiokv.kernels.work import Decode
from aiokv.store.device import DeviceStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

Values = dict[str, NDArray[Any]]

SETTINGS: dict[str, Any] = {
    "token": "a shared secret",
    "backend": "reference",
    "cluster": "test",
    "heartbeat": 0.5,
    "settle_time": 0.0,
    "death_timeout": 20.0,
    "call_timeout": 60.0,
    "join_timeout": 60.0,
}

SHAPES = {"a": (40, 3), "b": (70,), "c": (), "large": (5000,)}
"""The last one is cut; the others go together, as long as nobody uses one of them alone."""


@contextlib.asynccontextmanager
async def cluster(
    device: str,
    *,
    servers: int,
    policy: str,
    count: int = 2,
    replication: int = 1,
    on_host: tuple[int, ...] = (),
    **others: Any,
) -> AsyncIterator[tuple[list[Any], list[Any]]]:
    settings = {**SETTINGS, "chunk_bytes": 16384, "split_bytes": 16384, **others}
    async with contextlib.AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(
            aiokv.Scheduler(num_workers=count, num_servers=servers, bind_port=0, replication=replication, **settings)
        )
        nodes = [
            await stack.enter_async_context(
                aiokv.Server(
                    scheduler=scheduler.address,
                    name=f"server-{n}",
                    device="cpu" if n in on_host else device,
                    **settings,
                )
            )
            for n in range(servers)
        ]
        workers = [aiokv.connect(scheduler.address, name=f"w{n}", policy=policy, **settings) for n in range(count)]
        await asyncio.gather(*(worker.start() for worker in workers))
        try:
            yield nodes, workers
        finally:
            await asyncio.gather(*(worker.close() for worker in workers))


def gradients(seed: int, dtype: str) -> Values:
    rng = np.random.default_rng(seed)
    return {key: np.asarray(rng.standard_normal(shape), dtype) for key, shape in SHAPES.items()}


async def train(
    device: str, rule: str | None, params: dict[str, Any], *, dtype: str, servers: int = 1, codec: str = ""
) -> list[Values]:
    """Train in step; return what each worker has in the end."""

    async def work(kv: Any) -> Values:
        if rule is not None:
            await kv.set_optimizer(rule, **params)
        if codec:
            await kv.set_gradient_compression(codec)
        await kv.init(gradients(99, dtype))
        out = {key: np.empty(shape, dtype) for key, shape in SHAPES.items()}
        for step in range(3):
            await kv.pushpull(gradients(10 * step + kv.rank, dtype), out=out)
        # Keys that went together are used alone from now on.
        await kv.pushpull("a", gradients(7 + kv.rank, dtype)["a"], out=out["a"])
        return out

    async with cluster(device, servers=servers, policy="bsp") as (nodes, workers):
        found = await asyncio.gather(*(work(worker) for worker in workers))
        assert all(isinstance(node.store, DeviceStore) == (device != "cpu") for node in nodes)
        assert all(node.store.open_slots == 0 for node in nodes)
    return found


CASES: dict[str, tuple[str | None, dict[str, Any], str, int]] = {
    "sums": (None, {}, "float32", 1),
    "sgd": ("sgd", {"learning_rate": 0.1}, "float32", 2),
    "adam with master weights": ("adam", {"multi_precision": True}, "bfloat16", 1),
    "norms over two servers": ("lamb", {}, "float32", 2),
    "a rule without a kernel": ("sgld", {}, "float32", 1),
}


@pytest.mark.one_loop("it is about what is computed")
@pytest.mark.parametrize(("rule", "params", "dtype", "servers"), CASES.values(), ids=CASES)
async def test_weights_have_the_bits_of_a_cluster_on_the_host(
    rule: str | None, params: dict[str, Any], dtype: str, servers: int
) -> None:
    on_device = await train("cuda", rule, params, dtype=dtype, servers=servers)
    on_host = await train("cpu", rule, params, dtype=dtype, servers=servers)
    for mine, other in zip(on_device, on_host, strict=True):
        for key in SHAPES:
            assert mine[key].tobytes() == other[key].tobytes()


DECODED = ["1bit", "2bit", "fp16", "bf16", "fp8"]


@pytest.mark.one_loop("it is about what is computed")
@pytest.mark.parametrize(("codec", "decodes"), [*((name, True) for name in DECODED), ("qsgd", False)])
async def test_compressed_gradients_and_values(codec: str, decodes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of keys that are sent together, too: three steps of two workers, whose large key has two chunks.

    When one of these keys is used alone for the first time it has no chunk of its own yet.
    """
    decoded, launch = [], Works.launch

    def watch(works: Works, given: Any, stream: Any) -> None:
        decoded.extend([work for work, _ in given if isinstance(work, Decode)])
        launch(works, given, stream)

    monkeypatch.setattr(Works, "launch", watch)
    on_device = await train("cuda", "sgd", {"learning_rate": 0.1}, dtype="float32", codec=codec)
    on_host = await train("cpu", "sgd", {"learning_rate": 0.1}, dtype="float32", codec=codec)
    assert len(decoded) // (3 * 2 * (2 + 1)) == decodes
    for key in SHAPES:
        assert on_device[0][key].tobytes() == on_host[0][key].tobytes()


async def test_async_pushes_and_whole_numbers() -> None:
    """Every push is an update of its own: 1 - 0.5 * (1 + 1) for each, by hand."""

    async def work(kv: Any) -> None:
        await kv.set_optimizer("accumulate", rescale_grad=-0.5)
        await kv.init({"w": np.ones(5, np.float32)})
        await kv.push("w", np.ones(5, np.float32))
        await kv.barrier()
        np.testing.assert_array_equal(await kv.pull("w", np.empty(5, np.float32)), np.zeros(5))

    async with cluster("cuda", servers=1, policy="asp") as (_, workers):
        await asyncio.gather(*(work(worker) for worker in workers))


async def test_saving_and_loading(tmp_path: Any) -> None:
    async def work(kv: Any) -> None:
        await kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
        await kv.init(gradients(99, "float32"))
        await kv.pushpull(gradients(kv.rank, "float32"), out=gradients(0, "float32"))
        await kv.save(str(tmp_path / "saved.safetensors"))
        first = gradients(0, "float32")
        await kv.pushpull(gradients(5 + kv.rank, "float32"), out=first)
        await kv.load(str(tmp_path / "saved.safetensors"))
        second = gradients(0, "float32")
        await kv.pushpull(gradients(5 + kv.rank, "float32"), out=second)
        for key in SHAPES:
            assert first[key].tobytes() == second[key].tobytes()

    async with cluster("cuda", servers=1, policy="bsp") as (_, workers):
        await asyncio.gather(*(work(worker) for worker in workers))


async def test_rows_stay_on_the_host_and_go_on_beside_keys_on_a_device() -> None:
    """A thread works on the rows, of which there are many; what devices report meanwhile waits for it."""
    rows, width = 4000, 8

    async def work(kv: Any) -> tuple[bytes, bytes]:
        await kv.set_optimizer("sgd", learning_rate=0.5)
        await kv.init("t", aiokv.RowSparse.empty((rows, width)))
        await kv.init({"w": np.zeros(9000, np.float32)})
        out = np.empty(9000, np.float32)
        ids = np.arange(kv.rank, rows, 2)
        for step in range(4):
            gradient = aiokv.RowSparse(ids, np.full((ids.size, width), step, np.float32), (rows, width))
            await asyncio.gather(kv.push("t", gradient), kv.pushpull("w", np.full(9000, step, np.float32), out=out))
        found = await kv.row_sparse_pull("t", row_ids=np.arange(rows))
        return out.tobytes(), found.values.tobytes()

    results = []
    for device in ("cuda", "cpu"):
        async with cluster(device, servers=1, policy="bsp") as (_, workers):
            results.append(await asyncio.gather(*(work(worker) for worker in workers)))
    assert results[0] == results[1]
    # 0 - 0.5 * 2 * (0 + 1 + 2 + 3)
    assert results[0][0][0] == np.full(9000, -6, np.float32).tobytes()


async def test_who_is_gone_does_not_keep_a_value() -> None:
    """A worker that leaves before its answer has come from the device."""
    async with cluster("cuda", servers=1, policy="asp") as (nodes, workers):
        first, second = workers
        await asyncio.gather(*(kv.init({"w": np.zeros(9000, np.float32)}) for kv in workers))
        task = asyncio.create_task(first.pushpull("w", np.ones(9000, np.float32), out=np.empty(9000, np.float32)))
        await asyncio.sleep(0)
        await first.abort()
        with pytest.raises(aiokv.AiokvError):
            await task
        await second.pushpull("w", np.ones(9000, np.float32), out=np.empty(9000, np.float32))
    assert not nodes[0].store._schedule._outgoing.values()


async def test_workers_and_servers_of_one_process_share_its_devices() -> None:
    """Each worker hosts a server, and sums lists of arrays while the servers add and update."""
    from numba import cuda  # noqa: PLC0415 - in other processes nothing is simulated

    settings = {**SETTINGS, "colocate": True, "chunk_bytes": 16384}

    async def work(kv: Any) -> set[float]:
        await kv.start()
        await kv.set_optimizer("accumulate", rescale_grad=0.5)
        out = {key: np.zeros(shape, np.float32) for key, shape in SHAPES.items()}
        await kv.init(out)
        for _ in range(4):
            pushed = {key: [cuda.to_device(np.full(shape, 2, np.float32))] * 3 for key, shape in SHAPES.items()}
            await kv.pushpull(pushed, out=out)
        return values_in(out.values())

    async with aiokv.Scheduler(num_workers=2, num_servers=2, bind_port=0, **settings) as scheduler:
        host, port = scheduler.address.rsplit(":", 1)
        config = aiokv.Config(scheduler_host=host, scheduler_port=int(port), device="cuda", **settings)
        workers = [aiokv.connect(device="cuda", config=msgspec.structs.replace(config, name=f"w{n}")) for n in range(2)]
        try:
            found = await asyncio.gather(*(work(worker) for worker in workers))
        finally:
            await asyncio.gather(*(worker.close() for worker in workers))
    # 0.5 * 2 * (2 + 2 + 2) in each of four steps.
    assert found == [{24.0}] * 2


# --- a worker is lost ---


async def push_and_die(kv: Any, pushed: Iterable[Values], turns: int = 20) -> None:
    """Make some calls, and vanish a few turns of the loop later, before they are answered."""
    calls = [asyncio.create_task(kv.push(gradients)) for gradients in pushed]
    for _ in range(turns):
        await asyncio.sleep(0)
    await kv.abort()
    await asyncio.gather(*calls, return_exceptions=True)


def numbers(rank: int) -> Values:
    return {key: np.full(shape, 1000.0**rank, np.float32) for key, shape in SHAPES.items()}


@pytest.mark.parametrize("turns", [1, 4, 16])
async def test_with_shrink_the_others_go_on_and_no_key_has_what_another_lacks(turns: int) -> None:
    """Each number says whose pushes are in it."""
    settings: dict[str, Any] = {"on_worker_loss": "shrink", "death_timeout": 2.0, "reconnect_grace": 0.1, "count": 3}

    async def begin(kv: Any) -> None:
        await kv.init({key: np.zeros(shape, np.float32) for key, shape in SHAPES.items()})
        assert values_in(await kv.pushpull(numbers(kv.rank))) == {1001001.0}

    async def go_on(kv: Any) -> list[set[float]]:
        await begin(kv)
        return [values_in(await kv.pushpull(numbers(kv.rank))) for _ in range(3)]

    async def die(kv: Any) -> None:
        await begin(kv)
        await push_and_die(kv, [numbers(2)], turns)

    async with cluster("cuda", servers=2, policy="bsp", **settings) as (nodes, workers):
        first, second, _ = await asyncio.gather(go_on(workers[0]), go_on(workers[1]), die(workers[2]))
        assert all(isinstance(node.store, DeviceStore) for node in nodes)
    assert first == second
    assert first[0] in ({1001.0}, {1001001.0})
    assert first[1:] == [{1001.0}] * 2


def values_in(values: Iterable[Any]) -> set[float]:
    return {float(number) for value in values for number in np.unique(value)}


@pytest.mark.parametrize("pushed", [0, 2, 4])
async def test_with_respawn_weights_are_those_of_an_undisturbed_run_on_the_host(pushed: int) -> None:
    """The next process of the name reads the last complete round and makes its step once more."""
    steps, death = 3, 1
    settings: dict[str, Any] = {
        "on_worker_loss": "respawn",
        "death_timeout": 2.0,
        "reconnect_grace": 0.1,
        "respawn_timeout": 30.0,
    }

    def slopes(values: Values, step: int, rank: int) -> Values:
        return {key: np.asarray(value * np.float32(0.3 + rank) + step, np.float32) for key, value in values.items()}

    async def train(kv: Any, until: int = steps) -> Values:
        values = gradients(99, "float32")
        await kv.init(values)
        await kv.set_optimizer("adam", learning_rate=0.01)
        begin = await kv.resume_step()
        await kv.pull(list(values), out=list(values.values()))
        for step in range(begin, until):
            await kv.pushpull(slopes(values, step, kv.rank), out=values)
        return values

    async with cluster("cpu", servers=2, policy="bsp") as (_, workers):
        expected, _ = await asyncio.gather(*(train(worker) for worker in workers))
    async with cluster("cuda", servers=2, policy="bsp", **settings) as (_, workers):
        survivor = asyncio.create_task(train(workers[0]))
        values = await train(workers[1], death)
        last = slopes(values, death, 1)
        await push_and_die(workers[1], [{key: last[key]} for key in list(SHAPES)[:pushed]])
        address = f"{workers[0].config.scheduler_host}:{workers[0].config.scheduler_port}"
        workers[1] = aiokv.connect(address, name="w1", **{**SETTINGS, **settings})
        await workers[1].start()
        found = await asyncio.gather(survivor, train(workers[1]))
    for mine in found:
        assert {key: value.tobytes() for key, value in mine.items()} == {k: v.tobytes() for k, v in expected.items()}


async def test_copies_of_other_servers_are_on_the_host(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aiokv")
    async with cluster("cuda", servers=2, policy="bsp", count=1, replication=2, on_host=(1,)) as (nodes, (kv,)):
        await kv.init("large", np.zeros(5000, np.float32))
        await kv.set_optimizer("sgd", learning_rate=0.5)
        value = await kv.pushpull("large", np.ones(5000, np.float32))
        np.testing.assert_array_equal(value, np.full(5000, -0.5, np.float32))
        assert [isinstance(node.store, DeviceStore) for node in nodes] == [True, False]
        for index in (0, 1):
            assert f"has a copy of all parameters of server {index}" in caplog.text
        copies = [nodes[0].siblings[name] for name in nodes[0].siblings]
        assert [isinstance(node.store, DeviceStore) for node in copies] == [False]
