"""The snippets of the page about fewer exchanges and fitting batches do what the text around them says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.pages import DOCS, run_snippets

if TYPE_CHECKING:
    from pathlib import Path

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
    assert run_snippets(DOCS / "local-sgd.md", tmp_path) == ("", PRINTED)
