"""Horovod's broadcast: a root creates a key that is its own, and all others read it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 - with it NumPy knows the name "bfloat16"
import numpy as np
import pytest

from aiokv.errors import MembershipError, SpecMismatchError, UnknownKeyError
from aiokv.types import ITEM_SIZES

if TYPE_CHECKING:
    import aiokv
    from tests.net.conftest import MakeCluster

SHAPES: list[tuple[int, ...]] = [(17,), (17, 17), (17, 17, 17), (), (0, 17)]
CUT = {"servers": 2, "split_bytes": 4096}


def tensors(root: int, dtype: str, value: int) -> dict[str, Any]:
    return {f"root {root} {shape}": np.full(shape, value, dtype) for shape in SHAPES}


@pytest.mark.parametrize("dtype", list(ITEM_SIZES))
async def test_from_every_root(cluster: MakeCluster, dtype: str) -> None:
    """All roots at once. The others, who have numbers of their own, get the root's; the root's stay as they are."""

    async def from_root(kv: aiokv.Client, root: int) -> None:
        mine = tensors(root, dtype, 10 + kv.rank)
        if kv.rank == root:
            await kv.group([root]).init(mine)
        else:
            await kv.pull(mine)
        for key, tensor in tensors(root, dtype, 10 + root).items():
            np.testing.assert_array_equal(mine[key], tensor, err_msg=key, strict=True)

    async with cluster(workers=3, **CUT) as running:
        await running.each(lambda kv: asyncio.gather(*(from_root(kv, root) for root in range(3))))


@pytest.mark.parametrize("root", range(3))
async def test_again_and_again_from_one_root(cluster: MakeCluster, root: int) -> None:
    """What a root pushes into its own key is its new value; a barrier says that it is there."""

    async def work(kv: aiokv.Client) -> None:
        if kv.rank == root:
            await kv.group([root]).init("w", np.zeros(17, "float32"))
        for step in range(3):
            if kv.rank == root:
                await kv.push("w", np.full(17, step, "float32"))
            await kv.barrier(f"pushed {step}")
            value = await kv.pull("w", np.empty(17, "float32"))
            np.testing.assert_array_equal(value, np.full(17, step, "float32"))
            await kv.barrier(f"pulled {step}")

    async with cluster(workers=3, **CUT) as running:
        await running.each(work)


@pytest.mark.parametrize("root", range(3))
async def test_who_waits_with_another_shape_or_dtype_is_told_so(cluster: MakeCluster, root: int) -> None:
    async with cluster(workers=3, **CUT) as running:
        wrong = {0: ((18,), "float32"), 1: ((17, 1), "float32"), 2: ((17,), "int32")}

        async def work(kv: aiokv.Client) -> None:
            if kv.rank == root:
                # Those who were here first, too.
                await kv.barrier("asked")
                await kv.group([root]).init("w", np.ones(17, "float32"))
                return
            shape, dtype = wrong[kv.rank]
            out = np.full(shape, 5, dtype)
            early = asyncio.create_task(kv.pull("w", out))
            await kv.send_command_to_servers("statistics")
            await kv.barrier("asked")
            for late in (early, kv.pull("w", out)):
                with pytest.raises(SpecMismatchError, match="'w'"):
                    await late
            np.testing.assert_array_equal(out, np.full(shape, 5, dtype))

        await running.each(work)


async def test_a_root_that_never_comes_is_an_error_on_all_who_wait(cluster: MakeCluster) -> None:
    async with cluster(workers=3, **CUT) as running:
        out = np.full(17, 5, "float32")
        for kv in running.workers[1:]:
            with pytest.raises(UnknownKeyError, match="'w'"):
                await kv.pull("w", out.copy(), timeout=1.0)


async def test_only_the_root_may_give_values(cluster: MakeCluster) -> None:
    async with cluster(workers=3, **CUT) as running:
        _, root, other = running.workers
        await root.group([1]).init("w", np.ones(17, "float32"))
        with pytest.raises(MembershipError, match=r"\[1\].*rank 2"):
            await other.push("w", np.ones(17, "float32"))
        with pytest.raises(MembershipError, match="rank 2"):
            await other.group([1]).init("w", np.full(17, 2, "float32"))
        for value in await running.each(lambda kv: kv.pull("w", np.empty(17, "float32"))):
            np.testing.assert_array_equal(value, np.ones(17))
