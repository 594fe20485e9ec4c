"""Horovod's tests of errors: where ranks do not agree, every rank gets an error, and nobody is left waiting.

A rank that is wrong is told so at once; the ranks that wait for it get an error that names it when their time is over.
The round stays open, and closes when the rank has done right.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.errors import (
    AiokvError,
    KeyUseError,
    MembershipError,
    OptimizerError,
    PolicyError,
    RoundTimeoutError,
    SpecMismatchError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiokv
    from tests.net.conftest import MakeCluster

CUT = {"servers": 2, "split_bytes": 4096}

SPECS: dict[str, Callable[[int], tuple[tuple[int, ...], str]]] = {
    "first dimension": lambda rank: ((17 + rank, 3), "float32"),
    "number of dimensions": lambda rank: ((17, 3) if rank == 0 else (51,), "float32"),
    "order of dimensions": lambda rank: ((17, 3) if rank == 0 else (3, 17), "float32"),
    "dtype": lambda rank: ((17, 3), "float64" if rank % 2 else "float32"),
    "dtype of the same size": lambda rank: ((17, 3), "int32" if rank % 2 else "float32"),
    "zero size": lambda rank: ((17, 3) if rank == 0 else (0, 3), "float32"),
    "first dimension, cut": lambda rank: ((1700 + rank, 3), "float32"),
    "dtype, cut": lambda rank: ((1700, 3), "float64" if rank % 2 else "float32"),
    "only the root's is cut": lambda rank: ((1700, 3) if rank == 0 else (17, 3), "float32"),
    "only the others' are cut": lambda rank: ((17, 3) if rank == 0 else (1700, 3), "float32"),
    "only the root's is empty": lambda rank: ((0, 3) if rank == 0 else (17, 3), "float32"),
}
"""What differs -> a rank's shape and dtype."""


def ones(spec: tuple[tuple[int, ...], str]) -> Any:
    return np.ones(*spec)


async def errors_of(*calls: Any) -> list[Any]:
    """Return the error, or None, of each call; only errors of aiokv count."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, AiokvError):
            raise result
    return [result if isinstance(result, AiokvError) else None for result in results]


@pytest.mark.parametrize("first", ["root", "others"])
@pytest.mark.parametrize("neighbours", [False, True], ids=["alone", "among others"])
@pytest.mark.parametrize("spec_of", SPECS.values(), ids=SPECS)
async def test_specs_that_differ_are_an_error_on_every_rank(
    cluster: MakeCluster, spec_of: Callable[[int], Any], neighbours: bool, first: str
) -> None:
    right = spec_of(0)

    def tensors(kv: aiokv.Client, spec: Any) -> dict[str, Any]:
        # Small ones of one call go together: one that is wrong must not spoil the others.
        others = {f"right {i}": ones(((2,), "float32")) for i in range(3)} if neighbours else {}
        return {"w": ones(spec), **others}

    async with cluster(workers=2, **CUT) as running:
        root, other = running.workers
        begun = asyncio.create_task(errors_of(other.init(tensors(other, spec_of(1)))))
        if first == "others":
            # A round trip on the same connections: the init has arrived at all servers.
            await other.set_optimizer("assign")
        await root.init(tensors(root, right))
        (error,) = await begun
        assert type(error) is SpecMismatchError
        assert "'w'" in str(error)
        assert error.details["key"] == "w"
        for value in await asyncio.gather(*(kv.pull("w", np.empty(*right)) for kv in running.workers)):
            np.testing.assert_array_equal(value, ones(right))
        (error,) = await errors_of(other.push("w", ones(spec_of(1))))
        assert type(error) is SpecMismatchError
        await other.init(tensors(other, right))
        for values in await running.each(lambda kv: kv.pushpull(tensors(kv, right))):
            for value in values:
                np.testing.assert_array_equal(value, np.full_like(value, 2))
        assert all(server.store.open_slots == 0 for server in running.servers)


@pytest.mark.parametrize("size", [17, 17_000], ids=["small", "cut"])
async def test_who_waits_for_a_rank_that_is_wrong_gets_an_error_that_names_it(cluster: MakeCluster, size: int) -> None:
    """What rank 0 has pushed still counts: when the others have done right, the sum is 1 + 1 + 1."""
    right = {"w": np.ones(size, "float32"), "v": np.ones(17, "float32")}
    async with cluster(workers=3, **CUT) as running:
        await running.each(lambda kv: kv.init(right))
        root, *others = running.workers
        wrong = [{"w": np.ones(size + kv.rank, "float32"), "v": right["v"]} for kv in others]
        waited, *refused = await errors_of(
            root.push(right, timeout=1.0), *(kv.push(given) for kv, given in zip(others, wrong, strict=True))
        )
        assert [type(error) for error in refused] == [SpecMismatchError] * 2
        assert type(waited) is RoundTimeoutError
        assert waited.details["ranks"] == [1, 2]
        for values in await asyncio.gather(*(kv.pushpull(right) for kv in others)):
            for value in values:
                np.testing.assert_array_equal(value, np.full_like(value, 3))


WRONG: dict[str, tuple[Callable[[aiokv.Client], Any], type[AiokvError]]] = {
    "another shape": (lambda kv: kv.push("w", np.ones((17 + kv.rank + 1,), "float32")), SpecMismatchError),
    "another number of dimensions": (lambda kv: kv.pushpull("w", np.ones((17, 1), "float32")), SpecMismatchError),
    "another dtype": (lambda kv: kv.push("w", np.ones(17, "int32")), SpecMismatchError),
    "one of several": (
        lambda kv: kv.push({"v": np.ones(17, "float32"), "w": np.ones(17, "float64")}),
        SpecMismatchError,
    ),
    "a dtype that is none": (lambda kv: kv.push("w", np.ones(17, "complex64")), SpecMismatchError),
    "booleans": (lambda kv: kv.push("w", np.ones(17, "bool")), SpecMismatchError),
    "text": (lambda kv: kv.push("w", np.array(["text"] * 17)), SpecMismatchError),
    "objects": (lambda kv: kv.push("w", np.array([None] * 17)), SpecMismatchError),
    "devices that differ": (
        lambda kv: kv.push("w", [np.ones(17, "float32"), np.ones(18, "float32")]),
        SpecMismatchError,
    ),
    "a name twice": (lambda kv: kv.push(["w", "w"], [np.ones(17, "float32")] * 2), KeyUseError),
    "too few tensors": (lambda kv: kv.push(["w", "v"], [np.ones(17, "float32")]), KeyUseError),
    "a mean of integers": (lambda kv: kv.set_optimizer("assign", reduction="mean"), OptimizerError),
    "a reduction that is none": (lambda kv: kv.set_optimizer("assign", reduction="product"), OptimizerError),
    "a rank that is none": (lambda kv: kv.group([0, 1, 2, 3]).init("u", np.ones(1)), MembershipError),
    "a negative rank": (lambda kv: kv.group([-1, 0, 1, 2]).init("u", np.ones(1)), MembershipError),
}
"""What is wrong -> the call that every rank makes, and its error."""


@pytest.mark.parametrize(("call", "expected"), WRONG.values(), ids=WRONG)
async def test_what_every_rank_does_wrong_is_an_error_on_every_rank_and_changes_nothing(
    cluster: MakeCluster, call: Callable[[aiokv.Client], Any], expected: type[AiokvError]
) -> None:
    given = {"w": np.ones(17, "float32"), "v": np.ones(17, "float32"), "i": np.ones(17, "int64")}
    async with cluster(workers=3, **CUT) as running:
        await running.each(lambda kv: kv.init(given))
        errors = await errors_of(*(call(kv) for kv in running.workers))
        assert [type(error) for error in errors] == [expected] * 3
        for values in await running.each(lambda kv: kv.pull(list(given))):
            np.testing.assert_array_equal(values, np.ones((3, 17)))
        for values in await running.each(lambda kv: kv.pushpull(given)):
            np.testing.assert_array_equal(values, np.full((3, 17), 3))


def _init(kv: aiokv.Client, **options: Any) -> Any:
    return kv.init("w", np.ones(17, "float32"), **options)


DIFFERENT: dict[str, tuple[Callable[[aiokv.Client], Any], type[AiokvError]]] = {
    "rules": (lambda kv: kv.set_optimizer("sgd" if kv.rank else "adam"), OptimizerError),
    "reductions": (lambda kv: kv.set_optimizer("sgd", reduction="mean" if kv.rank else "sum"), OptimizerError),
    "scales": (lambda kv: kv.set_optimizer("sgd", rescale_grad=0.5 + kv.rank), OptimizerError),
    "policies": (lambda kv: _init(kv, policy="asp" if kv.rank else "bsp"), PolicyError),
    "groups": (lambda kv: _init(kv, group=[0, 1] if kv.rank else [0]), MembershipError),
    "roots": (lambda kv: _init(kv, group=[kv.rank]), MembershipError),
}
"""In what the ranks differ -> the call, and the error of the rank that is too late."""


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["root first", "root last"])
@pytest.mark.parametrize(("call", "expected"), DIFFERENT.values(), ids=DIFFERENT)
async def test_ranks_that_differ_in_what_they_set(
    cluster: MakeCluster, call: Callable[[aiokv.Client], Any], expected: type[AiokvError], order: tuple[int, int]
) -> None:
    """The first one is right; the other one is told what there is. Neither waits until its time is over."""
    async with cluster(workers=2, **CUT) as running:
        tasks = []
        for rank in order:
            kv = running.workers[rank]
            tasks.append(asyncio.create_task(errors_of(call(kv))))
            # A round trip on the same connections: the call has arrived.
            await kv.send_command_to_servers("statistics")
        errors = [error for (error,) in await asyncio.gather(*tasks)]
        assert [type(error) for error in errors if error is not None] == [expected]
