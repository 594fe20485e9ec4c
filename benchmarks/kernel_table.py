"""Compile every CUDA kernel for three compute capabilities, without a device, and write what the compilers say.

    python benchmarks/kernel_table.py [docs]

It writes `device-kernels.json` in that folder, and the table of `device.md`. It needs numba-cuda, libNVVM and ptxas.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from aiokv.kernels.cuda import compiling, listing

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

BANDWIDTH = 4.8e12
"""Bytes per second of an H200's memory, by its data sheet."""

SHOWN = "9.0"

MILLION = 1_000_000
"""Elements whose time is predicted."""


def main(folder: Path) -> None:
    """Write both files."""
    ptxas = compiling.find_ptxas()
    if ptxas is None:
        sys.exit("there is no ptxas on the PATH; it comes with the CUDA toolkit")
    kernels: dict[str, Any] = {}
    ptx = ""
    for listed in listing.every_kernel():
        print(listed.name, file=sys.stderr)
        for capability in compiling.CAPABILITIES:
            row, ptx = compiling.describe(listed, capability, ptxas)
            kernels.setdefault(listed.name, {})[".".join(map(str, capability))] = row
    found = {"versions": compiling.versions(ptxas, ptx), "kernels": kernels}
    (folder / "device-kernels.json").write_text(json.dumps(found, indent=1) + "\n")
    page = folder / "device.md"
    text = page.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    page.write_text(f"{before}\n{as_markdown(found)}{after}")


def as_markdown(found: dict[str, Any]) -> str:
    """Return the table of the page."""
    columns = ["kernel", "must move", "moves", "µs", "registers", "shared", "spills", "wide"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, rows in found["kernels"].items():
        row, registers = rows[SHOWN], ", ".join(str(each["registers"]) for each in rows.values())
        must = row.get("must_move")
        # Only for this one the compiler leaves the loop as it is.
        moves = rows["10.0"].get("moves")
        time = f"{must * MILLION / BANDWIDTH * 1e6:.2f}" if must else ""
        if must and moves != must:
            moves = f"{must:g} (unrolled)" if moves % must == 0 else moves
        cells = [
            name,
            f"{must:g}" if must else "",
            moves if isinstance(moves, str) else f"{moves:g}" if moves else "",
            time,
        ]
        cells += [registers, row["shared"], row["spills"], f"{row['wide_loads']}, {row['wide_stores']}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
