"""The snippets of the page about data do what the text around them says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.pages import DOCS, run_snippets

if TYPE_CHECKING:
    from pathlib import Path

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
    assert run_snippets(DOCS / "data.md", tmp_path) == ("", PRINTED)
