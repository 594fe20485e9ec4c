"""Compiling kernels without a device, and reading what the compilers say: PTX, and where it is found, `ptxas -v`."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiokv.kernels.cuda.listing import Listed

CAPABILITIES = ((8, 0), (9, 0), (10, 0))
"""Of the A100, the H100 and H200, and the B200."""

WIDE = re.compile(r"\b(ld|st)\.global(?:\.nc)?\.(?:v4\.[fbus]32|v2\.[fbus]64)\b")
VECTOR, WORD = 16, 4


class Compiled:
    """A kernel as NVVM takes it. That part of the work is the longest, and the same for all compute capabilities.

    Args:
        listed: the kernel.
    """

    def __init__(self, listed: Listed) -> None:
        # The simulator has no such modules. `numba.cuda.compile` begins anew for each compute capability.
        from numba.cuda import types  # noqa: PLC0415
        from numba.cuda.compiler import _compile_pyfunc_with_fixup  # noqa: PLC0415

        def type_of(argument: str) -> Any:
            name, _, rank = argument.partition("[")
            item = types.boolean if name == "bool" else getattr(types, name)
            return types.Array(item, int(rank[:-1]), "C") if rank else item

        self.listed = listed
        arguments = tuple(map(type_of, listed.arguments))
        self._library, _ = _compile_pyfunc_with_fixup(
            listed.make().py_func, arguments, device=False, abi="numba", cc=CAPABILITIES[0]
        )

    def to_ptx(self, capability: tuple[int, int]) -> str:
        """Return the PTX for a compute capability."""
        (ptx,) = self._library.get_asm_strs(cc=capability)
        return str(ptx)


def widths(ptx: str) -> dict[str, int]:
    """Return how many loads and stores of 16 bytes there are, of global and of local memory.

    Local memory is where a thread keeps what fits into no register.
    """
    wide = WIDE.findall(ptx)
    local = len(re.findall(r"\b(?:ld|st)\.local\b", ptx))
    return {"wide_loads": wide.count("ld"), "wide_stores": wide.count("st"), "local": local}


def moved_per_element(listed: Listed, ptx: str) -> float:
    """Return the bytes that the loop over whole groups moves for each element, counted in the PTX.

    Where NVVM has unrolled the loop, it is a whole multiple of that.
    """
    # Of the words of packed codes there is one in the loop over whole groups, and one after it.
    packs = listed.spec is not None and listed.spec.packed
    return (VECTOR * len(WIDE.findall(ptx)) + WORD * bool(packs)) / listed.group


def find_ptxas() -> str | None:
    """Return the path of the assembler, None where there is none: that of the PATH, of a wheel, or of a toolkit."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility  # noqa: PLC0415 - older ones do not look for programs
    except ImportError:
        return shutil.which("ptxas")
    found: str | None = shutil.which("ptxas") or find_nvidia_binary_utility("ptxas")
    return found


def assemble(ptxas: str, ptx: str, capability: tuple[int, int]) -> dict[str, int]:
    """Return what the assembler says of a kernel: registers, shared memory, stack and spills, in bytes.

    Raises:
        RuntimeError: it refuses the kernel.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        target = f"-arch=sm_{capability[0]}{capability[1]}"
        done = subprocess.run(
            [ptxas, "-v", target, str(source), "-o", str(Path(folder, "kernel.cubin"))],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"ptxas refuses the kernel: {done.stderr}")
    return {
        "registers": _number(r"Used (\d+) registers", done.stderr),
        "shared": _number(r"(\d+) bytes smem", done.stderr),
        "stack": _number(r"(\d+) bytes stack frame", done.stderr),
        "spills": _number(r"(\d+) bytes spill stores", done.stderr) + _number(r"(\d+) bytes spill loads", done.stderr),
    }


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def describe(compiled: Compiled, capability: tuple[int, int], ptxas: str | None) -> tuple[dict[str, Any], str]:
    """Return a kernel's row of the table, and the PTX."""
    listed, ptx = compiled.listed, compiled.to_ptx(capability)
    row: dict[str, Any] = widths(ptx) | {"must_move": listed.must_move}
    if listed.group:
        row["moves"] = moved_per_element(listed, ptx)
    else:
        row |= {"unit": listed.unit, "units": listed.units}
    return row | (assemble(ptxas, ptx, capability) if ptxas else {}), ptx


def versions(ptxas: str | None, ptx: str) -> dict[str, str]:
    """Return who compiled: registers differ from one version to the next."""
    import numba_cuda  # noqa: PLC0415 - it is there when kernels are compiled

    nvvm = re.search(r"Cuda compilation tools, (.*)", ptx)
    found = {"numba-cuda": str(numba_cuda.__version__), "nvvm": nvvm[1] if nvvm else ""}
    if ptxas:
        found["ptxas"] = _release(ptxas)
    return found


@functools.cache
def _release(ptxas: str) -> str:
    said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    release = re.search(r"release .*", said)
    return release[0] if release else ""
