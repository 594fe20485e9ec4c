"""The CUDA kernels compile for real devices, without one: to code that rounds each operation, spills nothing, and moves
16 bytes at a time."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from aiokv.kernels.plan import plan_norms, plan_update
from aiokv.optim import LAMB, LANS, LARS, PRECISIONS, Assign, Optimizer
from aiokv.types import ITEM_SIZES

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"

pytestmark = pytest.mark.skipif(SIMULATED, reason="the simulator compiles nothing")

TABLE = json.loads((Path(__file__).parents[2] / "docs" / "device-kernels.json").read_text(encoding="utf-8"))

REMAKE = "if it has to be so, make the table again: python benchmarks/kernel_table.py"


@pytest.fixture(scope="module")
def kernels() -> Any:
    cuda = pytest.importorskip("aiokv.kernels.cuda", reason="numba-cuda is not installed", exc_type=ImportError)
    if error := cuda.missing_toolkit():
        pytest.skip(f"no CUDA toolkit: {error}")
    return pytest.importorskip("aiokv.kernels.cuda.listing"), pytest.importorskip("aiokv.kernels.cuda.compiling")


def check(ptx: str, capability: tuple[int, int]) -> None:
    major, minor = capability
    assert f".target sm_{major}{minor}\n" in ptx
    assert "fma." not in ptx


# --- every kernel ---


@pytest.mark.parametrize("name", TABLE["kernels"])
def test_a_kernel_spills_nothing_and_loads_16_bytes_at_a_time(kernels: Any, name: str) -> None:
    listing, compiling = kernels
    ptxas = compiling.find_ptxas()
    compiled = compiling.Compiled(next(each for each in listing.every_kernel() if each.name == name))
    for capability in compiling.CAPABILITIES:
        row, ptx = compiling.describe(compiled, capability, ptxas)
        check(ptx, capability)
        expected = TABLE["kernels"][name][".".join(map(str, capability))]
        assert all(".rn." in operation for operation in rounded_operations(ptx)), "the assembler may fuse operations"
        assert row["local"] == 0, "a thread keeps something in memory of its own"
        assert bool(row["wide_loads"]) == bool(expected["wide_loads"]), f"16-byte loads; {REMAKE}"
        assert bool(row["wide_stores"]) == bool(expected["wide_stores"]), f"16-byte stores; {REMAKE}"
        if compiled.listed.spec is not None:
            # Unrolled loops move some times as much.
            assert row["moves"] % row["must_move"] == 0, "a loop moves something twice, or not 16 bytes at a time"
        if ptxas is not None:
            assert (row["stack"], row["spills"]) == (0, 0)
        if compiling.versions(ptxas, ptx) == TABLE["versions"]:
            assert row == expected, REMAKE


def test_the_table_has_every_kernel(kernels: Any) -> None:
    listing, _ = kernels
    assert [listed.name for listed in listing.every_kernel()] == list(TABLE["kernels"]), REMAKE


# --- rounding ---


def rounded_operations(ptx: str) -> set[str]:
    """Return what may round, with its rounding mode if it has one."""
    return set(re.findall(r"\b((?:mul|add|sub|div|sqrt|rcp|rsqrt|fma|mad)\.(?:\w+\.)*f\d+)", ptx))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_updates_compile_to_operations_that_are_rounded_one_by_one(kernels: Any, rule: Optimizer, dtype: str) -> None:
    """An operation without a rounding mode, as `mul.f32`, may be fused later, by the assembler.

    Of one element: a kernel has the same code several times, in loops.
    """
    if isinstance(rule, Assign):
        return
    cuda = pytest.importorskip("numba.cuda")
    optimize = pytest.importorskip("aiokv.kernels.cuda.optimize")
    streaming = pytest.importorskip("aiokv.kernels.cuda.streaming")
    plan, precision = plan_update(rule), PRECISIONS[dtype]
    spec = optimize.update_spec(plan, precision, dtype, dtype, None, (precision,) * len(plan.inputs))
    element = streaming.streaming_kernel(spec).py_func.__globals__["element_of"].py_func
    numbers = (getattr(cuda.types, precision),) * (len(spec.reads) + len(spec.numbers))
    ptx, _ = cuda.compile(element, numbers, device=True, abi="numba", cc=(8, 0))
    check(ptx, (8, 0))
    width = 8 * ITEM_SIZES[precision]
    assert {f"add.rn.f{width}", f"mul.rn.f{width}"} <= rounded_operations(ptx)
    assert rounded_operations(ptx) <= {f"{operation}.rn.f{width}" for operation in ("mul", "add", "div", "sqrt")}


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize(("rule", "phase"), [(LARS(), 0), (LAMB(), 0), (LANS(), 0), (LANS(), 1)], ids=str)
def test_squares_are_added_in_float64_each_rounded(kernels: Any, rule: Optimizer, phase: int, precision: str) -> None:
    listing, compiling = kernels
    optimize = pytest.importorskip("aiokv.kernels.cuda.optimize")
    plan, counted = plan_norms(rule, phase), rule.norm_counts[phase]
    arrays = optimize.norms_arrays(plan, precision, precision, precision)
    arguments = (*listing.TABLE, f"{precision}[2]", "float64[2]")
    listed = listing.Listed("", lambda: optimize.norms_kernel(plan, precision, arrays, counted), arguments, 0)
    ptx = compiling.Compiled(listed).to_ptx((9, 0))
    check(ptx, (9, 0))
    assert {"add.rn.f64", "mul.rn.f64"} <= rounded_operations(ptx)
    assert all(".rn." in operation for operation in rounded_operations(ptx))


def test_syntax_trees_are_made_by_one_thread_at_a_time(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has a thread. Two that did so at once have ended in CPython's SystemError."""
    rounding = pytest.importorskip("aiokv.kernels.cuda.rounding")
    parse, held = rounding.ast.parse, []

    def watched(source: str) -> Any:
        held.append(rounding._parsing.locked())
        return parse(source)

    monkeypatch.setattr(rounding.ast, "parse", watched)
    rounding.names.__wrapped__("float32")
    assert held == [True]
