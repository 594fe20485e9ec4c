"""The snippets of the page about row-sparse keys do what the text around them says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.pages import DOCS, run_snippets

if TYPE_CHECKING:
    from pathlib import Path

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
    assert run_snippets(DOCS / "row-sparse.md", tmp_path) == ("", PRINTED)
