"""What the objectives of the rl component share.

Notation, per token: ``lt`` the trainer's logprob at the sampling temperature, ``li`` the sampler's,
rho = exp(lt − li), p_t = exp(lt), p_i = exp(li), A the advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are held within ± this before exp: a ratio of e^89 overflows fp32 even at a token nobody counts."""


@dataclass(frozen=True)
class TokenLoss:
    """``values`` f32 [T] with gradient to ``lt``; ``dropped`` bool [T]: tokens whose policy-gradient term is masked."""

    values: Tensor
    dropped: Tensor


Objective = Callable[[Tensor, Tensor, Tensor], TokenLoss]
"""(lt, li, advantages), each f32 [T] and finite → loss of each token."""


def bounded_log_ratio(lt: Tensor, li: Tensor) -> Tensor:
    """log rho within ±20."""
    return torch.clamp(lt - li, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def mismatch_kl(lt: Tensor, li: Tensor) -> Tensor:
    """rho − log rho − 1 of each token: an estimator of KL(sampler ‖ trainer), 0 when they agree."""
    log_ratio = bounded_log_ratio(lt, li)
    return torch.exp(log_ratio) - log_ratio - 1


def masked_policy_gradient(
    lt: Tensor, li: Tensor, advantages: Tensor, dropped: Tensor, *, adv_tau: float, kl_tau: float
) -> TokenLoss:
    """−keep·adv_tau·A·rho + kl_tau·(lt − li)²; a dropped token loses only its first term. rho carries gradient."""
    gradient_term = adv_tau * advantages * torch.exp(bounded_log_ratio(lt, li))
    kept = torch.where(dropped, torch.zeros_like(gradient_term), gradient_term)
    return TokenLoss(kl_tau * (lt - li) ** 2 - kept, dropped)
