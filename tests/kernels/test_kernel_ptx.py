"""The CUDA kernels compile for real devices, without one, and to code that rounds each operation."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest

from aiokv.optim import PRECISIONS
from aiokv.types import ITEM_SIZES

pytestmark = pytest.mark.skipif(os.environ.get("NUMBA_ENABLE_CUDASIM") == "1", reason="the simulator compiles nothing")

CAPABILITIES = [(8, 0), (9, 0)]


@pytest.fixture(scope="module")
def kernels() -> Any:
    cuda = pytest.importorskip("aiokv.kernels.cuda", reason="numba-cuda is not installed", exc_type=ImportError)
    if error := cuda.missing_toolkit():
        pytest.skip(f"no CUDA toolkit: {error}")
    return cuda


def compiled(cuda: Any, kernel: Any, arrays: list[str], scalars: list[str], capability: tuple[int, int]) -> str:
    from numba import from_dtype, types  # noqa: PLC0415 - optional

    arguments: list[Any] = [types.Array(from_dtype(np.dtype(dtype)), 1, "C") for dtype in arrays]
    if scalars:
        arguments.append(types.UniTuple(from_dtype(np.dtype(scalars[0])), len(scalars)))  # type: ignore[no-untyped-call]
    ptx, _ = cuda.compile(kernel.py_func, tuple(arguments), device=False, abi="numba", cc=capability)
    return str(ptx)


def check(ptx: str, capability: tuple[int, int]) -> None:
    major, minor = capability
    assert f".target sm_{major}{minor}\n" in ptx
    assert "fma." not in ptx


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ITEM_SIZES)
def test_accumulate_compiles(kernels: Any, dtype: str, capability: tuple[int, int]) -> None:
    kernel = kernels.accumulate_half_kernel if dtype == "float16" else kernels.accumulate_kernel
    check(compiled(kernels.cuda, kernel, [dtype, dtype], [], capability), capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("kernel", "states", "scalars"), [("sgd", 0, 3), ("sgd_with_momentum", 1, 4), ("adam", 2, 8)])
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_updates_compile_to_operations_that_are_rounded_one_by_one(
    kernels: Any, dtype: str, kernel: str, states: int, scalars: int, capability: tuple[int, int]
) -> None:
    """An operation without a rounding mode, as `mul.f32`, may be fused later, by the assembler."""
    precision = PRECISIONS[dtype]
    arrays = [dtype] * 2 + [precision] * states
    ptx = compiled(kernels.cuda, kernels.KERNELS[precision][kernel], arrays, [precision] * scalars, capability)
    check(ptx, capability)
    found = set(re.findall(r"\b((?:mul|add|sub|div|sqrt|rcp|rsqrt)\.(?:\w+\.)*f\d+)", ptx))
    operations = ["mul", "add", "div", "sqrt"] if kernel == "adam" else ["mul", "add"]
    assert found == {f"{operation}.rn.f{8 * ITEM_SIZES[precision]}" for operation in operations}
