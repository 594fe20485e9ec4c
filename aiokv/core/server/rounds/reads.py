"""Which versions of a chunk pushes that are to come may refer to, for rules that look at what a worker had read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.types import Rank, Version

MAX_ANSWERS = 32
"""How many answers of a chunk that one rank has not referred to yet are remembered.

A rank that pulls without pushing never says what it has received; more than this are hardly ever under way to it.
"""


@dataclass(slots=True)
class Answer:
    """What a rank was told is version `named`, and which version of the chunk that was.

    They differ where the keys of a bundle have gone apart: then the smallest of their versions was named.
    """

    named: Version
    version: Version


@dataclass(slots=True)
class Reads:
    """The versions of one chunk that its ranks may still refer to.

    Attributes:
        first: what a rank has that was not answered since this record began.
        kept: the versions before the current one that the store has.
    """

    first: Version
    kept: list[Version] = field(default_factory=list)
    answers: dict[Rank, list[Answer]] = field(default_factory=dict)

    def answered(self, rank: Rank, named: Version, version: Version) -> None:
        """Take note that a rank was sent a version."""
        answers = self.answers.setdefault(rank, [Answer(0, self.first)])
        last = answers[-1]
        if (last.named, last.version) != (named, version):
            answers.append(Answer(named, version))
            del answers[:-MAX_ANSWERS]

    def begin(self, rank: Rank, version: Version) -> None:
        """Take note that a rank which joins begins with a version."""
        self.answers[rank] = [Answer(0, version)]

    def read(self, rank: Rank, named: Version) -> Version:
        """Return the version that a rank had read when it pushed; it never goes back to an earlier one."""
        answers = self.answers.setdefault(rank, [Answer(0, self.first)])
        while len(answers) > 1 and answers[1].named <= named:
            del answers[0]
        return answers[0].version

    def replaced(self, version: Version, by: Version) -> None:
        """Take note that an update was not made: the value has another number now."""
        if self.first == version:
            self.first = by
        for answer in (answer for answers in self.answers.values() for answer in answers):
            if answer.version == version:
                answer.version = by

    def retire(self, ranks: Iterable[Rank], pending: Iterable[Version]) -> list[Version]:
        """Take out the kept versions that nobody refers to any longer, and return them.

        Args:
            ranks: who may still push.
            pending: what pushes that are not applied yet refer to.
        """
        needed = dict.fromkeys(pending)
        for rank in ranks:
            answers = self.answers.get(rank)
            needed.update(dict.fromkeys([self.first] if answers is None else [answer.version for answer in answers]))
        retired = [version for version in self.kept if version not in needed]
        self.kept = [version for version in self.kept if version in needed]
        return retired

    def copy(self) -> Reads:
        """Return the same record for another chunk."""
        answers = {rank: [Answer(a.named, a.version) for a in own] for rank, own in self.answers.items()}
        return Reads(self.first, list(self.kept), answers)
