"""`python -m aiokv` is the command `aiokv`."""

from __future__ import annotations

from aiokv.cli import main

if __name__ == "__main__":
    main()
