"""icepop: importance-weighted policy gradient; a ratio outside the band counts as zero."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollstream.core.config import IcepopLossConfig
from rollstream.trainer.loss.base import Objective, TokenLoss, bounded_log_ratio


def icepop(config: IcepopLossConfig) -> Objective:
    """−A·rho if ratio_low ≤ rho ≤ ratio_high, else 0; the band is tested in log space."""
    low, high = math.log(config.ratio_low), math.log(config.ratio_high)

    def objective(lt: Tensor, li: Tensor, advantages: Tensor) -> TokenLoss:
        log_ratio = bounded_log_ratio(lt, li)
        dropped = ((log_ratio < low) | (log_ratio > high)).detach()
        weighted = -advantages * torch.exp(log_ratio)
        return TokenLoss(torch.where(dropped, torch.zeros_like(weighted), weighted), dropped)

    return objective
