"""Logprobs and entropies of tokens, aligned to the token they describe.

The model's output at position i predicts token i + 1: labels are inputs shifted left, results are shifted right
afterwards. Logits are divided by the sampling temperature before the log-softmax.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 26
"""Logits (tokens × vocabulary) that may exist at once in fp32: 256 MiB."""


def shift_left(values: Tensor, fill: float | int) -> Tensor:
    """[1, 2, 3] → [2, 3, fill] along the last dimension."""
    return torch.cat([values[..., 1:], torch.full_like(values[..., :1], fill)], dim=-1)


def shift_right(values: Tensor, fill: float | int) -> Tensor:
    """[1, 2, 3] → [fill, 1, 2] along the last dimension."""
    return torch.cat([torch.full_like(values[..., :1], fill), values[..., :-1]], dim=-1)


def score(logits: Tensor, labels: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Logprob of each label and entropy of each distribution.

    logits [T, V] any float, labels i64 [T], temperature f32 [T] → both f32 [T]; entropy carries no gradient.
    """
    scaled = logits.float() / temperature.unsqueeze(-1)
    normaliser = torch.logsumexp(scaled, dim=-1)
    logprobs = scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - normaliser
    with torch.no_grad():
        distribution = (scaled - normaliser.unsqueeze(-1)).exp_()
        # 0 · −inf would be NaN where a model masks logits: such a token has no share in the entropy.
        surprise = torch.where(distribution > 0, distribution * scaled, torch.zeros_like(scaled)).sum(-1)
        entropy = normaliser.detach() - surprise
    return logprobs, entropy


def token_scores(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    token_ids: Tensor,
    temperature: Tensor,
    *,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Logprob and entropy of each token of a packed row, f32 [T]; 0 at position 0.

    hidden [T, H], ``head`` maps hidden states to logits [·, V], token_ids i64 [T], temperature f32 [T] (one value
    a document). The full [T, V] logits never exist when T exceeds ``chunk_tokens``: chunks are computed again in the
    backward pass. The first token of a document gets the score its neighbour's last state gives it: never use it.
    """
    labels = shift_left(token_ids, 0)
    length = len(token_ids)
    if length <= chunk_tokens:
        logprobs, entropy = score(head(hidden), labels, temperature)
    else:
        parts = [
            checkpoint(
                lambda states, targets, heat: score(head(states), targets, heat),
                hidden[start : start + chunk_tokens],
                labels[start : start + chunk_tokens],
                temperature[start : start + chunk_tokens],
                use_reentrant=False,
            )
            for start in range(0, length, chunk_tokens)
        ]
        logprobs = torch.cat([part[0] for part in parts])
        entropy = torch.cat([part[1] for part in parts])
    return shift_right(logprobs, 0.0), shift_right(entropy, 0.0)
