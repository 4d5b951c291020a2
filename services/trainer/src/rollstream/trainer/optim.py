"""The optimiser."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW

from rollstream.core.config import AdamWConfig


def make_optimizer(config: AdamWConfig, module: nn.Module) -> AdamW:
    """AdamW over all parameters; the learning rate is set anew before each step by the schedule."""
    return AdamW(
        module.parameters(), lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
