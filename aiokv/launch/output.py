"""What the nodes print, line by line: cut out of their streams, and shown under the node's name."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from typing import IO, TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Stream = Literal["stdout", "stderr"]

MAX_LINE_BYTES = 64 * 1024
"""A longer line is shown in pieces, so that a node that never ends its line can't fill the memory."""

_OWN_NAME = "aiokv"
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
_LINE_END = re.compile(rb"\r|\n")


class LineSplitter:
    """Cuts one stream into lines, however the stream is cut into pieces.

    A carriage return ends a line too, so that each state of a progress bar is one; the empty lines that come from it
    are dropped. Empty lines that were printed as such are kept.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._after_return = False

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next piece of the stream; return the lines that are whole now, without their ends."""
        lines = []
        # Only the new piece is searched: the rest has no line end in it.
        start = 0
        for match in _LINE_END.finditer(data):
            line = self._rest + data[start : match.start()]
            self._rest = b""
            start = match.end()
            is_return = match[0] == b"\r"
            if line or not (is_return or self._after_return):
                lines.append(line)
            self._after_return = is_return
        self._rest += data[start:]
        while len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        return lines

    def close(self) -> list[bytes]:
        """Return what the stream ended with, if that was not a line end."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


class Output(ABC):
    """Where the launcher shows the nodes' lines and its own notes. Every method may raise `BrokenPipeError`."""

    @abstractmethod
    def line(self, node: str, stream: Stream, text: bytes) -> None:
        """Show a whole line of a node."""

    @abstractmethod
    def note(self, event: str, text: str, **facts: Any) -> None:
        """Show what the launcher itself has to say: a sentence for people (empty: nothing), facts for programs."""


class TextOutput(Output):
    """Shows lines with the node's name in front, stdout on stdout and stderr on stderr.

    Args:
        nodes: the names of all nodes.
        stdout: binary stream for the nodes' stdout.
        stderr: binary stream for the nodes' stderr and the notes.
        colours: for stdout and for stderr, whether to colour the names.
    """

    def __init__(
        self, nodes: Sequence[str], stdout: IO[bytes], stderr: IO[bytes], *, colours: tuple[bool, bool] = (False, False)
    ) -> None:
        self._streams: dict[Stream, IO[bytes]] = {"stdout": stdout, "stderr": stderr}
        width = max(map(len, [*nodes, _OWN_NAME]))
        styles = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(nodes)} | {_OWN_NAME: "bold"}
        self._prefixes: dict[Stream, dict[str, bytes]] = {
            stream: {name: _prefix(name.ljust(width), style if colour else "") for name, style in styles.items()}
            for stream, colour in zip(self._streams, colours, strict=True)
        }

    def line(self, node: str, stream: Stream, text: bytes) -> None:
        """Write the line in one piece."""
        target = self._streams[stream]
        target.write(self._prefixes[stream][node] + text + b"\n")
        target.flush()

    def note(self, event: str, text: str, **facts: Any) -> None:
        """Write the sentence on stderr."""
        if text:
            self.line(_OWN_NAME, "stderr", text.encode())


class JsonOutput(Output):
    """Shows every line and every note as one line of JSON on stdout, with the kind of event in `event`."""

    def __init__(self, stdout: IO[bytes]) -> None:
        self._stdout = stdout

    def line(self, node: str, stream: Stream, text: bytes) -> None:
        """Write an event "line"; bytes that are not UTF-8 are replaced."""
        self._write({"event": "line", "node": node, "stream": stream, "text": text.decode(errors="replace")})

    def note(self, event: str, text: str, **facts: Any) -> None:
        """Write the event with its facts and the sentence."""
        self._write({"event": event, **facts} | ({"text": text} if text else {}))

    def _write(self, record: dict[str, Any]) -> None:
        self._stdout.write(json.dumps(record).encode() + b"\n")
        self._stdout.flush()


def _prefix(name: str, style: str) -> bytes:
    if not style:
        return f"{name} | ".encode()
    from rich.color import ColorSystem  # noqa: PLC0415 - only a terminal needs it
    from rich.style import Style  # noqa: PLC0415

    # The reset in front ends a colour that a line of another node left switched on.
    return f"\x1b[0m{Style.parse(style).render(f'{name} |', color_system=ColorSystem.STANDARD)} ".encode()


def wants_colour(stream: IO[str]) -> bool:
    """Say whether a stream is a terminal that shows colours, and the user did not forbid them (NO_COLOR)."""
    if not stream.isatty():
        return False
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it

    console = Console(file=stream)
    return console.color_system is not None and not console.no_color
