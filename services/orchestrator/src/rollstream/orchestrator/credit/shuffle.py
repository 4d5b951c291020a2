"""The control experiment: rewards permuted within their group, so that they say nothing about the tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from rollstream.core.wire import Rollout
from rollstream.orchestrator.credit.base import BranchCredit, CreditAssignment


def shuffled_rewards(members: Sequence[Rollout], seed: int) -> list[Rollout]:
    """The members with their rewards permuted; the permutation depends on ``seed`` and the group's name alone."""
    if not members:
        return []
    key = hashlib.sha256(f"{seed}/{members[0].group}".encode()).digest()
    order = np.random.Generator(np.random.PCG64(int.from_bytes(key[:8], "big"))).permutation(len(members))
    return [
        msgspec.structs.replace(member, reward=members[int(other)].reward)
        for member, other in zip(members, order, strict=True)
    ]


class ShuffledRewards:
    """Any credit assignment, fed with permuted rewards. The rollouts on the bus keep their own."""

    def __init__(self, inner: CreditAssignment, seed: int) -> None:
        self._inner = inner
        self._seed = seed

    def assign(self, members: Sequence[Rollout]) -> list[list[BranchCredit]]:
        return self._inner.assign(shuffled_rewards(members, self._seed))
