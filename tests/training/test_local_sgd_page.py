"""The snippets of the page about fewer exchanges and fitting batches do what the text around them says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "local-sgd.md"
# Local steps alone: 2 + 6 * .75**4 and 2 + 6 * .75**8. The outer steps go to the minimum, 2. Elastic: from 8 to 5.375,
# then 6.03125 and a center of 7.34375; from there to 4.267578125, then what is printed.
PRINTED = """\
averaged: [3.8984375]
averaged: [2.60067749]
outer steps: [2.]
worker: [5.03662109] center: [6.57470703]
100 1.0 False
"""


def test_the_snippets_run_one_after_the_other(tmp_path: Path) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-W", "error", "-c", "\n".join(snippets)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50)
    assert (done.stderr, done.stdout) == ("", PRINTED)
