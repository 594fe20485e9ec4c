"""The pages of the documentation, as the tests of what they say read them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def snippets(page: Path, language: str = "python") -> list[str]:
    """Return the code blocks of a page in order; `language` is a regular expression."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run_snippets(page: Path, cwd: Path) -> tuple[str, str]:
    """Run the Python of a page, one block after the other, and return what went to stderr and to stdout."""
    command = [sys.executable, "-W", "error", "-c", "\n".join(snippets(page))]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=50)
    return done.stderr, done.stdout
