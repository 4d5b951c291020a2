"""Group-relative advantages: the reward minus the mean of the group (Shao et al. 2024, arXiv:2402.03300)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from rollstream.core.wire import Rollout
from rollstream.orchestrator.credit.base import BranchCredit, rewards_of, scalar_credit

STD_FLOOR = 1e-6
"""Added to the standard deviation, so that a nearly constant group is not blown up."""


def group_advantages(
    rewards: npt.NDArray[np.float64], normalize: Literal["none", "std"] = "none"
) -> npt.NDArray[np.float64]:
    """A = r − mean(r), optionally divided by (population std + 1e-6); f64 [n].

    A group of one and a constant group give exactly 0, whatever rounding the mean suffers.
    """
    if len(rewards) < 2 or rewards.min() == rewards.max():
        return np.zeros(len(rewards), dtype=np.float64)
    centred: npt.NDArray[np.float64] = rewards - rewards.mean(dtype=np.float64)
    return centred / (rewards.std(dtype=np.float64) + STD_FLOOR) if normalize == "std" else centred


class Grpo:
    """One advantage a member, on every token that it sampled."""

    def __init__(self, normalize: Literal["none", "std"] = "none") -> None:
        self._normalize = normalize

    def assign(self, members: Sequence[Rollout]) -> list[list[BranchCredit]]:
        advantages = group_advantages(rewards_of(members), self._normalize)
        return [
            scalar_credit(member.branches, float(advantage))
            for member, advantage in zip(members, advantages, strict=True)
        ]
