"""ipo: like dppo with one threshold for both sides and signs."""

from __future__ import annotations

import torch
from torch import Tensor

from rollstream.core.config import IpoLossConfig
from rollstream.trainer.loss.base import Objective, TokenLoss, masked_policy_gradient


def ipo(config: IpoLossConfig) -> Objective:
    """Drop a token when |p_t − p_i| > eps."""

    def objective(lt: Tensor, li: Tensor, advantages: Tensor) -> TokenLoss:
        dropped = (torch.exp(lt) - torch.exp(li)).abs().detach() > config.eps
        return masked_policy_gradient(lt, li, advantages, dropped, adv_tau=config.adv_tau, kl_tau=config.kl_tau)

    return objective
