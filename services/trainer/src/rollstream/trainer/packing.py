"""Which samples share a micro-batch, and which rank gets it. Pure: equal lengths give equal plans on every rank.

Best-fit-decreasing bins of at most ``seq_len`` tokens, padded with dummies to equal counts, then divided among the
ranks by the largest differencing method of Karmarkar and Karp with equal cardinality (every rank must run the same
number of forward and backward passes, else collectives deadlock).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollstream.trainer.cost import TOKENS

DUMMY_TOKENS = 2
"""Length of a micro-batch that only keeps a rank in step."""


@dataclass(frozen=True)
class Bin:
    """A micro-batch: indices of its samples and their lengths after the cut. Without samples it is a dummy."""

    samples: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


DUMMY = Bin((), ())


def pack(lengths: Sequence[int], seq_len: int) -> list[Bin]:
    """Best-fit-decreasing bins; a sample longer than ``seq_len`` is cut to it. Every sample lands in one bin."""
    order = sorted(range(len(lengths)), key=lambda index: (-min(lengths[index], seq_len), index))
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, bin), sorted
    for index in order:
        length = min(lengths[index], seq_len)
        fit = next((entry for entry in free if entry[0] >= length), None)
        if fit is None:
            fit = (seq_len, len(bins))
            bins.append([])
        else:
            free.remove(fit)
        room, number = fit
        bins[number].append(index)
        if room > length:
            free.append((room - length, number))
            free.sort()
    return [Bin(tuple(members), tuple(min(lengths[index], seq_len) for index in members)) for members in bins]


@dataclass
class _Part:
    """Items of one rank and their summed cost."""

    total: int
    items: tuple[int, ...]

    def key(self) -> tuple[int, int, tuple[int, ...]]:
        return (self.total, len(self.items), self.items)

    def merged(self, other: _Part) -> _Part:
        return _Part(self.total + other.total, self.items + other.items)


class _Partial:
    """A partial division, parts sorted by cost, dearest first; the one with the largest spread merges first."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self.parts = sorted(parts, key=_Part.key, reverse=True)

    def __lt__(self, other: _Partial) -> bool:
        mine, theirs = self._spread(), other._spread()
        return mine > theirs if mine != theirs else self.parts[0].key() > other.parts[0].key()

    def _spread(self) -> int:
        return self.parts[0].total - self.parts[-1].total

    def merged(self, other: _Partial) -> _Partial:
        """The dearest of one with the cheapest of the other."""
        return _Partial([mine.merged(theirs) for mine, theirs in zip(self.parts, reversed(other.parts), strict=True)])


def partition(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Divide items into ``parts`` lists of equal count and near-equal cost; ``len(costs)`` must be a multiple."""
    if len(costs) % parts:
        raise ValueError(f"{len(costs)} micro-batches cannot be divided evenly among {parts} ranks")
    if not costs:
        return [[] for _ in range(parts)]
    ascending = sorted(range(len(costs)), key=lambda index: (costs[index], index))
    heap = [
        _Partial([_Part(costs[index], (index,)) for index in ascending[start : start + parts]])
        for start in range(0, len(costs), parts)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        heapq.heappush(heap, heapq.heappop(heap).merged(heapq.heappop(heap)))
    return sorted(sorted(part.items) for part in heap[0].parts)


def plan(
    lengths: Sequence[int], seq_len: int, ranks: int, cost: Callable[[Sequence[int]], int] = TOKENS
) -> list[list[Bin]]:
    """Micro-batches of each rank: equal counts (at least one), real samples exactly once, dummies last."""
    bins = pack(lengths, seq_len)
    count = max(1, -(-len(bins) // ranks))
    bins += [DUMMY] * (count * ranks - len(bins))
    shares = partition([cost(entry.lengths) for entry in bins], ranks)
    return [[bins[index] for index in share] for share in shares]
