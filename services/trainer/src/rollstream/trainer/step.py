"""One optimiser step over a batch of samples: the heart of the trainer, usable without a bus."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rollstream.core.config import AdamWConfig, LossConfig, ScheduleConfig
from rollstream.core.errors import EXIT_USAGE, RollstreamError
from rollstream.trainer.loss import make_objective, total_loss
from rollstream.trainer.micro_batch import MicroBatch, build
from rollstream.trainer.model import Policy
from rollstream.trainer.optim import make_optimizer
from rollstream.trainer.packing import Bin, plan
from rollstream.trainer.ranks import Ranks
from rollstream.trainer.samples import TrainSample
from rollstream.trainer.schedule import lr_factor


class NonFinite(RollstreamError):
    """A loss or a gradient norm is not finite: nothing was updated or published. Names the samples."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True)
class StepResult:
    """What one step measured, over all ranks. Means are over the tokens in a loss component."""

    loss: float
    loss_rl: float
    loss_ce: float
    loss_ref_kl: float
    grad_norm: float
    lr: float
    mismatch_kl: float
    entropy: float
    dropped: float
    tokens: int
    trained_tokens: int
    micro_batches: int
    seconds: float


@dataclass(frozen=True)
class _Scored:
    batch: MicroBatch
    loss: Tensor
    logprobs: Tensor


class TrainStep:
    """Packs, runs forward and backward, normalises over all micro-batches and ranks, clips, and steps.

    Lifecycle: built once on every rank from the same configuration; :meth:`run` is called on every rank with the
    same step. After an exception the object must not be used again: gradients may be half accumulated.
    """

    def __init__(
        self, policy: Policy, ranks: Ranks, *, seq_len: int, loss: LossConfig, optim: AdamWConfig,
        schedule: ScheduleConfig, max_steps: int,
    ) -> None:
        self.policy = policy
        self.optimizer = make_optimizer(optim, policy)
        self._ranks = ranks
        self._seq_len = seq_len
        self._objective = make_objective(loss)
        self._optim = optim
        self._schedule = schedule
        self._max_steps = max_steps

    def plan(self, lengths: Sequence[int]) -> list[list[Bin]]:
        """The micro-batches of every rank for samples of these lengths; the same on all ranks."""
        return plan(lengths, self._seq_len, self._ranks.world, self.policy.cost)

    def mine(self, lengths: Sequence[int]) -> list[Bin]:
        """This rank's share of :meth:`plan`."""
        return self.plan(lengths)[self._ranks.rank]

    def fit(self, step: int, samples: Sequence[TrainSample]) -> StepResult:
        """Train on samples that every rank holds in full."""
        return self.run(step, self.mine([len(sample) for sample in samples]), dict(enumerate(samples)))

    def run(self, step: int, bins: Sequence[Bin], samples: Mapping[int, TrainSample]) -> StepResult:
        """Train step ``step`` (1-indexed) on this rank's ``bins``; ``samples`` holds at least their indices.

        Raises :class:`NonFinite` before anything is updated.
        """
        started = time.perf_counter()
        lr = self._optim.lr * lr_factor(self._schedule, step, self._max_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batches = [build(entry, samples, self._ranks.device) for entry in bins]
        counts = self._ranks.sum(torch.stack([batch.streams.counts().cpu() for batch in batches]).sum(0))
        scored, sums = self._accumulate(batches, counts)
        self._refuse_non_finite_loss(step, scored)
        norm = self._clipped_norm(step, batches)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self._result(sums, batches, norm, lr, started)

    def _accumulate(self, batches: Sequence[MicroBatch], counts: Tensor) -> tuple[list[_Scored], dict[str, Tensor]]:
        scored: list[_Scored] = []
        sums: dict[str, Tensor] = {}
        for batch in batches:
            logprobs, entropy = self.policy(batch)
            result = total_loss(logprobs, entropy, batch.streams, counts, self._objective)
            result.total.backward()  # type: ignore[no-untyped-call]
            scored.append(_Scored(batch, result.total.detach(), logprobs.detach()))
            for name, value in result.sums.items():
                sums[name] = sums[name] + value if name in sums else value
        sums["loss"] = torch.stack([entry.loss for entry in scored]).double().sum()
        return scored, sums

    def _refuse_non_finite_loss(self, step: int, scored: Sequence[_Scored]) -> None:
        # A rank that raises ends, and torchrun ends the others: no rank goes on to publish.
        for entry in scored:
            if not torch.isfinite(entry.loss):
                raise NonFinite(
                    f"step {step}: the loss of a micro-batch is {entry.loss.item()}; suspect samples: "
                    f"{_listed(_suspects(entry))}. Nothing was updated",
                    hint="look at these rollouts, lower optim.lr, or resume from an earlier checkpoint",
                )

    def _clipped_norm(self, step: int, batches: Sequence[MicroBatch]) -> float:
        parameters = [parameter for parameter in self.policy.parameters() if parameter.grad is not None]
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        value = float(norm)
        if not torch.isfinite(norm):
            names = [name for batch in batches for name in batch.names]
            raise NonFinite(
                f"step {step}: the gradient norm is {value}; samples of this rank: {_listed(names)}. "
                "Nothing was updated",
                hint="lower optim.lr, or resume from an earlier checkpoint",
            )
        if self._optim.max_norm is not None:
            clip_grads_with_norm_(parameters, self._optim.max_norm, norm)
        return value

    def _result(
        self, sums: dict[str, Tensor], batches: Sequence[MicroBatch], norm: float, lr: float, started: float
    ) -> StepResult:
        names = sorted(sums)
        mine = torch.stack([*(sums[name].cpu() for name in names), torch.tensor(float(sum(b.tokens for b in batches)))])
        total = self._ranks.sum(mine.double())
        values = dict(zip([*names, "tokens"], total.tolist(), strict=True))
        return StepResult(
            loss=values["loss"],
            loss_rl=values["loss_rl"],
            loss_ce=values["loss_ce"],
            loss_ref_kl=values["loss_ref_kl"],
            grad_norm=norm,
            lr=lr,
            mismatch_kl=values["mismatch_kl"] / max(1.0, values["compared"]),
            entropy=values["entropy"] / max(1.0, values["trained"]),
            dropped=values["dropped"] / max(1.0, values["compared"]),
            tokens=int(values["tokens"]),
            trained_tokens=int(values["trained"]),
            micro_batches=len(batches) * self._ranks.world,
            seconds=time.perf_counter() - started,
        )


def _suspects(entry: _Scored) -> list[str]:
    """Samples with a logprob that is not finite; all of the micro-batch when every one is."""
    bounds = entry.batch.documents.boundaries.tolist()
    finite = torch.isfinite(entry.logprobs).tolist()
    found = [
        name
        for name, start, end in zip(entry.batch.names, bounds, bounds[1:], strict=False)
        if not all(finite[start + 1 : end])
    ]
    return found or list(entry.batch.names)


def _listed(names: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
