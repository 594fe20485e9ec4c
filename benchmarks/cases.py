"""What can be compared: the peers with their modes, and the table of targets that `compare.py --all` goes through.

As `common`, it runs under the peers' own Pythons, from 3.8 on.
"""

from __future__ import annotations

from dataclasses import dataclass

MODES = {
    "mxnet": ("together", "apart", "list"),
    "gloo": ("each", "async", "flat"),
    "ray": ("gather", "call"),
    "limits": ("duplex", "pingpong", "bare"),
}
"""The peers, and the ways in which each can do the work, the default first. `limits` is the machine without aiokv."""
KNOWN = ", ".join(f"{name}[:{'|'.join(modes)}]" for name, modes in MODES.items())


@dataclass(frozen=True)
class Case:
    """One comparison."""

    workload: str
    workers: int
    servers: int
    peer: str
    """A peer, and behind a colon its mode."""
    at_least: float | None = None
    """How many times as fast as the peer aiokv wants to be."""
    at_most_ms: float | None = None
    """How long a round of aiokv may take."""
    options: tuple[str, ...] = ()
    """Further options of `aiokv bench`."""

    def __str__(self) -> str:
        nodes = f"{count(self.workers, 'worker')}, {count(self.servers, 'server')}"
        return f"{' '.join([self.workload, *self.options])}, {nodes}: aiokv and {self.peer}"


def count(number: int, noun: str) -> str:
    """Return the number with the noun, which is in the plural where it has to be."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


_COLOCATED = ("--colocate",)

TABLE = (
    Case("large:64", 1, 1, "limits:duplex", at_least=0.85),
    Case("large:64", 1, 1, "mxnet", at_least=5),
    Case("large:64", 2, 1, "limits:bare", at_least=0.85),
    Case("large:64", 2, 1, "mxnet", at_least=3.5),
    Case("large:64", 2, 1, "mxnet:apart", at_least=3.5),
    Case("large:64", 2, 1, "ray"),
    Case("large:64", 2, 2, "mxnet", at_least=3),
    Case("large:256", 1, 1, "mxnet"),
    Case("large:256", 2, 1, "mxnet"),
    Case("resnet50", 1, 1, "mxnet", at_least=2.5),
    Case("resnet50", 1, 1, "mxnet:apart", at_least=2.5),
    Case("resnet50", 2, 1, "mxnet", at_least=2.5),
    Case("resnet50", 2, 1, "mxnet:apart", at_least=2.5),
    Case("resnet50", 2, 1, "ray"),
    Case("resnet50", 2, 2, "mxnet", at_least=2.5),
    Case("resnet50", 2, 2, "mxnet:apart", at_least=2.5),
    *(Case("resnet50", 2, 2, f"gloo:{mode}", at_least=1, options=_COLOCATED) for mode in MODES["gloo"]),
    Case("large:64", 2, 2, "gloo", at_least=1, options=_COLOCATED),
    Case("small", 1, 1, "mxnet", at_most_ms=8),
    Case("small", 2, 1, "mxnet", at_most_ms=15),
    Case("small", 2, 1, "mxnet:apart", at_most_ms=15),
    Case("small", 2, 2, "mxnet", at_most_ms=15),
    Case("small", 2, 1, "gloo:async"),
    Case("small", 2, 1, "gloo:flat"),
    Case("small", 2, 1, "ray:call"),
    Case("latency:4", 1, 1, "limits"),
    Case("latency:4", 1, 1, "mxnet", at_most_ms=0.12),
)
"""What `--all` compares."""
