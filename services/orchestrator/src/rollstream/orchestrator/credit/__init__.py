"""Credit assignment: from the rewards of a group to per-token training weights."""

from __future__ import annotations

from rollstream.core.config import OrchestratorConfig
from rollstream.orchestrator.credit.base import BranchCredit, CreditAssignment
from rollstream.orchestrator.credit.grpo import Grpo
from rollstream.orchestrator.credit.shuffle import ShuffledRewards


def credit_assignment(config: OrchestratorConfig) -> CreditAssignment:
    """The credit assignment that the configuration asks for."""
    assignment = Grpo(config.algorithm.normalize)
    return ShuffledRewards(assignment, config.seed) if config.shuffle_rewards else assignment


__all__ = ["BranchCredit", "CreditAssignment", "Grpo", "ShuffledRewards", "credit_assignment"]
