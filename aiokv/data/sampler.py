"""Batches of indices for one of several workers: as many for each, and every index once in an epoch."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np

from aiokv.data.dealing import Deal, Hand, Last, epoch_order
from aiokv.data.sharding import check_member
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from aiokv.data.dealing import Indices
    from aiokv.types import Rank

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Played(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A deal and how many batches of it each rank has finished."""

    deal: Deal
    done: list[_Count]


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `ShardedSampler.state` returns."""

    version: Literal[1]
    n: _Count
    seed: _Count
    shuffle: bool
    epoch: _Count
    order: _Count
    """A checksum of the epoch's order: another release of NumPy may shuffle otherwise."""
    deals: Annotated[list[_Played], msgspec.Meta(min_length=1)]
    """All deals of the epoch; the last one is under way."""


class ShardedSampler:
    """Iterate over this worker's batches of indices in an epoch; a `batch_sampler` for a loader of the caller's choice.

    A loop that also goes on where a state was restored::

        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for batch in sampler:
                train(images[batch])
                sampler.record_batch()

    Every worker gets the same number of batches, so nobody waits in a synchronous step for a worker that is through.
    All workers shuffle alike, so they need the same arguments and the same release of NumPy. A batch counts as finished
    when `record_batch` says so, not when it is handed out: a loader may fetch ahead. `state` and `restore` go on in
    the middle of an epoch, and `re_deal` goes on with other workers.

    While it deals, it holds the order of the whole epoch, 4 bytes per index (8 beyond 2^31 of them), and twice that
    when it deals anew; later only this worker's share of it.

    Args:
        n: the number of examples.
        rank: this worker's number.
        num_workers: how many workers share the examples.
        batch_size: the number of indices in a batch.
        seed: of the order, together with the epoch.
        shuffle: use another random order in each epoch; otherwise the order is 0, 1, 2 ...
        last: what becomes of the fewer than num_workers * batch_size indices that are left at the end.
            "pad" fills all batches up with indices from the beginning of the order. "drop" leaves them out in this
            epoch. "short" spreads them evenly, and fills up only so far that each worker gets at least one.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(
        self,
        n: int,
        rank: Rank,
        num_workers: int,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        last: Last = "pad",
    ) -> None:
        check_member(rank, num_workers)
        for name, value, low in (("n", n, 0), ("batch_size", batch_size, 1), ("seed", seed, 0)):
            if value < low:
                raise ConfigError(f"{name}={value} is too small: expected {low} or more", expected=low, got=value)
        if last not in {"pad", "drop", "short"}:
            expected = "'pad', 'drop' or 'short'"
            raise ConfigError(f"unknown last={last!r}: expected {expected}", expected=expected, got=str(last))
        self._n = n
        self._seed = seed
        self._shuffle = shuffle
        self._rank = rank
        self._epoch = 0
        self._deal = Deal(num_workers, batch_size, last)
        self._played: list[_Played] = []
        self._size = n
        self._position = 0
        self._hand: Hand | None = None
        self._order_crc = 0

    @property
    def rank(self) -> Rank:
        """This worker's number."""
        return self._rank

    @property
    def num_workers(self) -> int:
        """How many workers share the examples."""
        return self._deal.num_workers

    @property
    def epoch(self) -> int:
        """The epoch under way; 0 at first."""
        return self._epoch

    @property
    def position(self) -> int:
        """How many batches this worker has finished since the epoch began or was dealt anew."""
        return self._position

    def __len__(self) -> int:
        """Return how many batches each worker gets in this epoch; after `re_deal`, in the rest of it."""
        return self._deal.num_batches(self._size)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Iterate over the batches that are not finished yet.

        Raises:
            ConfigError: another epoch began, or the indices were dealt anew, while this went on.
        """
        hand = self._dealt()
        for number in range(self._position, len(self)):
            if self._hand is not hand:
                raise ConfigError("the batches were dealt anew meanwhile: iterate over the sampler again")
            batch = hand.whole[number] if number < len(hand.whole) else hand.last
            assert batch is not None
            yield batch.astype(np.int64)

    def record_batch(self, count: int = 1) -> None:
        """Count the next batches as finished.

        Raises:
            ConfigError: this worker has not so many left.
        """
        left = len(self) - self._position
        if not 0 <= count <= left:
            raise ConfigError(
                f"cannot finish {count} more batches: rank {self._rank} has {left} left of {len(self)} in epoch "
                f"{self._epoch}",
                expected=f"0 to {left}",
                got=count,
            )
        self._position += count

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: all indices are dealt to all workers.

        The epoch that is under way is not begun again, so that a restored worker goes on where it was.

        Raises:
            ConfigError: the epoch is negative.
        """
        if epoch < 0:
            raise ConfigError(f"epoch {epoch} is too small: expected 0 or more", expected=0, got=epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._go_on(self._deal, [], self._n, 0)

    def state(self, done: Sequence[int] | None = None) -> dict[str, Any]:
        """Return where the epoch stands, as what JSON can hold. It is not this worker's: any worker can restore it.

        Args:
            done: how many batches each rank has finished. By default as many as this one has, which is true after a
                step of synchronous training.

        Raises:
            ConfigError: `done` is not possible.
        """
        counts = self._check_done(done)
        self._dealt()
        state = _State(
            version=1,
            n=self._n,
            seed=self._seed,
            shuffle=self._shuffle,
            epoch=self._epoch,
            order=self._order_crc,
            deals=[*self._played, _Played(self._deal, counts)],
        )
        result: dict[str, Any] = msgspec.to_builtins(state)
        return result

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken. What was not recorded by then is done again.

        Where the state is of another number of workers, or another batch size or `last`, what was not finished is dealt
        anew with those of this sampler.

        Raises:
            ConfigError: it is no state, or of other data, another seed or order; the sampler is as before.
        """
        try:
            read = msgspec.convert(dict(state), _State)
        except msgspec.ValidationError as error:
            raise ConfigError(f"this is no state of a sampler: {error}", got=str(error)) from None
        for name, mine in (("n", self._n), ("seed", self._seed), ("shuffle", self._shuffle)):
            theirs = getattr(read, name)
            if theirs != mine:
                raise ConfigError(
                    f"the state has {name}={theirs}, this sampler has {name}={mine}", expected=mine, got=theirs
                )
        sizes = [self._n]
        for played in read.deals:
            played.deal.check_done(sizes[-1], played.done)
            sizes.append(played.deal.num_unfinished(sizes[-1], played.done))
        order = epoch_order(self._n, seed=self._seed, epoch=read.epoch, shuffle=self._shuffle)
        crc = zlib.crc32(order.data)
        if crc != read.order:
            raise ConfigError(
                f"epoch {read.epoch} has another order here than in the state: use the same release of NumPy",
                expected=read.order,
                got=crc,
            )
        self._epoch = read.epoch
        if read.deals[-1].deal == self._deal:
            self._go_on(self._deal, read.deals[:-1], sizes[-2], read.deals[-1].done[self._rank])
        else:
            self._go_on(self._deal, read.deals, sizes[-1], 0)
        self._take(order, crc)

    def re_deal(
        self, rank: Rank, num_workers: int, *, done: Sequence[int] | None = None, batch_size: int | None = None
    ) -> None:
        """Deal what nobody has finished of this epoch over other workers, e.g. when one was lost or joined.

        Every worker that goes on calls it with the same arguments but for its rank; one that joins restores the `state`
        of one that did. The epochs that follow are dealt over the new workers, too.

        Args:
            rank: this worker's number among the new workers.
            num_workers: how many there are from now on.
            done: how many batches each of the old ranks has finished since the last deal; what a lost worker did not
                record counts as not finished. By default as many as this one has, which is true after a step of
                synchronous training.
            batch_size: the number of indices in a batch from now on; by default as before.

        Raises:
            ConfigError: an argument is out of its range; the sampler is as before.
        """
        check_member(rank, num_workers)
        size = self._deal.batch_size if batch_size is None else batch_size
        if size < 1:
            raise ConfigError(f"batch_size={size} is too small: expected 1 or more", expected=1, got=size)
        counts = self._check_done(done)
        left = self._deal.num_unfinished(self._size, counts)
        self._rank = rank
        self._go_on(Deal(num_workers, size, self._deal.last), [*self._played, _Played(self._deal, counts)], left, 0)

    def _check_done(self, done: Sequence[int] | None) -> list[int]:
        counts = [self._position] * self.num_workers if done is None else [int(count) for count in done]
        self._deal.check_done(self._size, counts)
        return counts

    def _go_on(self, deal: Deal, played: list[_Played], size: int, position: int) -> None:
        """Take the `size` indices that are left after what was played, from a position in this worker's hand."""
        self._deal = deal
        self._played = played
        self._size = size
        self._position = position
        self._hand = None

    def _dealt(self) -> Hand:
        """Return this worker's batches; they are dealt when they are first needed."""
        if self._hand is None:
            order = epoch_order(self._n, seed=self._seed, epoch=self._epoch, shuffle=self._shuffle)
            return self._take(order, zlib.crc32(order.data))
        return self._hand

    def _take(self, order: Indices, crc: int) -> Hand:
        """Keep and return this worker's batches of what is left of the epoch's order."""
        for played in self._played:
            order = played.deal.unfinished(order, played.done)
        self._order_crc = crc
        self._hand = self._deal.hand(order, self._rank)
        return self._hand
