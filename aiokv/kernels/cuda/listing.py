"""All kernels, as they are compiled for a device: for the tests of the compiler's output, the bench and the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aiokv.kernels.cuda import codec, launch, optimize, reduce, select, sparse
from aiokv.kernels.cuda.memory import VECTOR
from aiokv.kernels.cuda.streaming import Streaming, streaming_kernel
from aiokv.kernels.plan import plan_norms, plan_update
from aiokv.kernels.reference import LANES
from aiokv.kernels.work import MOST_ADDED
from aiokv.optim import DCASGD, LAMB, LARS, NAG, SGD, Adam, AdamW, LearningRule

if TYPE_CHECKING:
    from collections.abc import Callable

TABLE = ("int64[2]", "int64[2]")
"""Addresses and parts."""

FLOAT_BYTES = 4
SUM_BYTES = 8

MILLION = 1_000_000
"""Elements of the step whose time is predicted."""

SENT = 100
"""In that step top-k sends one of so many."""

PARTS = -(-MILLION // launch.PART)
"""Of that step's tensor; in the simulator they are shorter."""


class Listed(NamedTuple):
    """A kernel with the types of its arguments.

    Attributes:
        name: what the docs call it.
        make: returns the kernel, not yet compiled.
        arguments: dtype of each, with the number of dimensions in brackets if it is an array.
        must_move: bytes that have to be moved for each unit: what is read, read once; what is written, written once.
        unit: of what.
        units: how many of these a step over a million elements has, which are one tensor.
        group: elements that a thread takes at a time, with loads of 16 bytes; 0: it has none of these.
        spec: what it does with each element, if it goes over memory once.
    """

    name: str
    make: Callable[[], Any]
    arguments: tuple[str, ...]
    must_move: float
    unit: str = "element"
    units: int = MILLION
    group: int = 0
    spec: Streaming | None = None


def every_kernel() -> list[Listed]:
    """Return every kernel: of those that are made for many dtypes, the ones that a training step uses."""
    return [*_sums(), *_updates(), *_norms(), *_codecs(), *_selection(), *_rows()]


def streaming(name: str, spec: Streaming) -> Listed:
    """Return a kernel that goes over memory once, with the types of its arguments."""
    arguments = [*TABLE, *[f"{spec.precision}[2]"] * bool(spec.numbers), *["float64[1]"] * bool(spec.reduction)]
    must_move = sum(
        spec.bits / 8 if array == spec.packed else np.dtype(dtype).itemsize for array, dtype in spec.reads + spec.writes
    )
    return Listed(name, lambda: streaming_kernel(spec), tuple(arguments), must_move, group=spec.group, spec=spec)


def _sums() -> list[Listed]:
    found = [
        streaming(f"sum of {count} x float32", reduce.sum_spec("float32", ("float32",) * count, adds=False))
        for count in range(2, MOST_ADDED + 1)
    ]
    for low in ("float16", "bfloat16"):
        found.append(streaming(f"sum of 8 x {low} in float32", reduce.sum_spec("float32", (low,) * 8, adds=False)))
        found.append(streaming(f"sum of 2 x {low}", reduce.sum_spec(low, (low,) * 2, adds=False)))
        found.append(streaming(f"accumulate {low} in float32", reduce.sum_spec("float32", (low,), adds=True)))
        found.append(streaming(f"narrow to {low}", reduce.narrow_spec(low)))
    mixed = ("float16", "bfloat16", "float32")
    found += [
        streaming("sum of 2 x float64", reduce.sum_spec("float64", ("float64",) * 2, adds=False)),
        streaming("sum of three dtypes in float32", reduce.sum_spec("float32", mixed, adds=False)),
        streaming("accumulate float32", reduce.sum_spec("float32", ("float32",), adds=True)),
        streaming("accumulate float32, scaled", reduce.sum_spec("float32", ("float32",), adds=True, scales=True)),
        streaming(
            "sum of 8 x float32 and squares", reduce.sum_spec("float32", ("float32",) * 8, adds=False, squares=True)
        ),
        streaming("scale float32", reduce.scale_spec("float32")),
        streaming("divide float32", reduce.quotient_spec("float32", None)),
        streaming("divide float16 to float32", reduce.quotient_spec("float32", "float16")),
        streaming("widen float16", reduce.sum_spec("float32", ("float16",), adds=False)),
    ]
    return [
        *found,
        streaming("squares of float32", reduce.squares_spec("float32")),
        Listed("total of squares", reduce.total_kernel, ("float64[1]", "float64[1]"), 8, "part", PARTS),
        Listed("factor of a norm", reduce.factor_kernel, ("float64[1]", "float64[1]", "float32[2]"), 4, "tensor", 1),
    ]


RULES: dict[str, LearningRule] = {
    "sgd": SGD(),
    "sgd with momentum": SGD(momentum=0.9),
    "nag": NAG(momentum=0.9),
    "adam": Adam(),
    "adamw": AdamW(),
    "lamb": LAMB(),
    "lars": LARS(momentum=0.9),
    "dcasgd": DCASGD(momentum=0.9),
}


def _updates() -> list[Listed]:
    found = []
    for name, rule in RULES.items():
        plan = plan_update(rule)
        plain = optimize.update_spec(plan, "float32", "float32", "float32", None, ("float32",) * len(plan.inputs))
        found.append(streaming(f"{name}, float32", plain))
        for low in ("float16", "bfloat16"):
            spec = optimize.update_spec(
                plan, "float32", "float32", "float32", low, (low,) * len(plan.inputs), master=True
            )
            found.append(streaming(f"{name}, master and {low} copy", spec))
    compensate = optimize.compensation_spec("float32", None, "float32")
    low_source = optimize.compensation_spec("float32", "float16", "float16")
    return [*found, streaming("compensate float32", compensate), streaming("compensate float16", low_source)]


def _norms() -> list[Listed]:
    found = []
    for rule in (LAMB(), LARS(momentum=0.9)):
        plan, counted = plan_norms(rule, 0), rule.norm_counts[0]
        arrays = optimize.norms_arrays(plan, "float32", "float32", "float32")

        def make(plan: Any = plan, arrays: Any = arrays, counted: int = counted) -> Any:
            return optimize.norms_kernel(plan, "float32", arrays, counted)

        must_move = FLOAT_BYTES * len(arrays)
        types = (*TABLE, "float32[2]", "float64[2]")
        found.append(Listed(f"squares for {rule.name}", make, types, must_move, group=VECTOR // FLOAT_BYTES))
    # The lanes, the address of their sum, and the sum.
    fold = Listed("sum of lanes", optimize.fold_kernel, ("float64[2]", "int64[1]"), SUM_BYTES * (LANES + 2), "sum", 1)
    return [*found, fold]


def _codecs() -> list[Listed]:
    found = []
    for bits in (1, 2):
        found += [
            streaming(f"encode {bits}bit", codec.encode_bits_spec(bits)),
            streaming(f"decode {bits}bit", codec.decode_bits_spec(bits, adds=False)),
            streaming(f"accumulate {bits}bit", codec.decode_bits_spec(bits, adds=True)),
        ]
    found += [
        streaming(f"encode {low}", codec.encode_half_spec(low, feeds_back=True)) for low in ("float16", "bfloat16")
    ]
    found += [
        streaming(f"cast to {low}", codec.encode_half_spec(low, feeds_back=False)) for low in ("float16", "bfloat16")
    ]
    return [
        *found,
        streaming("encode fp8", codec.encode_float8_spec()),
        streaming("decode fp8", codec.decode_float8_spec(adds=False)),
        streaming("accumulate fp8", codec.decode_float8_spec(adds=True)),
        streaming("largest magnitude", codec.largest_spec()),
        Listed("largest of parts", codec.most_kernel, ("float64[1]", "float64[1]"), 8, "part", PARTS),
    ]


def _selection() -> list[Listed]:
    """Return the kernels of top-k. Three go over the tensor, the others over what is found of its parts."""
    histogram = (*TABLE, "int64[1]", "int64[1]", "int64")
    write = (*TABLE, "int64[1]", "int64[2]", "uint32[1]", "float32[1]")

    # What all values of a digit were counted to, read and made 0; and what is known of the smallest one that is sent.
    pick_bytes = SUM_BYTES * (2 * select.DIGITS + 4)

    def made(name: str) -> Callable[[], Any]:
        return lambda: select.select_kernel(name)

    return [
        Listed("top-k, histogram", made("histogram"), histogram, FLOAT_BYTES, group=select.GROUP),
        Listed("top-k, pick", made("pick"), ("int64[1]", "int64[1]", "int64"), pick_bytes, "digit", 4),
        Listed("top-k, tally", made("tally"), (*TABLE, "int64[1]", "int64[2]"), FLOAT_BYTES, group=select.GROUP),
        Listed("top-k, scan", made("scan"), ("int64[2]",), 32, "part", PARTS),
        Listed("top-k, write", made("write"), write, FLOAT_BYTES, group=select.GROUP),
        Listed("top-k, clear", select.clear_kernel, ("int64", "uint32[1]"), 8, "place", MILLION // SENT),
    ]


def _rows() -> list[Listed]:
    """Return the kernels for rows. What they must move is said of the values of rows that occur once."""
    ids = ("int64[1]",)
    copies = ("int64", "int64", *ids, "int64", "bool")
    adds = ("int64", "int64", *ids * 3, "int64", "bool")
    unit = "value of a row"
    return [
        Listed("add rows, float32", lambda: sparse.add_kernel("float32", "float32"), adds, 12, unit),
        Listed("add rows, float16 to float32", lambda: sparse.add_kernel("float32", "float16"), adds, 10, unit),
        Listed("gather rows", lambda: sparse.copy_kernel("float32", gathers=True), copies, 8, unit),
        Listed("scatter rows", lambda: sparse.copy_kernel("float32", gathers=False), copies, 8, unit),
        streaming("fill float32", sparse.fill_spec("float32")),
        streaming("clear", sparse.fill_spec("uint8")),
    ]
