"""Which task the next group takes: deterministic in the configuration, the seed and the number of groups so far."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class TaskOrder:
    """The tasks of one source, epoch by epoch, each epoch a shuffle of its own.

    The task of a position depends on seed, label and size alone, so a restarted dispatcher draws the same tasks.
    ``size`` None stands for an endless taskset, whose tasks are taken in order.
    """

    label: str
    size: int | None
    seed: int
    _epoch: tuple[int, list[int]] = field(default=(-1, []), init=False, repr=False)

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"source {self.label!r} has no tasks")

    def task(self, position: int) -> int:
        """Task index of the ``position``-th group (0-based) of this source."""
        if self.size is None:
            return position
        epoch, offset = divmod(position, self.size)
        if self._epoch[0] != epoch:
            order = list(range(self.size))
            key = f"{self.seed}/{self.label}/{epoch}".encode()
            random.Random(int.from_bytes(hashlib.sha256(key).digest()[:8], "big")).shuffle(order)
            self._epoch = (epoch, order)
        return self._epoch[1][offset]


def next_source(cursors: Mapping[str, int], ratios: Sequence[tuple[str, float]]) -> str:
    """The source furthest behind its share; earlier in the list wins a tie.

    ``cursors`` counts the groups created so far, so the order of sources is a function of the cursors alone.
    """
    if not ratios:
        raise ValueError("no training source")
    return min(ratios, key=lambda entry: (cursors.get(entry[0], 0) + 1) / entry[1])[0]
