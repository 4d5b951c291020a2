"""dppo: the token mask looks at how far the token's probability moved, on the side the advantage pushes to."""

from __future__ import annotations

import torch
from torch import Tensor

from rollstream.core.config import DppoLossConfig
from rollstream.trainer.loss.base import Objective, TokenLoss, masked_policy_gradient


def dppo(config: DppoLossConfig) -> Objective:
    """Drop a token with A > 0 when p_t − p_i > mask_high, with A ≤ 0 when p_t − p_i < −mask_low."""

    def objective(lt: Tensor, li: Tensor, advantages: Tensor) -> TokenLoss:
        moved = (torch.exp(lt) - torch.exp(li)).detach()
        dropped = torch.where(advantages > 0, moved > config.mask_high, moved < -config.mask_low)
        return masked_policy_gradient(lt, li, advantages, dropped, adv_tau=config.adv_tau, kl_tau=config.kl_tau)

    return objective
