"""The calls of a worker about compression: which codecs, and what they have left of its gradients."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiokv.checkpoint.cluster_reading import read_residuals
from aiokv.codec.formats import warm_up
from aiokv.core import stimuli as st
from aiokv.core.compression import make_compression
from aiokv.errors import CodecError
from aiokv.operations.base import SLOW, BaseOperations

if TYPE_CHECKING:
    from aiokv.checkpoint.residual_journal import ResidualJournal
    from aiokv.compressing import Compressor
    from aiokv.types import Key

Codec = str | Mapping[str, Any] | None
"""A codec by its name, or as a dict of `type` and parameters; None: none."""


class CompressionOperations(BaseOperations):
    """The part of `Operations` that deals with compression."""

    _compressor: Compressor

    _journal: ResidualJournal | None = None
    """Where it is kept what compression has left of gradients, for who takes this worker's place."""

    async def set_gradient_compression(
        self, compression: Codec, /, *, pull_compression: Codec = None, timeout: float | None = None, **params: Any
    ) -> None:
        """Compress what this worker pushes from now on. Every worker calls it with the same arguments.

        Every key of floats is compressed, whatever its size; others are sent as they are. What a push did not say is
        added to the next push of that key; after turning compression off too. Workers do not wait for each other:
        compressed pushes and plain ones may make one round.

        Args:
            compression: a codec's name, such as "2bit", or `{"type": "2bit", "threshold": 0.5}`; None: none. See
                `aiokv.codec`.
            pull_compression: the same for what is pulled: it is sent as compressed difference to what this worker
                has. A value is exact only when it has not changed for a number of pulls. Takes a copy of the model on
                the worker, and one for each worker on the servers.
            timeout: seconds.
            params: the codec's parameters, besides those in the dict.

        Raises:
            CodecError: unknown codec, wrong parameter, or another worker has set another one.
        """
        push = _read_codec(compression, params)
        pull = _read_codec(pull_compression, {})
        made = make_compression(*push, *pull)
        for codec in (made.push, made.pull):
            if codec is not None:
                await self._compute(functools.partial(warm_up, codec, backend=self._compressor.backend), SLOW)
        seconds = self._seconds(timeout)
        await self._call(lambda call: st.ConfigureCompression(call, *push, *pull, seconds))

    async def compression_state(self) -> dict[Key, dict[str, Any]]:
        """Return what a checkpoint needs of this worker's compression: for each key, residual, step and codec.

        Arrays are copies; all else is None, int, float, str or dict. Wait for the pushes before.
        """
        kept = list(self._compressor.kept.items())
        return {key: await self._compute(each.state, SLOW if each.device else each.nbytes) for key, each in kept}

    async def restore_compression_state(self, state: Mapping[Key, Mapping[str, Any]]) -> None:
        """Go on as the worker of this rank would have that the state is from. Wait for all pushes before.

        Without compression, what is left goes with the next push of each key.

        Raises:
            SpecMismatchError, CodecError: the state is none. Nothing has changed.
        """
        rank, restored = self.rank, self._compressor.restored
        kept = {}
        for key, each in state.items():
            kept[key] = await self._compute(functools.partial(restored, key, each, rank), SLOW)
        self._compressor.kept.update(kept)
        await self._call(lambda call: st.RestoreResiduals(call, list(state), self._seconds(None)))

    async def _resume_compression(self, step: int) -> None:
        """Go on with what compression had left of this worker's gradients: in a checkpoint, or where it was kept.

        Args:
            step: this worker's number of steps so far. If it is another one than the checkpoint's, with which the job
                has begun, the worker has taken the place of one of this job.

        Raises:
            DataError: the checkpoint is damaged.
        """
        place, state = self._session.resumed_from, {}
        if place:
            read = functools.partial(read_residuals, place, self.rank, self.num_workers, step, self._checkpoint_folder)
            state = await self._compute(read, SLOW)
        if self._journal is not None:
            keys = [record.key for record in self._session.records]
            kept = await self._compute(functools.partial(self._journal.begin, keys, self.rank, step), SLOW)
            state = state or kept
        if state:
            await self.restore_compression_state(state)


def _read_codec(given: Codec, params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a codec's name, empty for none, and its parameters.

    Raises:
        CodecError: it is neither a name, nor a dict with one, nor None.
    """
    named: dict[str, Any] = {"type": given} if isinstance(given, str) else {}
    if isinstance(given, Mapping):
        named = dict(given)
    name = named.pop("type", "")
    expected = 'a name, or a dict with one under "type", or None'
    if not isinstance(name, str) or (bool(name) != (given is not None)) or (not name and params):
        raise CodecError(f"compression must be {expected}, got {given!r} and {dict(params)}", expected=expected)
    return name, named | dict(params)
