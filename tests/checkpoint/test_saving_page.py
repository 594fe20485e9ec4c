"""The snippet of the page about saving does what the text around it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "saving.md"


def test_the_snippet_runs(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-W", "error", "-c", snippet]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50)
    assert (done.stderr, done.stdout) == ("", "")
