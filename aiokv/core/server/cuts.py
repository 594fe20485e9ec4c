"""Which update rules can't be used for a key because of the places where it is cut into chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.errors import OptimizerError

if TYPE_CHECKING:
    from aiokv.optim import Optimizer
    from aiokv.policy import Policy
    from aiokv.types import Key, TensorSpec


def check_cut(rule: Optimizer, key: Key, spec: TensorSpec, start: int, stop: int, policy: Policy) -> None:
    """Refuse a rule that can't update elements [start, stop) of a key by themselves.

    Raises:
        OptimizerError: names the key and says what to do.
    """
    if stop - start == spec.size or policy.keeps_sum:
        return
    cut, nbytes = f"elements {start} to {stop}", spec.nbytes
    if rule.norm_phases and policy.per_push:
        text = (
            f"optimizer {rule.name!r} needs norms of all of key {key!r}, but it is cut, and under policy {policy.name} "
            "its chunks see pushes in different orders; set the scheduler's chunk_bytes and split_bytes to more than "
            f"{nbytes}, so that the key stays whole, or use policy bsp, or k_async:1, asynchronous in one order"
        )
        raise OptimizerError(text, key=key, expected="a whole tensor", got=cut)
    row = spec.row_size
    if rule.by_row and (start % row or stop % row):
        text = (
            f"optimizer {rule.name!r} keeps a number for each row, but key {key!r} with rows of {row} elements is cut "
            "inside a row: a row is larger than a chunk, or they are too few for even shares on the servers; set the "
            f"scheduler's chunk_bytes to at least {row * spec.itemsize} and split_bytes to more than {nbytes}, so that "
            "rows stay whole"
        )
        raise OptimizerError(text, key=key, expected=f"a multiple of {row}", got=cut)
