"""Modules of a user's own that a server imports when it is made, for what they register: update rules and commands."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable


def load(names: Iterable[str]) -> None:
    """Import modules by name. One that is imported already is not imported again.

    Raises:
        ConfigError: names the module that can't be imported, and why.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # it is a user's code, which may raise anything
            text = f"plug-in {name!r} can't be imported: {type(error).__name__}: {error}"
            raise ConfigError(text, key="plugins", got=name) from error
