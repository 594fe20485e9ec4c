"""Make the environments of the peers, each in a folder of its own; `README.md` beside this file says what they are."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".peers"
"""Where the environments lie unless said otherwise; git ignores it."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment of a peer is made of."""

    name: str
    versions: tuple[str, ...]
    """The versions of Python that the peer runs on, the preferred one first."""
    requirements: tuple[str, ...]
    check: str
    """Python code that succeeds when the environment is complete."""

    @property
    def variable(self) -> str:
        """The environment variable that names its Python."""
        return f"{self.name.upper()}_PYTHON"

    def python(self, folder: Path = FOLDER) -> Path:
        """Return its Python, which need not exist: the one that the variable names, else the one in the folder."""
        named = os.environ.get(self.variable)
        return Path(named) if named else folder / self.name / "bin" / "python"


_CURRENT = ("3.11", "3.12", "3.13")
_GLOO_CHECK = "import torch.distributed as d; assert d.is_gloo_available()"

ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        # The last release of a project that has ended; newer versions of Python and NumPy break it.
        Environment("mxnet", ("3.8", "3.9"), ("mxnet==1.9.1", "numpy<1.24"), "import mxnet; mxnet.kv"),
        Environment("gloo", _CURRENT, ("torch==2.13.0", "numpy"), _GLOO_CHECK),
        Environment("ray", _CURRENT, ("ray==2.60.0", "numpy"), "import ray, numpy"),
    )
}


def find_python(versions: tuple[str, ...]) -> Path | None:
    """Look for a Python of one of the versions: this one, those on the path, then those of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in versions:
        on_path = shutil.which(f"python{version}")
        candidates = [Path(sys.executable), *([Path(on_path)] if on_path else [])]
        candidates += sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
        for candidate in candidates:
            if _version(candidate) == version:
                return candidate
    return None


def _version(python: Path) -> str | None:
    """Return "3.11" or the like; None if it does not start: a name on the path may be a shim with nothing behind it."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def is_complete(environment: Environment, python: Path) -> bool:
    """Say whether everything that the peer needs is there."""
    try:
        return subprocess.run([python, "-c", environment.check], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def make(environment: Environment, folder: Path, base: Path | None) -> None:
    """Make an environment, from its beginning if it is there but not complete.

    Raises:
        SystemExit: there is no Python of the right version.
        subprocess.CalledProcessError: a step failed; its output says why.
    """
    home = folder.resolve() / environment.name
    python = home / "bin" / "python"
    if is_complete(environment, python):
        print(f"{environment.name}: {python} is complete")
        return
    base = base or find_python(environment.versions)
    if base is None:
        raise SystemExit(
            f"{environment.name} needs Python {' or '.join(environment.versions)}, and none was found. "
            f"Name one: --python {environment.name}=/path/to/python"
        )
    print(f"{environment.name}: making {home} with {base}", flush=True)
    subprocess.run([base, "-m", "venv", "--clear", home], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *environment.requirements], check=True)
    subprocess.run([python, "-c", environment.check], check=True)


def main() -> None:
    """Make the environments named on the command line, or all."""
    known = ", ".join(ENVIRONMENTS)
    parser = argparse.ArgumentParser(description="Make the environments of the peers.")
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"{known}; without any: all")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to make them (default: %(default)s)")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PEER=PATH", help="the Python to make one with"
    )
    options = parser.parse_args()
    bases = dict(text.partition("=")[::2] for text in options.python)
    for name in [*options.peers, *bases]:
        if name not in ENVIRONMENTS:
            parser.error(f"expected one of {known}; got {name!r}")
    for name in options.peers or ENVIRONMENTS:
        make(ENVIRONMENTS[name], options.folder, Path(bases[name]) if name in bases else None)


if __name__ == "__main__":
    main()
