"""The CUDA kernels compile for real devices, without one, and to code that rounds each operation."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest

from aiokv.kernels.plan import plan_norms, plan_update
from aiokv.optim import LAMB, LANS, LARS, PRECISIONS, Assign, Optimizer
from aiokv.types import ITEM_SIZES

pytestmark = pytest.mark.skipif(os.environ.get("NUMBA_ENABLE_CUDASIM") == "1", reason="the simulator compiles nothing")

CAPABILITIES = [(8, 0), (9, 0)]


@pytest.fixture(scope="module")
def kernels() -> Any:
    cuda = pytest.importorskip("aiokv.kernels.cuda", reason="numba-cuda is not installed", exc_type=ImportError)
    if error := cuda.missing_toolkit():
        pytest.skip(f"no CUDA toolkit: {error}")
    return cuda


def compiled(
    cuda: Any, kernel: Any, arrays: list[str], scalars: list[str], capability: tuple[int, int], lanes: int = 0
) -> str:
    from numba import from_dtype, types  # noqa: PLC0415 - optional

    arguments: list[Any] = [types.Array(from_dtype(np.dtype(dtype)), 1, "C") for dtype in arrays]
    if scalars:
        arguments.append(types.UniTuple(from_dtype(np.dtype(scalars[0])), len(scalars)))  # type: ignore[no-untyped-call]
    if lanes:
        arguments.append(types.UniTuple(types.Array(types.float64, 1, "C"), lanes))  # type: ignore[no-untyped-call]
    ptx, _ = cuda.compile(kernel.py_func, tuple(arguments), device=False, abi="numba", cc=capability)
    return str(ptx)


def check(ptx: str, capability: tuple[int, int]) -> None:
    major, minor = capability
    assert f".target sm_{major}{minor}\n" in ptx
    assert "fma." not in ptx


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtypes", ["float16 float16", "float32 float16", "float32 float32", "float64 float64"])
def test_accumulate_compiles(kernels: Any, dtypes: str, capability: tuple[int, int]) -> None:
    kernel = kernels.accumulate_half_kernel if "float16" in dtypes else kernels.accumulate_kernel
    check(compiled(kernels.cuda, kernel, dtypes.split(), [], capability), capability)


def rounded_operations(ptx: str) -> set[str]:
    """Return what may round, with its rounding mode if it has one."""
    return set(re.findall(r"\b((?:mul|add|sub|div|sqrt|rcp|rsqrt|fma|mad)\.(?:\w+\.)*f\d+)", ptx))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_updates_compile_to_operations_that_are_rounded_one_by_one(kernels: Any, rule: Optimizer, dtype: str) -> None:
    """An operation without a rounding mode, as `mul.f32`, may be fused later, by the assembler."""
    if isinstance(rule, Assign):
        return
    plan, precision = plan_update(rule), PRECISIONS[dtype]
    arrays = [dtype] * 2 + [precision] * len(plan.state + plan.inputs)
    kernel = kernels.update_kernel(plan, precision, in_place=True, master=False)
    ptx = compiled(kernels.cuda, kernel, arrays, [precision] * len(plan.numbers), CAPABILITIES[0])
    check(ptx, CAPABILITIES[0])
    width = 8 * ITEM_SIZES[precision]
    assert {f"add.rn.f{width}", f"mul.rn.f{width}"} <= rounded_operations(ptx)
    assert rounded_operations(ptx) <= {f"{operation}.rn.f{width}" for operation in ("mul", "add", "div", "sqrt")}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize(("rule", "phase"), [(LARS(), 0), (LAMB(), 0), (LANS(), 0), (LANS(), 1)], ids=str)
def test_squares_are_added_in_float64_each_rounded(
    kernels: Any, rule: Optimizer, phase: int, precision: str, capability: tuple[int, int]
) -> None:
    plan, counted = plan_norms(rule, phase), rule.norm_counts[phase]
    kernel = kernels.norms_kernel(plan, precision, counted)
    arrays, numbers = [precision] * (2 + len(plan.state)), [precision] * len(plan.numbers)
    ptx = compiled(kernels.cuda, kernel, arrays, numbers, capability, lanes=counted)
    check(ptx, capability)
    assert {"add.rn.f64", "mul.rn.f64"} <= rounded_operations(ptx)
    assert all(".rn." in operation for operation in rounded_operations(ptx))
