"""The snippets of the page about row-sparse keys do what the text around them says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "row-sparse.md"
PRINTED = """\
RowSparse(2 rows of float32[1000000000, 8])
[2 3 4]
[[ 1.5  1.5]
 [ 0.   0. ]
 [-1.  -1. ]]
[[1. 1.]
 [0. 0.]]
lazy -0.1
standard -0.19
"""


def test_the_snippets_run_one_after_the_other(tmp_path: Path) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-W", "error", "-c", "\n".join(snippets)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50)
    assert (done.stderr, done.stdout) == ("", PRINTED)
