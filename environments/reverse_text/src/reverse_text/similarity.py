"""How close an answer is to the reversed phrase."""

from __future__ import annotations


def similarity(answer: str, target: str) -> float:
    """Share of positions that agree, over the longer of the two, in [0, 1]; 1 only for equality.

    Position by position rather than by edit distance: each character then earns its own part of the reward, which
    makes the signal of a group dense.
    """
    length = max(len(answer), len(target))
    if length == 0:
        return 1.0
    return sum(a == b for a, b in zip(answer, target, strict=False)) / length
