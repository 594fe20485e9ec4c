"""The fuzz target keeps its promises on the corpus, on changed inputs of it, and for a bounded run of atheris."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wire.fuzz import MODES, one_input

CORPUS = Path(__file__).parent / "corpus"
INPUTS = sorted(CORPUS.iterdir())
RUNS = 20_000


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.name)
def test_inputs_of_the_corpus_keep_all_promises(path: Path) -> None:
    one_input(path.read_bytes())


def test_the_corpus_is_small_and_has_inputs_for_every_mode() -> None:
    inputs = [path.read_bytes() for path in INPUTS]
    assert {data[0] % len(MODES) for data in inputs} == set(range(len(MODES)))
    assert sum(map(len, inputs)) < 100_000


def test_changed_inputs_keep_all_promises() -> None:
    """Without a guide, but everywhere."""
    choose = random.Random("fuzz")
    inputs = [path.read_bytes() for path in INPUTS]
    for _ in range(3000):
        data = bytearray(choose.choice(inputs))
        for _ in range(choose.randint(1, 4)):
            at = choose.randrange(len(data) + 1)
            match choose.randrange(4):
                case 0:
                    data[at:at] = choose.randbytes(choose.randint(1, 8))
                case 1:
                    del data[at : at + choose.randint(1, 8)]
                case 2:
                    data[at : at + 1] = choose.choice([b"\x00", b"\xff", b"\x7f", b"\x80"])
                case _:
                    data += choose.choice(inputs)
        one_input(bytes(data))


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed: no guided fuzzing")
def test_a_bounded_run_of_the_guided_fuzzer_finds_nothing(tmp_path: Path) -> None:
    found = tmp_path / "found"
    found.mkdir()
    # The most memory that a process has had counts what its parent had when it was forked: that can't be limited here.
    memory = ["-rss_limit_mb=0", "-malloc_limit_mb=256"]
    options = [f"-runs={RUNS}", "-seed=7", "-max_len=2000", *memory, f"-artifact_prefix={tmp_path}/"]
    options += [str(found), str(CORPUS)]
    command = [sys.executable, str(Path(__file__).with_name("fuzz.py")), *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert f"Done {RUNS} runs" in run.stderr
