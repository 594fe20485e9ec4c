"""All kernels, as they are compiled for a device: for the tests of the compiler's output, the bench and the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aiokv.kernels.cuda import codec, optimize, reduce, select, sparse
from aiokv.kernels.cuda.streaming import Streaming, streaming_kernel
from aiokv.kernels.plan import plan_norms, plan_update
from aiokv.kernels.work import MOST_ADDED
from aiokv.optim import LAMB, LARS, NAG, SGD, Adam, AdamW, LearningRule

if TYPE_CHECKING:
    from collections.abc import Callable

TABLE = ("int64[2]", "int64[2]")
"""Addresses and parts."""


class Listed(NamedTuple):
    """A kernel with the types of its arguments.

    Attributes:
        name: what the docs call it.
        make: returns the kernel, not yet compiled.
        arguments: dtype of each, with the number of dimensions in brackets if it is an array.
        spec: what it does with each element, if it goes over memory once.
    """

    name: str
    make: Callable[[], Any]
    arguments: tuple[str, ...]
    spec: Streaming | None = None

    @property
    def nbytes(self) -> float:
        """Bytes that have to be moved for each element: what is read, read once; what is written, written once."""
        assert self.spec is not None
        return sum(map(self._nbytes_of, self.spec.reads + self.spec.writes))

    def _nbytes_of(self, array: tuple[str, str]) -> float:
        assert self.spec is not None
        name, dtype = array
        return self.spec.bits / 8 if name == self.spec.packed else np.dtype(dtype).itemsize


def every_kernel() -> list[Listed]:
    """Return every kernel: of those that are made for many dtypes, the ones that a training step uses."""
    return [*_sums(), *_updates(), *_norms(), *_codecs(), *_selection(), *_rows()]


def streaming(name: str, spec: Streaming) -> Listed:
    """Return a kernel that goes over memory once, with the types of its arguments."""
    arguments = [*TABLE, *[f"{spec.precision}[2]"] * bool(spec.numbers), *["float64[1]"] * bool(spec.reduction)]
    return Listed(name, lambda: streaming_kernel(spec), tuple(arguments), spec)


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
        Listed("total of squares", reduce.total_kernel, ("float64[1]", "float64[1]")),
        Listed("factor of a norm", reduce.factor_kernel, ("float64[1]", "float64[1]", "float32[2]")),
    ]


RULES: dict[str, LearningRule] = {
    "sgd": SGD(),
    "sgd with momentum": SGD(momentum=0.9),
    "nag": NAG(momentum=0.9),
    "adam": Adam(),
    "adamw": AdamW(),
    "lamb": LAMB(),
    "lars": LARS(momentum=0.9),
}


def _updates() -> list[Listed]:
    found = []
    for name, rule in RULES.items():
        plan = plan_update(rule)
        plain = optimize.update_spec(plan, "float32", "float32", "float32", None)
        found.append(streaming(f"{name}, float32", plain))
        for low in ("float16", "bfloat16"):
            spec = optimize.update_spec(plan, "float32", "float32", "float32", low, master=True)
            found.append(streaming(f"{name}, master and {low} copy", spec))
    return found


def _norms() -> list[Listed]:
    found = []
    for rule in (LAMB(), LARS(momentum=0.9)):
        plan, counted = plan_norms(rule, 0), rule.norm_counts[0]
        arrays = optimize.norms_arrays(plan, "float32", "float32", "float32")

        def make(plan: Any = plan, arrays: Any = arrays, counted: int = counted) -> Any:
            return optimize.norms_kernel(plan, "float32", arrays, counted)

        found.append(Listed(f"squares for {rule.name}", make, (*TABLE, "float32[2]", "float64[2]")))
    return [*found, Listed("sum of lanes", optimize.fold_kernel, ("float64[2]", "int64[1]"))]


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
        Listed("largest of parts", codec.most_kernel, ("float64[1]", "float64[1]")),
    ]


def _selection() -> list[Listed]:
    arguments = {
        "histogram": (*TABLE, "int64[1]", "int64[1]", "int64"),
        "pick": ("int64[1]", "int64[1]", "int64"),
        "tally": (*TABLE, "int64[1]", "int64[2]"),
        "scan": ("int64[2]",),
        "write": (*TABLE, "int64[1]", "int64[2]", "uint32[1]", "float32[1]"),
    }

    def made(name: str) -> Callable[[], Any]:
        return lambda: select.select_kernel(name)

    found = [Listed(f"top-k, {name}", made(name), types) for name, types in arguments.items()]
    return [*found, Listed("top-k, clear", select.clear_kernel, ("int64", "uint32[1]"))]


def _rows() -> list[Listed]:
    ids = ("int64[1]",)
    copies = ("int64", "int64", *ids, "int64", "bool")
    adds = ("int64", "int64", *ids * 3, "int64", "bool")
    return [
        Listed("add rows, float32", lambda: sparse.add_kernel("float32", "float32"), adds),
        Listed("add rows, float16 to float32", lambda: sparse.add_kernel("float32", "float16"), adds),
        Listed("gather rows", lambda: sparse.copy_kernel("float32", gathers=True), copies),
        Listed("scatter rows", lambda: sparse.copy_kernel("float32", gathers=False), copies),
        streaming("fill float32", sparse.fill_spec("float32")),
        streaming("clear", sparse.fill_spec("uint8")),
    ]
