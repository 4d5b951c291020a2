"""What every credit assignment offers: from the rewards of a group to weights on tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rollstream.core.wire import Branch, Rollout


@dataclass(frozen=True)
class BranchCredit:
    """Credit of one branch with T tokens: advantages f32 [T], optional weight streams f32 [T].

    ``rl_weights`` None stands for 1 on every sampled token, the other streams None for 0.
    """

    advantages: npt.NDArray[np.float32]
    rl_weights: npt.NDArray[np.float32] | None = None
    ce_weights: npt.NDArray[np.float32] | None = None
    ref_kl_weights: npt.NDArray[np.float32] | None = None
    ref_logprobs: npt.NDArray[np.float32] | None = None

    @property
    def trains(self) -> bool:
        """Whether a token of the branch is moved at all."""
        streams = (self.advantages, self.ce_weights, self.ref_kl_weights)
        return any(stream is not None and bool(np.any(stream)) for stream in streams)


class CreditAssignment(Protocol):
    """Assigns credit to the usable members of one group."""

    def assign(self, members: Sequence[Rollout]) -> list[list[BranchCredit]]:
        """Credit for each branch of each member; ``members`` have no error, a reward and a sampled token."""
        ...


def rewards_of(members: Sequence[Rollout]) -> npt.NDArray[np.float64]:
    """Rewards f64 [len(members)]; raises ``ValueError`` for a member without a finite one."""
    for member in members:
        if member.reward is None or not np.isfinite(member.reward):
            raise ValueError(f"{member.group}/{member.member} has no finite reward: {member.reward}")
    return np.array([member.reward for member in members], dtype=np.float64)


def spread_scalar(value: float, sampled: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """``value`` on every sampled token, exactly 0 elsewhere; f32 [T]."""
    return np.where(sampled, np.float32(value), np.float32(0.0)).astype(np.float32)


def spread_values(values: npt.ArrayLike, sampled: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """One value per sampled token, laid onto the sampled positions; f32 [T].

    Raises ``ValueError`` unless there are exactly as many values as sampled tokens.
    """
    flat = np.asarray(values, dtype=np.float32).reshape(-1)
    count = int(np.count_nonzero(sampled))
    if len(flat) != count:
        raise ValueError(f"{len(flat)} token advantages for {count} sampled tokens")
    spread = np.zeros(len(sampled), dtype=np.float32)
    spread[sampled] = flat
    return spread


def scalar_credit(branches: Sequence[Branch], value: float) -> list[BranchCredit]:
    """The same advantage on every sampled token of every trainable branch, 0 on the others."""
    return [
        BranchCredit(spread_scalar(value if branch.trainable else 0.0, branch.sampled.numpy().astype(bool)))
        for branch in branches
    ]
