"""What a worker knows of keys: their specs, whether they are row-sparse, which policies they have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from aiokv.core.keys import check_key, check_kind, check_same_spec, check_spec
from aiokv.core.stimuli import KeyOptions, KeyRecord
from aiokv.core.tables import check_sparse, check_table
from aiokv.core.worker.parts import Known, Leaving
from aiokv.errors import MembershipError, PolicyError, UnknownKeyError
from aiokv.policy import get_policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiokv.core.worker.parts import Tensors
    from aiokv.types import Key, Rank, TensorSpec


class KnownKeys:
    """The keys that a worker has named.

    Args:
        policy: name of the synchronisation policy of the keys that it initialises.
    """

    __slots__ = ("_asking", "_kind", "_policy", "binds", "by_key", "has_eager", "has_steps")

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self.by_key: dict[Key, Known] = {}
        self.has_steps = False
        """Whether rounds of a key are decided for all keys at once."""
        self.binds = False
        """Whether the pushes of a call count together in any case, because of the policy of a key."""
        self.has_eager = False
        """Whether servers send fresh values of a key ahead of reads."""
        self._kind: type | None = None
        self._asking: dict[Key, None] = {}
        """Keys for which another policy was asked, and it is not known whether the servers have it."""

    # --- which there are ---

    def spec(self, key: Key) -> TensorSpec | None:
        """Return the spec of a key that this worker has initialised."""
        known = self.by_key.get(key)
        return known.spec if known else None

    def is_sparse(self, key: Key) -> bool:
        """Return True when this worker has initialised a key as a row-sparse one."""
        return key in self.by_key and self.by_key[key].is_sparse

    def initialized(self, key: Key) -> Known:
        """Return what is known of a key.

        Raises:
            UnknownKeyError: this worker has not initialised it.
        """
        known = self.by_key.get(key)
        if known is None or known.spec is None:
            raise UnknownKeyError(f"key {key!r} is not initialized by this worker", key=key)
        return known

    def is_eager(self, key: Key) -> bool:
        """Return True when servers send fresh values of a key ahead of reads, because of its policy."""
        return key in self.by_key and self.by_key[key].is_eager

    def is_used(self, key: Key) -> bool:
        """Tell whether this worker has initialised a key, has pushed it or has had its value."""
        known = self.by_key.get(key)
        return known is not None and bool(known.spec or known.bundle or known.pushed or known.versions)

    @property
    def records(self) -> list[KeyRecord]:
        """The keys that this worker has initialised, with the policies that they have."""
        return [
            KeyRecord(
                key, known.spec, known.is_sparse, structs.replace(known.options, policy=self.policy_of(known.options))
            )
            for key, known in self.by_key.items()
            if known.spec is not None
        ]

    def add(self, tensors: Tensors, sparse: int, options: KeyOptions) -> None:
        """Remember keys whose init has succeeded; the last `sparse` of them are row-sparse."""
        for number, (key, spec) in enumerate(tensors, sparse - len(tensors)):
            known = self.by_key.setdefault(key, Known())
            known.spec, known.is_sparse, known.options = spec, number >= 0, options
            self._find_lane(known)

    def forget(self, key: Key) -> None:
        """Know nothing of a key any longer."""
        self._asking.pop(key, None)
        self.by_key.pop(key, None)

    # --- checks ---

    def check(self, tensors: Tensors, sparse: int = 0) -> Tensors:
        """Return the tensors with their keys as plain str or int; the last `sparse` of them are row-sparse.

        Raises:
            KeyUseError: a key can't be, or str and int are mixed.
            SpecMismatchError: a spec can't be, or shape, dtype or storage is not the key's.
        """
        kind = self._kind
        checked: Tensors = []
        for number, tensor in enumerate(tensors, sparse - len(tensors)):
            given, spec = tensor
            key = check_key(given)
            kind = check_kind(key, kind)
            (check_spec if number < 0 else check_table)(key, spec)
            known = self.spec(key)
            if known is not None:
                check_sparse(key, is_sparse=self.is_sparse(key), wanted=number >= 0)
                check_same_spec(key, known, spec)
            # Where it is the same tensor, comparing with it later takes no time.
            checked.append(tensor if key is given else (key, spec))
        self._kind = kind
        return checked

    @property
    def here(self) -> list[Key]:
        """The keys that this worker has initialised."""
        return [key for key, known in self.by_key.items() if known.spec is not None]

    # --- policies ---

    def policy_of(self, options: KeyOptions) -> str:
        """Return the policy's text as everybody writes it."""
        return str(get_policy(options.policy or self._policy))

    @property
    def waits_for_others(self) -> bool:
        """Whether workers wait for each other in a key that this worker has initialised, by their numbers of steps."""
        texts = {self.policy_of(known.options) for known in self.by_key.values() if known.spec is not None}
        policies = [get_policy(text) for text in texts]
        # Some wait in their first rounds only; which ones these are is not known here.
        return any(policy.meets(1) for policy in policies)

    def leaving(self, policy: str, keys: Sequence[Key], rank: Rank) -> list[Leaving]:
        """Return which keys have to leave which policy, so that these keys, or all but sums, have another one.

        Raises:
            UnknownKeyError: this worker has not initialised a key.
            PolicyError: a key of policy "sum", or it can't become one.
            MembershipError: this worker is not in a key's group.
        """
        mine = [key for key, known in self.by_key.items() if known.spec is not None and _is_of(rank, known)]
        sums = [key for key in mine if get_policy(self.policy_of(self.by_key[key].options)).keeps_sum]
        wanted = [check_key(key) for key in keys] or [key for key in mine if key not in sums]
        if get_policy(policy).keeps_sum or any(key in sums for key in wanted):
            text = f"no key can change its policy to or from {policy!r}: the update rule is not for keys of policy sum"
            raise PolicyError(text, expected="another policy than sum", got=policy)
        found: dict[tuple[str, tuple[Rank, ...]], list[Key]] = {}
        for key in dict.fromkeys(wanted):
            known = self.by_key.get(key)
            if known is None or known.spec is None:
                raise UnknownKeyError(f"key {key!r} is not initialized: call init first", key=key)
            if not _is_of(rank, known):
                text = f"key {key!r} belongs to ranks {list(known.options.group)}; rank {rank} is none of them"
                raise MembershipError(text, ranks=[rank], key=key)
            old = self.policy_of(known.options)
            if old != policy or key in self._asking:
                found.setdefault((old, known.options.group), []).append(key)
        return [Leaving(old, group, tuple(some)) for (old, group), some in found.items()]

    @property
    def is_asking(self) -> bool:
        """Whether it is not known of every key whether it has the policy that was asked for."""
        return bool(self._asking)

    def ask_for(self, keys: Sequence[Key]) -> None:
        """Take note that another policy is asked for."""
        self._asking.update(dict.fromkeys(keys))

    def asking(self, tensors: Tensors) -> Key | None:
        """Return the first key of which it is not known whether it has the policy that was asked for."""
        return next((key for key, _ in tensors if key in self._asking), None) if self._asking else None

    def follow(self, policy: str, keys: Iterable[Key]) -> None:
        """Remember that keys have the policy that was asked for."""
        for key in keys:
            self._asking.pop(key, None)
            if key in self.by_key:
                known = self.by_key[key]
                known.options = structs.replace(known.options, policy=policy)
                self._find_lane(known)

    def _find_lane(self, known: Known) -> None:
        policy, known.round = get_policy(self.policy_of(known.options)), 0
        known.lane = (str(policy), tuple(known.options.group)) if policy.decides else None
        known.is_eager = policy.sends_ahead
        self.has_steps = self.has_steps or policy.decides
        self.has_eager = self.has_eager or policy.sends_ahead
        self.binds = self.binds or policy.per_step


def _is_of(rank: Rank, known: Known) -> bool:
    return not known.options.group or rank in known.options.group
