"""The snippets of the README and the pages do what the text around them says, and name only what there is."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import pytest

import aiokv
from aiokv.config import Config
from aiokv.layers import TRAINING
from aiokv.net.worker import Client
from tests.cli.calling import help_of
from tests.pages import DOCS, ROOT, snippets

if TYPE_CHECKING:
    from pathlib import Path

README = ROOT / "README.md"
TUTORIAL = DOCS / "tutorial.md"
PAGES = [README, *sorted(DOCS.glob("*.md"))]


def commands(page: Path) -> list[str]:
    """Return the command lines of a page without their comments."""
    return [
        line.split("#")[0].strip()
        for block in snippets(page, "(?:ba)?sh")
        for line in block.splitlines()
        if line.strip()
    ]


def run(*arguments: str, cwd: Path) -> str:
    """Run a command to its end and return what it printed."""
    done = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_worker_of_the_readme_trains_on_two_workers(tmp_path: Path) -> None:
    worker = next(snippet for snippet in snippets(README) if "connect()" in snippet)
    (tmp_path / "train.py").write_text(worker, encoding="utf-8")
    command = next(line for line in commands(README) if line.startswith("aiokv run"))
    output = run(sys.executable, "-m", *command.split(), cwd=tmp_path)
    assert command.endswith("train.py")
    for rank in range(2):
        assert f"worker {rank} of 2: w = 1.000, b = 0.500" in output


@pytest.mark.parametrize(
    ("page", "expected"), [(README, "[0.95 0.95 0.95]"), (TUTORIAL, "[-0.1 -0.1 -0.1]")], ids=["readme", "tutorial"]
)
def test_the_local_store_of_the_page(page: Path, expected: str, tmp_path: Path) -> None:
    snippet = next(snippet for snippet in snippets(page) if 'create("local")' in snippet)
    assert expected in run(sys.executable, "-c", snippet, cwd=tmp_path)


def test_the_uneven_batches_of_the_tutorial(tmp_path: Path) -> None:
    worker = next(snippet for snippet in snippets(TUTORIAL) if "finish()" in snippet)
    (tmp_path / "uneven.py").write_text(worker, encoding="utf-8")
    command = next(line for line in commands(TUTORIAL) if line.endswith("uneven.py"))
    assert "[-5.5 -5.5 -5.5]" in run(sys.executable, "-m", *command.split(), cwd=tmp_path)


def test_the_groups_of_the_tutorial(tmp_path: Path) -> None:
    snippet = next(snippet for snippet in snippets(TUTORIAL) if "kv.group" in snippet)
    head = "import asyncio, aiokv, numpy as np\nasync def main():\n    async with aiokv.connect() as kv:\n"
    body = textwrap.indent(snippet + "print(kv.rank, value)\n", " " * 8)
    (tmp_path / "groups.py").write_text(head + body + "asyncio.run(main())\n", encoding="utf-8")
    output = run(sys.executable, "-m", "aiokv", "run", "-s", "2", "-w", "4", "--", "python", "groups.py", cwd=tmp_path)
    for rank in range(4):
        assert f"{rank} {np.full(3, 3 if rank < 2 else 7, np.float32)}" in output


@pytest.mark.parametrize("page", [README, TUTORIAL], ids=["readme", "tutorial"])
def test_the_simulation_of_the_page(page: Path, tmp_path: Path) -> None:
    command = next(line for line in commands(page) if line.startswith("aiokv sim"))
    output = run(sys.executable, "-m", *command.split(), cwd=tmp_path)
    assert "bsp" in output
    assert "asp" in output
    assert list(tmp_path.glob("*.png"))


@functools.cache
def options_of(*command: str) -> set[str]:
    """Return the options of a command, as its help says them."""
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", help_of(*command)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_option_that_a_page_uses_exists(page: Path) -> None:
    for line in commands(page):
        words = re.split(r"\s--\s", line)[0].split()
        if "aiokv" not in words:
            continue
        words = words[words.index("aiokv") + 1 :]
        command = words[: 2 if words[0] in ("sim", "checkpoint") else 1]
        for option in (word for word in words if word.startswith("-")):
            assert option in options_of(*command), f"{line}: {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_name_that_a_page_uses_exists(page: Path) -> None:
    """Settings as variables, the package's names, and the calls of a store or client that a page calls `kv`."""
    text = page.read_text(encoding="utf-8")
    settings = {f"AIOKV_{name.upper()}" for name in (*Config.__struct_fields__, "scheduler", "config")}
    for name in set(re.findall(r"\bAIOKV_\w+\b", text)):
        assert name in settings or name.startswith(f"AIOKV_{TRAINING.upper()}_"), name
    for snippet in snippets(page):
        tree = compile(snippet, page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            if node.value.id == "aiokv":
                assert hasattr(aiokv, node.attr) or find_spec(f"aiokv.{node.attr}"), ast.unparse(node)
            if node.value.id == "kv":
                assert hasattr(Client, node.attr) or hasattr(aiokv.KVStore, node.attr), ast.unparse(node)
