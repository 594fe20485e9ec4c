"""The CUDA kernels compile for real devices, without one, and to code that rounds each operation."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest

from aiokv.types import ITEM_SIZES

pytestmark = pytest.mark.skipif(os.environ.get("NUMBA_ENABLE_CUDASIM") == "1", reason="the simulator compiles nothing")

CAPABILITIES = [(8, 0), (9, 0)]
SCALARS = {"float16": "float32", "float32": "float32", "float64": "float64"}


@pytest.fixture(scope="module")
def kernels() -> Any:
    cuda = pytest.importorskip("aiokv.kernels.cuda", reason="numba-cuda is not installed", exc_type=ImportError)
    if error := cuda.missing_toolkit():
        pytest.skip(f"no CUDA toolkit: {error}")
    return cuda


def compiled(cuda: Any, kernel: Any, dtypes: list[Any], capability: tuple[int, int]) -> str:
    from numba import from_dtype, types  # noqa: PLC0415 - optional

    arguments = tuple(
        types.Array(from_dtype(np.dtype(dtype[0])), 1, "C") if isinstance(dtype, list) else from_dtype(np.dtype(dtype))
        for dtype in dtypes
    )
    ptx, _ = cuda.compile(kernel.py_func, arguments, device=False, abi="numba", cc=capability)
    return str(ptx)


def check(ptx: str, capability: tuple[int, int]) -> None:
    major, minor = capability
    assert f".target sm_{major}{minor}\n" in ptx
    assert "fma." not in ptx


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ITEM_SIZES)
def test_accumulate_compiles(kernels: Any, dtype: str, capability: tuple[int, int]) -> None:
    kernel = kernels.accumulate_half_kernel if dtype == "float16" else kernels.accumulate_kernel
    check(compiled(kernels.cuda, kernel, [[dtype], [dtype]], capability), capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("dtype", SCALARS)
def test_sgd_compiles_to_operations_that_are_not_fused(
    kernels: Any, dtype: str, momentum: bool, capability: tuple[int, int]
) -> None:
    """An operation without a rounding mode, as `mul.f32`, may be fused later, by the assembler."""
    arrays, scalars = (4, 4) if momentum else (3, 3)
    kernel = kernels.SGD_KERNELS[SCALARS[dtype]][momentum]
    ptx = compiled(kernels.cuda, kernel, [[dtype]] * arrays + [SCALARS[dtype]] * scalars, capability)
    check(ptx, capability)
    assert f"mul.rn.f{8 * ITEM_SIZES[SCALARS[dtype]]}" in ptx
    assert re.findall(r"\b(?:mul|add|sub)\.f\d+", ptx) == []
