"""A server's effects on its memory, carried out: what the server on the network and the store in this process share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core import effects as ef
from aiokv.core.stimuli import Applied
from aiokv.errors import AiokvError

if TYPE_CHECKING:
    from aiokv.store.memory import ParameterStore


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
        case ef.Configure():
            store.reset_states()
        case _:
            raise TypeError(f"not for a store: {effect!r}")
    return None


def _apply(store: ParameterStore, effect: ef.Apply) -> Applied:
    key, start, version = effect.key, effect.start, effect.version
    try:
        store.apply(key, start, version, effect.slot, effect.rule, effect.clock, effect.divisor)
    except AiokvError as error:
        store.keep(key, start, version)
        return Applied(key, start, version, error)
    return Applied(key, start, version)
