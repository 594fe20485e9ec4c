"""Cutting streams into lines, and showing whose line it is."""

from __future__ import annotations

import io
import json

import pytest

from aiokv.launch.output import MAX_LINE_BYTES, JsonOutput, LineSplitter, TextOutput, wants_colour


def cut(*pieces: bytes) -> list[bytes]:
    """Return the lines of a stream that arrives in pieces."""
    splitter = LineSplitter()
    return [line for piece in pieces for line in splitter.feed(piece)] + splitter.close()


@pytest.mark.parametrize(
    ("stream", "lines"),
    [
        (b"one\ntwo\n", [b"one", b"two"]),
        (b"no end", [b"no end"]),
        (b"", []),
        (b"para\n\ngraph\n", [b"para", b"", b"graph"]),
        (b"windows\r\nline\r\n", [b"windows", b"line"]),
        (b"\r 10%\r 50%\r100%\ndone\n", [b" 10%", b" 50%", b"100%", b"done"]),
        (b"\r\r\r5%\r\n", [b"5%"]),
        (b"\xff\xfe\n", [b"\xff\xfe"]),
    ],
)
def test_lines_are_the_same_however_the_stream_is_cut(stream: bytes, lines: list[bytes]) -> None:
    assert cut(stream) == lines
    assert cut(*(stream[i : i + 1] for i in range(len(stream)))) == lines


def test_nothing_is_shown_of_a_line_before_it_ends() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"half") == []
    assert splitter.feed(b" a line\nand") == [b"half a line"]


def test_line_that_never_ends_is_shown_in_pieces() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"x" * (2 * MAX_LINE_BYTES + 5)) == [b"x" * MAX_LINE_BYTES] * 2
    assert splitter.close() == [b"x" * 5]


def test_text_goes_to_the_stream_it_came_from_behind_a_padded_name() -> None:
    out, err = io.BytesIO(), io.BytesIO()
    output = TextOutput(["scheduler", "worker-0"], out, err)
    output.line("worker-0", "stdout", b"step 1")
    output.line("scheduler", "stderr", b"\xff oops")
    output.note("ready", "all is up", address="127.0.0.1:1")
    output.note("started", "", node="worker-0")
    assert out.getvalue() == b"worker-0  | step 1\n"
    assert err.getvalue() == b"scheduler | \xff oops\naiokv     | all is up\n"


def test_each_line_is_one_write() -> None:
    writes: list[bytes] = []

    class Recorder(io.BytesIO):
        def write(self, data: object, /) -> int:
            writes.append(bytes(data))  # type: ignore[call-overload]
            return len(writes[-1])

    TextOutput(["worker-0"], Recorder(), io.BytesIO()).line("worker-0", "stdout", b"whole")
    assert writes == [b"worker-0 | whole\n"]


def test_names_are_coloured_and_lines_are_not() -> None:
    out, err = io.BytesIO(), io.BytesIO()
    output = TextOutput(["worker-0"], out, err, colours=(True, False))
    output.line("worker-0", "stdout", b"plain")
    output.line("worker-0", "stderr", b"plain")
    assert out.getvalue() == b"\x1b[0m\x1b[36mworker-0 |\x1b[0m plain\n"
    assert err.getvalue() == b"worker-0 | plain\n"


def test_file_gets_no_colour() -> None:
    assert not wants_colour(io.StringIO())


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


def test_terminal_gets_colour_unless_the_user_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert wants_colour(Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Terminal())


def test_json_has_one_event_a_line() -> None:
    out = io.BytesIO()
    output = JsonOutput(out)
    output.line("worker-0", "stderr", b"caf\xc3\xa9 \xff")
    output.note("exited", "worker-0 is done", node="worker-0", exit_code=0)
    output.note("started", "", node="worker-0")
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"event": "line", "node": "worker-0", "stream": "stderr", "text": "café \ufffd"},
        {"event": "exited", "node": "worker-0", "exit_code": 0, "text": "worker-0 is done"},
        {"event": "started", "node": "worker-0"},
    ]
