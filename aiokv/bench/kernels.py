"""`aiokv bench kernels`: GB/s of each CUDA kernel against a copy on the device, and against CuPy and PyTorch."""

from __future__ import annotations

import importlib
import json
import math
import time
from typing import TYPE_CHECKING, Any

from rich.table import Table

from aiokv.bench.workloads import MIB, resnet50_shapes
from aiokv.errors import ConfigError
from aiokv.kernels import measure_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEFAULT_MIB = 256.0
DEFAULT_ROUNDS = 15

_MAX_MIB = 4096
_FLOAT32 = 4


def parse_kernels(text: str) -> float | None:
    """Return the MiB of `kernels` or `kernels:MIB`; None when the text names something else.

    Raises:
        ConfigError: what follows the colon is not a size.
    """
    name, colon, number = text.partition(":")
    if name != "kernels":
        return None
    try:
        mib = float(number) if colon else DEFAULT_MIB
    except ValueError:
        mib = math.nan
    if not 0 < mib <= _MAX_MIB:
        expected = f"a number of MiB up to {_MAX_MIB}"
        raise ConfigError(f"{text!r} needs {expected} behind the colon, got {number!r}", expected=expected, got=number)
    return mib


def run_kernels(*, mib: float, rounds: int, on_figure: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure all kernels, and what other libraries that are installed have for some of them.

    Args:
        mib: size of a float32 array in MiB; arrays of other dtypes have as many elements.
        rounds: how often each is timed.
        on_figure: called with the name of what was measured.

    Returns:
        For each figure `name`, `gbps` of the bytes that have to be moved, `us`, and `of_copy`, its share of the copy's.

    Raises:
        ConfigError: this machine has no device.
        MissingExtraError: numba-cuda is not installed.
    """
    elements = int(mib * MIB) // _FLOAT32
    tensors = [math.prod(shape) for shape in resnet50_shapes().values()]
    if mib < 1:
        # A trial, as in the simulator.
        tensors = [size // 10_000 + 1 for size in tensors[:10]]
    found: list[dict[str, Any]] = []
    for name, gbps, us in measure_kernels(elements, tensors, rounds):
        copy = found[0]["gbps"] if found else gbps
        found.append({"name": name, "gbps": gbps, "us": us, "of_copy": gbps / copy})
        on_figure(name)
    for name, nbytes, seconds in _peers(elements, tensors, rounds):
        gbps = nbytes / seconds / 1e9
        found.append({"name": name, "gbps": gbps, "us": seconds * 1e6, "of_copy": gbps / found[0]["gbps"]})
        on_figure(name)
    return found


def _peers(elements: int, tensors: list[int], rounds: int) -> Iterator[tuple[str, int, float]]:
    """Yield name, bytes to be moved and seconds of what CuPy and PyTorch do, where they have a device."""
    cupy, torch = _import("cupy"), _import("torch")
    if cupy is not None and cupy.cuda.is_available():
        first, second, out = (cupy.zeros(elements, cupy.float32) for _ in range(3))
        finish = cupy.cuda.get_current_stream().synchronize
        seconds = _seconds(lambda: cupy.add(first, second, out=out), finish, rounds)
        yield "CuPy: sum of 2 x float32", 12 * elements, seconds
    if torch is not None and torch.cuda.is_available():
        total = sum(tensors)
        targets, sources = ([torch.zeros(size, device="cuda") for size in tensors] for _ in range(2))
        finish = torch.cuda.synchronize
        seconds = _seconds(lambda: torch._foreach_add_(targets, sources), finish, rounds)
        yield "PyTorch: _foreach_add_, a model", 12 * total, seconds
        for target, source in zip(targets, sources, strict=True):
            target.grad = source
        optimizer = torch.optim.Adam(targets, fused=True)
        yield "PyTorch: fused Adam, a model", 28 * total, _seconds(optimizer.step, finish, rounds)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _seconds(work: Callable[[], Any], finish: Callable[[], Any], rounds: int) -> float:
    work()
    finish()
    begun = time.perf_counter()
    for _ in range(10 * rounds):
        work()
    finish()
    return (time.perf_counter() - begun) / (10 * rounds)


def kernels_json(figures: list[dict[str, Any]], mib: float) -> str:
    """Return one line of JSON."""
    return json.dumps({"mib": mib, "kernels": figures})


def kernels_table(figures: list[dict[str, Any]], mib: float) -> Table:
    """Return a table for people."""
    table = Table(title=f"kernels on arrays of {mib * MIB / _FLOAT32:,.0f} elements", title_justify="left")
    table.add_column("kernel")
    for column in ("GB/s", "us", "of the copy"):
        table.add_column(column, justify="right")
    for figure in figures:
        cells = f"{figure['gbps']:.1f}", f"{figure['us']:.1f}", f"{figure['of_copy']:.0%}"
        table.add_row(figure["name"], *cells)
    return table
