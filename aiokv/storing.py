"""A server's effects on its memory, carried out: what the server on the network and the store in this process share."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiokv.core import effects as ef
from aiokv.core.stimuli import Applied
from aiokv.errors import AiokvError, UpdateRefusedError

if TYPE_CHECKING:
    from aiokv.store.memory import ParameterStore

logger = logging.getLogger("aiokv")


def perform(store: ParameterStore, effect: ef.Effect) -> Applied | None:
    """Carry out one effect; the stimulus that it ends in, if it is an `Apply`.

    Raises:
        TypeError: the effect has nothing to do with the store.
    """
    match effect:
        case ef.Fold(target, source, dtype):
            store.fold(target, source, dtype)
        case ef.Apply():
            return _apply(store, effect)
        case ef.Free(slot):
            store.free(slot)
        case ef.Split(slot, parts):
            store.split(slot, parts)
        case ef.Divide(key, start, chunks):
            store.divide(key, start, chunks)
        case ef.Install(key, start, dtype, size, slot):
            store.install(key, start, dtype, size, slot)
        case ef.Forget(key, start):
            store.forget(key, start)
        case ef.Configure():
            store.reset_states()
        case _:
            raise TypeError(f"not for a store: {effect!r}")
    return None


def _apply(store: ParameterStore, effect: ef.Apply) -> Applied:
    key, start, version = effect.key, effect.start, effect.version
    error: AiokvError | None = None
    try:
        store.apply(key, start, version, effect.slot, effect.rule, effect.clock, effect.divisor)
    except UpdateRefusedError as refused:
        error = refused
    except Exception as failed:  # a rule of a user's own may raise anything
        text = f"key {key!r}, round {version}: the update could not be made: {type(failed).__name__}: {failed}"
        logger.exception(text)
        error = UpdateRefusedError(text, key=key, round=version)
    if error is not None:
        store.keep(key, start, version)
    return Applied(key, start, version, error)
