"""The loss: three components (rl, ce, ref_kl), one file an rl objective."""

from __future__ import annotations

from rollstream.core.config import DppoLossConfig, IpoLossConfig, LossConfig
from rollstream.trainer.loss.base import MAX_LOG_RATIO, Objective, TokenLoss, mismatch_kl
from rollstream.trainer.loss.components import MicroBatchLoss, TokenStreams, ref_kl, total_loss
from rollstream.trainer.loss.dppo import dppo
from rollstream.trainer.loss.icepop import icepop
from rollstream.trainer.loss.ipo import ipo


def make_objective(config: LossConfig) -> Objective:
    """The objective that the configuration names."""
    if isinstance(config, DppoLossConfig):
        return dppo(config)
    if isinstance(config, IpoLossConfig):
        return ipo(config)
    return icepop(config)


__all__ = [
    "MAX_LOG_RATIO", "MicroBatchLoss", "Objective", "TokenLoss", "TokenStreams", "dppo", "icepop", "ipo",
    "make_objective", "mismatch_kl", "ref_kl", "total_loss",
]
