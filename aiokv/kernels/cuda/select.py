"""The largest magnitudes of a tensor on the device, for top-k compression; of equal ones the first.

The bits of a magnitude, read as a whole number, are in the order of the magnitudes. So the smallest one that is sent is
found digit by digit (a radix select, four passes over memory with 256 counters each), without sorting. Two more passes
count what each part of the tensor sends, and write it, so places come out in their order.
"""

from __future__ import annotations

import functools
import textwrap
from typing import Any

import numpy as np

from aiokv.kernels.checks import mismatch
from aiokv.kernels.cuda import launch
from aiokv.kernels.cuda.memory import bits_of
from aiokv.kernels.cuda.streaming import make_kernel
from aiokv.kernels.cuda.tensors import tensor_of

DIGITS = 256
SHIFTS = (24, 16, 8, 0)
GROUP = 4
MOST_SHORT = 1 << 32
"""From how many elements on a place needs more than 32 bits."""

EACH = range(GROUP)
LOADED = ", ".join(f"x_{k}" for k in EACH)


def _each(lines: str, spaces: int) -> str:
    """Return lines for every element of a group."""
    return "\n".join(textwrap.indent(lines.format(k=k), " " * spaces) for k in EACH)


# After the first digit few elements are left to count.
COUNT_DIGIT = """\
size = size_of(x_{k})
if size >> above == prefix:
    cuda.atomic.add(shared, size >> shift & 255, 1)"""

HISTOGRAM = f"""\
def kernel(addresses, parts, state, counts, shift):
    shared = cuda.shared.array({DIGITS}, int32)
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    for digit in range(thread, {DIGITS}, threads):
        shared[digit] = 0
    cuda.syncthreads()
    above = shift + 8
    prefix = state[0] >> above
    for part in range(cuda.blockIdx.x, parts.shape[0], cuda.gridDim.x):
        start, wide_end, end = parts[part, 1], parts[part, 2], parts[part, 3]
        for i in range(start + {GROUP} * thread, wide_end, {GROUP} * threads):
            {LOADED} = read_vector(addresses[0, 0], i, kind_x)
{_each(COUNT_DIGIT, 12)}
        for i in range(wide_end + thread, end, threads):
            x_0 = read(addresses[0, 0], i, kind_x)
{textwrap.indent(COUNT_DIGIT.format(k=0), " " * 12)}
    cuda.syncthreads()
    for digit in range(thread, {DIGITS}, threads):
        cuda.atomic.add(counts, digit, shared[digit])
"""

# `state` is the digits of the smallest magnitude that is sent, as far as they are known, and how many are still wanted.
PICK = f"""\
def kernel(counts, state, shift):
    if cuda.grid(1) == 0:
        digit, wanted = {DIGITS - 1}, state[1]
        found = counts[digit]
        while digit > 0 and found < wanted:
            wanted -= found
            digit -= 1
            found = counts[digit]
        state[0] += digit << shift
        state[1] = wanted
        for other in range({DIGITS}):
            counts[other] = 0
"""

TALLY = f"""\
def kernel(addresses, parts, state, tallies):
    shared = cuda.shared.array(2, int32)
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    least = state[0]
    for part in range(cuda.blockIdx.x, parts.shape[0], cuda.gridDim.x):
        start, wide_end, end = parts[part, 1], parts[part, 2], parts[part, 3]
        if thread < 2:
            shared[thread] = 0
        cuda.syncthreads()
        larger, equal = 0, 0
        for i in range(start + {GROUP} * thread, wide_end, {GROUP} * threads):
            {LOADED} = read_vector(addresses[0, 0], i, kind_x)
{_each("larger += where(size_of(x_{k}) > least, 1, 0)", 12)}
{_each("equal += where(size_of(x_{k}) == least, 1, 0)", 12)}
        for i in range(wide_end + thread, end, threads):
            size = size_of(read(addresses[0, 0], i, kind_x))
            larger += where(size > least, 1, 0)
            equal += where(size == least, 1, 0)
        cuda.atomic.add(shared, 0, larger)
        cuda.atomic.add(shared, 1, equal)
        cuda.syncthreads()
        if thread < 2:
            tallies[part, thread] = shared[thread]
        cuda.syncthreads()
"""

# Each thread adds a run of parts, then the runs before its own.
SCAN = """\
def kernel(tallies):
    larger = cuda.shared.array(THREADS, int64)
    equal = cuda.shared.array(THREADS, int64)
    thread = cuda.threadIdx.x
    if cuda.blockIdx.x == 0:
        run = (tallies.shape[0] + THREADS - 1) // THREADS
        first, last = thread * run, min((thread + 1) * run, tallies.shape[0])
        larger[thread] = 0
        equal[thread] = 0
        for part in range(first, last):
            larger[thread] += tallies[part, 0]
            equal[thread] += tallies[part, 1]
        cuda.syncthreads()
        larger_before, equal_before = 0, 0
        for other in range(thread):
            larger_before += larger[other]
            equal_before += equal[other]
        for part in range(first, last):
            larger_here, equal_here = tallies[part, 0], tallies[part, 1]
            tallies[part, 0] = larger_before
            tallies[part, 1] = equal_before
            larger_before += larger_here
            equal_before += equal_here
"""

STORE = """\
            if size_{k} > least or (size_{k} == least and equal_here < wanted):
                place = larger_here + min(equal_here, wanted)
                places[place] = i + {k}
                values[place] = x_{k}
            larger_here += where(size_{k} > least, 1, 0)
            equal_here += where(size_{k} == least, 1, 0)"""
STORES = "\n".join(STORE.format(k=k) for k in EACH)

# A block goes over its part tile by tile. Each thread has a group of a tile; how many of the groups before its own are
# sent is added up in steps that double. Elements after the last one have a size that no element has.
WRITE = f"""\
def kernel(addresses, parts, state, tallies, places, values):
    larger = cuda.shared.array(THREADS, int32)
    equal = cuda.shared.array(THREADS, int32)
    thread = cuda.threadIdx.x
    least, wanted = state[0], state[1]
    for part in range(cuda.blockIdx.x, parts.shape[0], cuda.gridDim.x):
        start, wide_end, end = parts[part, 1], parts[part, 2], parts[part, 3]
        larger_before, equal_before = tallies[part, 0], tallies[part, 1]
        for tile in range(start, end, {GROUP} * THREADS):
            i = tile + {GROUP} * thread
            if i < wide_end:
                {LOADED} = read_vector(addresses[0, 0], i, kind_x)
            else:
{_each("x_{k} = read(addresses[0, 0], i + {k}, kind_x) if i + {k} < end else like_x", 16)}
{_each("size_{k} = size_of(x_{k}) if i + {k} < end else int64(-1)", 12)}
            own_larger, own_equal = int32(0), int32(0)
{_each("own_larger += where(size_{k} > least, int32(1), int32(0))", 12)}
{_each("own_equal += where(size_{k} == least, int32(1), int32(0))", 12)}
            larger[thread] = own_larger
            equal[thread] = own_equal
            distance = 1
            while distance < THREADS:
                cuda.syncthreads()
                more_larger = larger[thread - distance] if thread >= distance else int32(0)
                more_equal = equal[thread - distance] if thread >= distance else int32(0)
                cuda.syncthreads()
                larger[thread] += more_larger
                equal[thread] += more_equal
                distance *= 2
            cuda.syncthreads()
            larger_here = larger_before + larger[thread] - own_larger
            equal_here = equal_before + equal[thread] - own_equal
{STORES}
            larger_before += larger[THREADS - 1]
            equal_before += equal[THREADS - 1]
            cuda.syncthreads()
"""

SIZE_OF = "def size_of(x):\n    return int64(bits_of(x)) & int64(0x7FFFFFFF)"

SOURCES = {"histogram": HISTOGRAM, "pick": PICK, "tally": TALLY, "scan": SCAN, "write": WRITE}


@functools.cache
def select_kernel(name: str) -> Any:
    """Return one of the kernels, by name."""
    more = {"THREADS": launch.THREADS, "int32": np.int32, "int64": np.int64, "bits_of": bits_of}
    return make_kernel(SOURCES[name], "float32", {"x": "float32"}, [SIZE_OF], **more)


CLEAR = """\
def kernel(at_array, places):
    for n in range(cuda.grid(1), places.size, cuda.gridsize(1)):
        write(at_array, places[n], like_x)
"""


@functools.cache
def clear_kernel() -> Any:
    """Return the kernel that writes zeros to places."""
    return make_kernel(CLEAR, "float32", {"x": "float32"})


def clear_places(array: Any, places: Any, *, stream: Any = 0) -> None:
    """Make elements zero.

    Args:
        array: float32.
        places: which, from `largest_places` of an array of that length.
        stream: in whose order it happens.

    Raises:
        SpecMismatchError: the array is not float32.
    """
    tensor = tensor_of("array", array)
    if tensor.dtype != np.float32:
        raise mismatch("array", "float32", f"{tensor.dtype}")
    blocks = launch.geometry(-(-places.size // launch.THREADS))
    clear_kernel()[(*blocks, stream)](tensor.address, places)


def largest_places(array: Any, count: int, *, stream: Any = 0) -> tuple[Any, Any]:
    """Return the places of the largest magnitudes, increasing, and the values there; of equal ones the first.

    Args:
        array: float32 without NaN.
        count: how many, from 1 to the length of the array.
        stream: in whose order it happens; the host waits for nothing.

    Returns:
        Places, uint32[count] or, in a tensor that is longer than that can say, int64[count]; and float32[count]; both
        on the device.

    Raises:
        SpecMismatchError: the array is not float32, or has too few elements.
    """
    tensor = tensor_of("array", array)
    if tensor.dtype != np.float32 or not 1 <= count <= tensor.size:
        raise mismatch("array", f"float32 with at least {max(count, 1)} elements", f"{tensor.dtype}[{tensor.size}]")
    table = launch.Table([[tensor]], GROUP, stream)
    blocks, one = (*launch.geometry(table.count), stream), (*launch.geometry(1), stream)
    state = launch.to_device(np.array([0, count]), stream)
    counts = launch.to_device(np.zeros(DIGITS, np.int64), stream)
    for shift in SHIFTS:
        select_kernel("histogram")[blocks](table.addresses, table.parts, state, counts, shift)
        select_kernel("pick")[one](counts, state, shift)
    tallies = launch.new_on_device((table.count, 2), np.int64, stream)
    # Half of the bytes have to be copied to the host where 32 bits will do.
    places = launch.new_on_device(count, np.uint32 if tensor.size < MOST_SHORT else np.int64, stream)
    values = launch.new_on_device(count, np.float32, stream)
    select_kernel("tally")[blocks](table.addresses, table.parts, state, tallies)
    select_kernel("scan")[one](tallies)
    select_kernel("write")[blocks](table.addresses, table.parts, state, tallies, places, values)
    return places, values
