"""Compile every CUDA kernel for three compute capabilities, without a device, and write what the compilers say.

    python benchmarks/kernel_table.py [docs]

It writes `device-kernels.json` in that folder, and the table of `device.md`. It needs numba-cuda, libNVVM and ptxas.
What the PTX does not show is counted in the simulator, in a process of its own (`kernel_moves.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

BANDWIDTH = 4.8e12
"""Bytes per second of an H200's memory, by its data sheet."""

SHOWN = "9.0"

NOT_UNROLLED = "10.0"
"""For this one the compiler leaves nearly all loops as they are."""

MILLION = 1_000_000
"""Elements of the step whose time is predicted."""

LEAST_TIME = 0.01
"""Microseconds: of less the table says no more than that."""


def main(folder: Path) -> None:
    """Write both files."""
    from aiokv.kernels.cuda import compiling, listing  # noqa: PLC0415 - to show a table needs no compiler

    ptxas = compiling.find_ptxas()
    if ptxas is None:
        sys.exit("there is no ptxas on the PATH; it comes with the CUDA toolkit")
    kernels: dict[str, Any] = {}
    ptx = ""
    for listed in listing.every_kernel():
        print(listed.name, file=sys.stderr)
        compiled = compiling.Compiled(listed)
        for capability in compiling.CAPABILITIES:
            row, ptx = compiling.describe(compiled, capability, ptxas)
            kernels.setdefault(listed.name, {})[".".join(map(str, capability))] = row
    found = {"versions": compiling.versions(ptxas, ptx), "counted": counted(), "kernels": kernels}
    (folder / "device-kernels.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    page = folder / "device.md"
    page.write_text(with_table(page.read_text(encoding="utf-8"), found), encoding="utf-8")


def counted() -> dict[str, float]:
    """Return the bytes that kernels move for each of their units, as the simulator counts them."""
    program = Path(__file__).with_name("kernel_moves.py")
    simulated = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run([sys.executable, program], env=simulated, capture_output=True, timeout=300, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def with_table(text: str, found: dict[str, Any]) -> str:
    """Return the page with its table made again."""
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    return f"{before}\n{as_markdown(found)}{after}"


def as_markdown(found: dict[str, Any]) -> str:
    """Return the table of the page."""
    columns = ["kernel", "must move", "moves", "µs", "registers", "shared", "spills", "wide"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, rows in found["kernels"].items():
        row = rows[SHOWN]
        must, unit = row["must_move"], row.get("unit")
        moves = f"{found['counted'][name]:g}" if unit else _moved(must, rows[NOT_UNROLLED]["moves"])
        cells = [name, f"{must:g} a {unit}" if unit else f"{must:g}", moves]
        cells.append(_predicted(must * row.get("units", MILLION)))
        cells += [", ".join(str(each["registers"]) for each in rows.values()), str(row["shared"]), str(row["spills"])]
        cells.append(f"{row['wide_loads']}, {row['wide_stores']}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _predicted(nbytes: float) -> str:
    """Return the microseconds that so many bytes take."""
    microseconds = nbytes / BANDWIDTH * 1e6
    return f"{microseconds:.2f}" if microseconds >= LEAST_TIME else f"< {LEAST_TIME}"


def _moved(must: float, moves: float) -> str:
    """Return the bytes for each element; a loop that is unrolled moves those of several."""
    times = moves / must
    return f"{moves:g}" if times == 1 or times % 1 else f"{must:g} ({times:g} times in the loop)"


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
