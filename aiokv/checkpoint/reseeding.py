"""Giving the servers of a new cluster the weights that workers still have from one whose servers are all lost."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from aiokv.arrays import sending
from aiokv.checkpoint import calls
from aiokv.checkpoint.saving import Content, Saved, SavedKey, SavedRule
from aiokv.checkpoint.snapshot import VALUE
from aiokv.core.worker.reseeding import bringer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.checkpoint.file_arrays import AnyArray
    from aiokv.operations import Operations
    from aiokv.types import Key, Rank


class Reseeded(msgspec.Struct, frozen=True):
    """With what a cluster goes on: the weights that a rank had after so many steps."""

    step: int
    rank: int


async def reseed(operations: Operations, values: Mapping[Any, Any], step: int, seconds: float) -> Reseeded:
    """Let the servers go on with what the worker with the most steps has; see `Operations.reseed`."""

    async def tell() -> calls.Said:
        return {"step": step, "call": secrets.token_hex(16)}

    said = await calls.together(operations, "aiokv: reseed", seconds, tell)
    root = bringer({rank: each["step"] for rank, each in said.items()})
    step = said[root]["step"]
    loading = calls.Loading(operations, f"the weights of rank {root}", None, seconds, weights=True, root=root)
    loading.place = f"reseed {said[root]['call']}"

    async def put() -> calls.Said:
        if operations.rank == root:
            loading.take(_saved(operations, root, step, values))
        return await loading.put()

    await calls.together(operations, f"aiokv: put {loading.place}", seconds, put)
    await loading.go_on()
    await operations.pull(dict(values), timeout=seconds)
    text = (
        f"the servers go on with the weights of rank {root} after step {step}; the state of the update rule begins anew"
    )
    operations.note("warning", "reseeded", text, {"rank": root, "step": step})
    return Reseeded(step, root)


def _saved(operations: Operations, rank: Rank, step: int, values: Mapping[Any, Any]) -> Saved:
    """Return weights as if they had been saved, without the state of an update rule."""
    arguments = sending(dict(values), None, lists=False)
    policy = operations._session.policy
    keys: list[SavedKey] = []
    arrays: dict[Key, dict[str, AnyArray]] = {}
    for key, array in zip(arguments.keys, arguments.sources, strict=True):
        keys.append(SavedKey(key, array.shape, array.dtype.name, False, policy, names=(VALUE,)))
        arrays[key] = {VALUE: array}
    rule = SavedRule("", {}, "sum", (), step)
    return Saved(Content(f"rank {rank}", operations.num_workers, (), {}, rule, keys), arrays)
