"""The snippet of the page about saving does what the text around it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.pages import DOCS, run_snippets, snippets

if TYPE_CHECKING:
    from pathlib import Path

PAGE = DOCS / "saving.md"


def test_the_snippet_runs(tmp_path: Path) -> None:
    assert len(snippets(PAGE)) == 1
    assert run_snippets(PAGE, tmp_path) == ("", "")
