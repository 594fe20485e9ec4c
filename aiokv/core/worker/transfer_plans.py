"""How the keys of a worker's calls go together: in which bundles, and what is cut how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiokv.core.worker.layout import MAX_PLANS
from aiokv.core.worker.parts import Known, KnownBundle, Plan, Single

if TYPE_CHECKING:
    from aiokv.core.worker.known_keys import KnownKeys
    from aiokv.core.worker.layout import Layout
    from aiokv.core.worker.open_pushes import OpenPushes
    from aiokv.core.worker.parts import Part, Tensors
    from aiokv.types import Key, Peer

BUNDLED_BYTES: Final = 16 * 1024
"""Tensors up to this size are initialised in bundles: their bytes cost less than their messages."""


class Plans:
    """The plans of calls that were made lately, and the bundles that keys are in.

    Args:
        keys: the keys that the worker knows.
        pushes: those that are under way.
        layout: how keys are cut.
    """

    __slots__ = ("_keys", "_known", "_last", "_layout", "_plans", "_pushes")

    def __init__(self, keys: KnownKeys, pushes: OpenPushes, layout: Layout) -> None:
        self._keys = keys
        self._known = keys.by_key
        self._pushes = pushes
        self._layout = layout
        self._plans: dict[tuple[Key, ...], Plan] = {}
        self._last: Plan | None = None
        """The plan that was used last; `forget` when it is not good any longer."""

    def known(self, tensors: Tensors) -> Tensors | None:
        """Return the tensors of a plan that there is for the same ones, if there is one."""
        # Mostly the same tensors are named again.
        plan = self._last
        if plan is not None and plan.tensors == tensors:
            return plan.tensors
        plan = self._plans.get(tuple([key for key, _ in tensors]))
        return plan.tensors if plan is not None and plan.tensors == tensors else None

    def plan(self, tensors: Tensors) -> Plan:
        """Return the plan of a call with some tensors, none of which is row-sparse."""
        plan = self._last
        if plan is not None and plan.tensors is tensors:
            return plan
        keys = tuple([key for key, _ in tensors])
        plan = self._plans.get(keys)
        if plan is None or plan.tensors != tensors:
            if any(key in self._known and self._known[key].bundle for key in keys):
                plan = self._make(keys, tensors)
            else:
                plan = self._layout.plan(tensors)
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[keys] = plan
        self._last = plan
        return plan

    def forget(self) -> None:
        """Make new plans for all calls: something has changed."""
        self._plans.clear()
        self._last = None

    def _make(self, keys: tuple[Key, ...], tensors: Tensors) -> Plan:
        index = {key: tensor for tensor, key in enumerate(keys)}
        bundles: list[tuple[KnownBundle, tuple[int, ...]]] = []
        singles: list[Single] = []
        planned: dict[KnownBundle, None] = {}
        for tensor, key in enumerate(keys):
            known = self._known.get(key)
            bundle = known.bundle if known else None
            if bundle is None:
                singles.append(self._layout.single(tensor, *tensors[tensor]))
            elif bundle in planned:
                continue
            elif all(member in index for member in bundle.keys):
                planned[bundle] = None
                bundles.append((bundle, tuple(index[member] for member in bundle.keys)))
            else:
                # Only some of its keys are used: from here on each goes alone.
                self.take_apart(bundle)
                singles.append(self._layout.single(tensor, *tensors[tensor]))
        # Of keys in one bundle only a load can have made the counts differ.
        firsts = [single.key for single in singles] + [bundle.keys[0] for bundle, _ in bundles]
        return Plan(tensors, bundles, singles, firsts)

    # --- bundles ---

    def group(self, tensors: Tensors, *, joins: bool) -> tuple[list[list[int]], list[int]]:
        """Put small new tensors together by server and dtype, the same way on every worker; and the rest.

        Unless the policy `joins` keys, each stays alone.
        """
        groups: dict[tuple[Peer, str], list[list[int]]] = {}
        room: dict[tuple[Peer, str], int] = {}
        singles: list[int] = []
        order = sorted(range(len(tensors)), key=lambda tensor: tensors[tensor][0])
        for tensor in order:
            key, spec = tensors[tensor]
            chunks = self._layout.place(key, spec)
            is_small = len(chunks) == 1 and 0 < spec.nbytes <= BUNDLED_BYTES
            if not (joins and is_small) or self._keys.is_used(key):
                singles.append(tensor)
                continue
            name = (chunks[0].server, spec.dtype)
            if room.get(name, 0) < spec.nbytes:
                groups.setdefault(name, []).append([])
                room[name] = self._layout.chunk_bytes
            groups[name][-1].append(tensor)
            room[name] -= spec.nbytes
        bundles = [group for some in groups.values() for group in some]
        singles += [group[0] for group in bundles if len(group) == 1]
        return [group for group in bundles if len(group) > 1], singles

    def bundled(self, bundle: KnownBundle, number: int) -> None:
        """Use the server's number for keys that are initialised together, unless one of them has been used alone."""
        bundle.number = number
        if any(self._keys.is_used(key) for key in bundle.keys):
            return
        for key in bundle.keys:
            self._known.setdefault(key, Known()).bundle = bundle
        self.forget()

    def take_apart(self, bundle: KnownBundle) -> None:
        """Let the keys of a bundle go alone from now on."""
        self._pushes.divide(bundle.keys)
        for key in bundle.keys:
            self._known[key].bundle = None
            self._known[key].pushed = bundle.pushed
            self._known[key].versions[0] = bundle.version
        self.forget()

    def is_apart(self, part: Part) -> bool:
        """Tell whether the part's bundle was taken apart while it was under way."""
        known = self._known.get(part.key)
        return part.bundle is not None and (known is None or known.bundle is not part.bundle)
