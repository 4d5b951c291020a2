"""The whole loss of a micro-batch: Σ l_rl/N_rl + Σ l_ce/N_ce + Σ l_ref/N_ref.

N counts a component's tokens over all micro-batches and ranks, so that how samples were packed changes nothing.
A token is in a component iff its weight is not 0 (rl: and it was sampled); a weight multiplies l, not N. Tokens are
selected with ``where``: multiplying with a mask would let 0·NaN through.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollstream.trainer.loss.base import Objective, TokenLoss, bounded_log_ratio, mismatch_kl

REF_KL_MASK_LOW = 0.2
REF_KL_TAU = 1e-3


@dataclass(frozen=True)
class TokenStreams:
    """Tensors [T] of one micro-batch, aligned to the token they describe. Masks of tokens that cannot be predicted
    (the first of a document, padding) are already taken out of the weights."""

    inference_logprobs: Tensor
    advantages: Tensor
    sampled: Tensor
    rl_weights: Tensor
    ce_weights: Tensor
    ref_kl_weights: Tensor
    ref_logprobs: Tensor

    @property
    def rl(self) -> Tensor:
        return (self.rl_weights != 0) & self.sampled

    @property
    def ce(self) -> Tensor:
        return self.ce_weights != 0

    @property
    def ref_kl(self) -> Tensor:
        return self.ref_kl_weights != 0

    def counts(self) -> Tensor:
        """Tokens of (rl, ce, ref_kl), f64 [3]."""
        return torch.stack([self.rl.sum(), self.ce.sum(), self.ref_kl.sum()]).double()


@dataclass(frozen=True)
class MicroBatchLoss:
    """``total`` scalar to call backward on; ``sums`` named sums over tokens (detached, f64) for the metrics."""

    total: Tensor
    sums: dict[str, Tensor]


def ref_kl(lt: Tensor, li: Tensor, ref: Tensor) -> TokenLoss:
    """−keep·sg(ref − lt)·rho + 1e-3·(lt − li)², the first term dropped if p_t − p_i < −0.2."""
    dropped = (torch.exp(lt) - torch.exp(li)).detach() < -REF_KL_MASK_LOW
    pull = (ref - lt).detach() * torch.exp(bounded_log_ratio(lt, li))
    return TokenLoss(REF_KL_TAU * (lt - li) ** 2 - torch.where(dropped, torch.zeros_like(pull), pull), dropped)


def total_loss(
    lt: Tensor, entropy: Tensor, streams: TokenStreams, counts: Tensor, objective: Objective
) -> MicroBatchLoss:
    """Loss of a micro-batch from the trainer's logprobs ``lt`` and entropies (both [T]).

    ``counts`` f64 [3] are the global token counts of (rl, ce, ref_kl); each divides by at least 1. With every
    component empty the loss is 0 and still has a (zero) gradient.
    """
    in_rl, in_ce, in_ref = streams.rl, streams.ce, streams.ref_kl
    divisors = counts.clamp(min=1).to(device=lt.device, dtype=torch.float32)

    rl = _rl(lt, streams, in_rl, objective)
    ce = _select(in_ce, streams.ce_weights * -_select(in_ce, lt))
    distant = ref_kl(
        _select(in_ref, lt), _select(in_ref, streams.inference_logprobs), _select(in_ref, streams.ref_logprobs)
    )
    ref = _select(in_ref, streams.ref_kl_weights * distant.values)
    parts = rl.values.sum() / divisors[0], ce.sum() / divisors[1], ref.sum() / divisors[2]
    total = parts[0] + parts[1] + parts[2]

    with torch.no_grad():
        compared = in_rl | in_ref
        trained = compared | in_ce
        kl = mismatch_kl(_select(compared, lt), _select(compared, streams.inference_logprobs))
        sums = {
            "loss_rl": parts[0], "loss_ce": parts[1], "loss_ref_kl": parts[2],
            "compared": compared.sum(), "trained": trained.sum(), "dropped": (rl.dropped & in_rl).sum(),
            "mismatch_kl": _select(compared, kl).double().sum(), "entropy": _select(trained, entropy).double().sum(),
        }
    return MicroBatchLoss(total, {name: value.detach().double() for name, value in sums.items()})


def _rl(lt: Tensor, streams: TokenStreams, chosen: Tensor, objective: Objective) -> TokenLoss:
    # Inputs are selected before the maths too: a NaN gradient survives a where that comes only afterwards.
    tokens = objective(
        _select(chosen, lt), _select(chosen, streams.inference_logprobs), _select(chosen, streams.advantages)
    )
    return TokenLoss(_select(chosen, streams.rl_weights * tokens.values), tokens.dropped)


def _select(chosen: Tensor, values: Tensor) -> Tensor:
    return torch.where(chosen, values, torch.zeros_like(values))
