"""What checkpoints of the cluster are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiokv.wire import messages as m


def name_of(run: int, clock: int) -> str:
    """Return the name of a checkpoint; later ones come later in the order of names.

    Args:
        run: how often the job was started in this folder.
        clock: of the updates that it has.
    """
    return f"run-{run:06d}-clock-{clock:010d}"


def place_of(view: m.View, clock: int) -> str:
    """Return the folder of a checkpoint."""
    return f"{view.checkpoints}/{name_of(view.run, clock)}"
