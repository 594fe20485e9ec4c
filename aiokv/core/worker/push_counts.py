"""How often a worker has pushed each key, and its clock: the most pushes of any key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.worker.going_on import first_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aiokv.core.worker.known_keys import KnownKeys
    from aiokv.core.worker.parts import Plan
    from aiokv.types import Key
    from aiokv.wire import messages as m


class PushCounts:
    """The counts of one worker, which go on from those of others where it has come later.

    Args:
        keys: has how often each key was pushed by this worker.
    """

    __slots__ = ("_earlier", "_keys", "_known", "clock", "goes_on")

    def __init__(self, keys: KnownKeys) -> None:
        self._known = keys.by_key
        self._keys = keys
        self.clock = 0
        """The most pushes of any key."""
        self._earlier: dict[Key, int] = {}
        """How many pushes of a key were made before those of this worker, and elsewhere: those of what was loaded."""
        self.goes_on = False
        """Whether another process had this worker's place before, and has pushed."""

    # --- counts ---

    def pushed(self, key: Key) -> int:
        """Return how often this worker has pushed a key."""
        known = self._known.get(key)
        if known is None:
            return 0
        return known.bundle.pushed if known.bundle else known.pushed

    @property
    def most(self) -> int:
        """The most pushes of a key."""
        return max((self.pushed(key) for key in self._known), default=0)

    def counted(self, key: Key) -> int:
        """Return how often a key was pushed, what was before a load included."""
        pushed = self.pushed(key)
        return pushed + self._earlier.get(key, 0) if self._earlier else pushed

    def next_clock(self, keys: Iterable[Key]) -> int:
        """Return the clock that a push of keys would have now."""
        return max([self.clock, *(self.counted(key) + 1 for key in keys)])

    def before(self, key: Key, pushed: int) -> int:
        """Return the number of the push that a value must not have, for it may have been made before; 0: none."""
        return pushed + 1 if self.goes_on and self._known[key].goes_on else 0

    def advance(self, plan: Plan, sparse: list[Key]) -> None:
        """Count what is about to be pushed: all keys of a call have the same clock."""
        keys = plan.keys + sparse if sparse else plan.keys
        if self._earlier:
            keys = keys + [key for bundle, _ in plan.bundles for key in bundle.keys[1:]]
        earlier, clock = self._earlier, self.clock
        for key in keys:
            # Not by `counted` or `pushed`, which would be two calls more for each key.
            known = self._known.get(key)
            count = 0 if known is None else (known.bundle or known).pushed
            if earlier:
                count += earlier.get(key, 0)
            if count >= clock:
                clock = count + 1
        self.clock = clock
        if not self._keys.has_steps:
            return
        stepping = [self._known[key] for key in keys if key in self._known and self._known[key].lane]
        # A step has one push of a key, also of one that was made late and so has been pushed less often.
        self.clock = max([clock, *(1 + one.clock for one in stepping)])
        for one in stepping:
            one.clock = self.clock

    def forget(self, key: Key) -> None:
        """Take out a key that was deleted."""
        self._earlier.pop(key, None)

    # --- who goes on where others were ---

    def resume(self, clock: int, updates: Mapping[Key, int]) -> None:
        """Let pushes go on from the clock of the key with the most updates; the others are as far behind as there."""
        shift = clock - max(updates.values(), default=0)
        self.clock = clock
        self._earlier = {key: shift + count - self.pushed(key) for key, count in updates.items()}

    def go_on(self, counts: Sequence[tuple[Key, m.Pushes]]) -> int:
        """Count the next pushes from where the one before in this worker's place was; return its complete steps.

        Raises:
            MembershipError: it has pushed some keys more often than others.
        """
        step, clock = first_step(counts)
        self.clock = clock
        begun = {key: None for key, made in counts if made.count}
        for key, known in self._known.items():
            known.pushed, known.clock, known.goes_on = step, clock, key in begun
            if known.bundle is not None:
                known.bundle.pushed = step
        self._earlier = dict.fromkeys(self._known, clock - step) if clock != step else {}
        self.goes_on = any(known.goes_on for known in self._known.values())
        return step

    def admit(self, clock: int, counts: Sequence[tuple[Key, m.Pushes]]) -> int:
        """Count the first pushes from those of the others, behind a clock; return how many steps these have made.

        Keys may have been pushed a different number of times. The others have made fewer steps than to the clock if all
        of them have left before it.
        """
        self.clock = clock
        numbers = {key: made.count for key, made in counts}
        for key, number in numbers.items():
            known = self._known[key]
            known.pushed, known.clock = number, clock
            if known.bundle is not None:
                known.bundle.pushed = number
        step = max(numbers.values())
        self._earlier = dict.fromkeys(numbers, clock - step) if clock != step else {}
        return step
