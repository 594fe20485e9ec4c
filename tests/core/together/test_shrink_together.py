"""The others go on without a worker that dies anywhere: with all their steps, and no key has what another lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as hs

from aiokv.errors import JoinTimeoutError

if TYPE_CHECKING:
    from aiokv.types import Key
    from tests.core.together.conftest import Array, Cluster, Script, User

KEYS: dict[Key, tuple[int, ...]] = {"big": (7, 5), "small": (3,), "scalar": ()}
"""The first is cut into chunks over all servers."""

STEPS = 4

SEEDS = hs.integers(0, 2**32)
many_orders = settings(max_examples=60)


def arrays(value: float) -> dict[Key, Array]:
    """Return an array for every key."""
    return {key: np.full(shape, value, np.float32) for key, shape in KEYS.items()}


@many_orders
@given(
    seed=SEEDS,
    servers=hs.integers(1, 3),
    policy=hs.sampled_from(["bsp", "asp", "k_sync:2", "k_batch_async:2", "ssp:1"]),
    after=hs.integers(0, 150),
)
def test_a_step_counts_for_all_keys_or_for_none(
    make_cluster: type[Cluster], seed: int, servers: int, policy: str, after: int
) -> None:
    finals: list[dict[Key, Array]] = []

    def train(user: User) -> Script:
        if isinstance((yield user.join()), JoinTimeoutError):
            # It died before the cluster was complete.
            return
        assert (yield user.transfer("init", arrays(0))) is None
        for _ in range(STEPS):
            # Powers of 32, so that a sum says how many pushes of whom are in it.
            assert (yield user.transfer("push", arrays(32.0**user.rank))) is None
        assert (yield user.barrier()) is None
        values = arrays(0)
        assert (yield user.transfer("pull", values)) is None
        finals.append(values)
        yield user.leave()

    cluster = make_cluster(seed, servers=servers, policy=policy, on_worker_loss="shrink")
    cluster.kill_after("worker-2", after)
    cluster.run(train)
    cluster.settle()
    for values in finals:
        numbers = {float(number) for array in values.values() for number in np.unique(array)}
        assert len(numbers) == 1, "an element has what another lacks"
        total = int(numbers.pop())
        if policy in {"bsp", "asp", "ssp:1"}:
            assert (total % 32, total // 32 % 32) == (STEPS, STEPS)
        assert total // 1024 <= STEPS
