"""What compression has left of a worker's gradients, saved beside the file of rank 0.

Nothing of it is lost when there is another number of workers later: rank r of n goes on with the sum of what ranks
r, r + n, r + 2n ... had left, so that the sum over all workers is what it was. Their codecs go on from the step of the
first of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.checkpoint.saving import ResidualContent, SavedResidual, decode_residuals, encode_residuals
from aiokv.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from aiokv.types import Key, Rank

State = dict[str, Any]


def rank_url(url: str, rank: Rank) -> str:
    """Return where a worker writes what it has left."""
    return f"{url}.rank{rank}"


def inherited(ranks: Iterable[Rank], rank: Rank, workers: int) -> list[Rank]:
    """Return those of the ranks that have saved something with whose residuals a rank goes on.

    Args:
        ranks: who has saved.
        rank: who goes on.
        workers: how many go on.
    """
    return [each for each in ranks if each % workers == rank]


def residual_file(
    state: Mapping[Key, State], rank: Rank, save_id: str, keys: Collection[Key] | None
) -> list[bytes | memoryview]:
    """Return the bytes of a worker's file, but for the checksum.

    Args:
        state: see `aiokv.compressing.Compressor.state`.
        rank: whose it is.
        save_id: of the save.
        keys: which are saved; None: all.
    """
    wanted = {key: one for key, one in state.items() if keys is None or key in keys}
    entries = [
        SavedResidual(key, one["dtype"], one.get("codec"), dict(one.get("params", {})), one.get("step", 0))
        for key, one in wanted.items()
    ]
    residuals = {key: one["residual"] for key, one in wanted.items()}
    return encode_residuals(ResidualContent(save_id, rank, entries), residuals)


def merged(url: str, contents: Mapping[Rank, bytes], save_id: str, keys: Collection[Key] | None) -> dict[Key, State]:
    """Return the state that a worker goes on with.

    Args:
        url: of rank 0's file.
        contents: the files of the ranks in whose place this worker is.
        save_id: of the save that they must be of.
        keys: which are loaded; None: all.

    Raises:
        DataError: a file is torn, changed, or of another save.
    """
    found = sum_of(state_of(data, rank_url(url, rank), rank, save_id) for rank, data in contents.items())
    return {key: state for key, state in found.items() if keys is None or key in keys}


def sum_of(states: Iterable[Mapping[Key, State]]) -> dict[Key, State]:
    """Return what workers had left together, with the codecs of the first one that had something of a key."""
    found: dict[Key, State] = {}
    for some in states:
        for key, state in some.items():
            if key in found:
                found[key]["residual"] += state["residual"]
            else:
                found[key] = state
    return found


def state_of(data: bytes, path: str, rank: Rank, save_id: str) -> dict[Key, State]:
    """Return what the file of a worker says, as `residual_file` was given it.

    Raises:
        DataError: the file is torn, changed, or of another rank or save.
    """
    content, residuals = decode_residuals(data, path)
    if (content.id, content.rank) != (save_id, rank):
        text = f"{path}: is not of the save that it should be of"
        expected, got = f"{save_id}, rank {rank}", f"{content.id}, rank {content.rank}"
        raise DataError(text, path=path, expected=expected, got=got)
    found: dict[Key, State] = {}
    for entry in content.keys:
        state: State = {"dtype": entry.dtype, "residual": np.array(residuals[entry.key])}
        if entry.codec is not None:
            state |= {"codec": entry.codec, "params": entry.params, "step": entry.step}
        found[entry.key] = state
    return found
