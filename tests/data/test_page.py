"""The snippets of the page about data do what the text around them says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
PRINTED = """\
[0 1 2]
[3 4 5]
[6 7 8 9]
8 batches in each epoch, for each worker
[[6, 7], [8, 9], [10, 11]]
[[8, 9], [6, 7]]
[[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
[34, 33, 33]
[5 0 4]
"""


def test_the_snippets_run_one_after_the_other(tmp_path: Path) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-W", "error", "-c", "\n".join(snippets)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50)
    assert (done.stderr, done.stdout) == ("", PRINTED)
