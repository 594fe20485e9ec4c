"""The page about devices shows the figures that were written down with it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table_of_the_figures() -> None:
    spec = importlib.util.spec_from_file_location("kernel_table", ROOT / "benchmarks" / "kernel_table.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = (ROOT / "docs" / "device.md").read_text(encoding="utf-8")
    figures = json.loads((ROOT / "docs" / "device-kernels.json").read_text(encoding="utf-8"))
    assert tool.with_table(page, figures) == page
