"""From finished groups to the content of a batch: pure, so that the same groups always make the same batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollstream.core.telemetry import names
from rollstream.core.wire import Array, Sample
from rollstream.orchestrator.credit import BranchCredit, CreditAssignment
from rollstream.orchestrator.groups import GroupInProgress, Received
from rollstream.orchestrator.pacing import staleness
from rollstream.orchestrator.scores import solve_rates


@dataclass(frozen=True)
class BatchContent:
    """What batch ``step`` holds: samples to train, subjects decided without training, metrics."""

    step: int
    samples: tuple[Sample, ...]
    rejected: tuple[str, ...]
    metrics: dict[str, float]


@dataclass(frozen=True)
class _Credited:
    member: Received
    credits: list[BranchCredit]

    def samples(self, *, only_trained: bool) -> list[Sample]:
        """One sample a trainable branch with sampled tokens; with ``only_trained`` those that move a token."""
        return [
            _sample(self.member, index, credit)
            for index, (branch, credit) in enumerate(zip(self.member.rollout.branches, self.credits, strict=True))
            if branch.trainable and branch.spans and (credit.trains or not only_trained)
        ]


def build_batch(
    step: int,
    groups: Sequence[GroupInProgress],
    credit_of: Callable[[str], CreditAssignment],
    *,
    prune_zero_advantage: bool = True,
) -> BatchContent:
    """Assign credit to ``groups`` and lay out batch ``step``.

    Samples that move no token are pruned on request, yet their groups count; a batch in which nothing at all would
    move keeps its samples, because the chain goes on. Every member of every group ends up either in ``samples`` or in
    ``rejected``, so no rollout of these groups can be used again. ``credit_of`` maps a source to its assignment.
    """
    credited: list[_Credited] = []
    for group in groups:
        usable = group.usable
        credits = credit_of(group.group.source).assign([member.rollout for member in usable])
        credited += [_Credited(member, credit) for member, credit in zip(usable, credits, strict=True)]
    pruned = {entry.member.subject: entry.samples(only_trained=prune_zero_advantage) for entry in credited}
    if not any(pruned.values()):
        pruned = {entry.member.subject: entry.samples(only_trained=False) for entry in credited}
    decided = [member.subject for group in groups for _, member in sorted(group.members.items())]
    return BatchContent(
        step=step,
        samples=tuple(sample for samples in pruned.values() for sample in samples),
        rejected=tuple(subject for subject in decided if not pruned.get(subject)),
        metrics=batch_metrics(step, groups, trained={subject for subject, samples in pruned.items() if samples}),
    )


def _sample(member: Received, index: int, credit: BranchCredit) -> Sample:
    def optional(stream: npt.NDArray[np.float32] | None) -> Array | None:
        return None if stream is None else Array.of(stream, "<f4")

    return Sample(
        subject=member.subject,
        digest=member.digest,
        branch=index,
        advantages=Array.of(credit.advantages, "<f4"),
        rl_weights=optional(credit.rl_weights),
        ce_weights=optional(credit.ce_weights),
        ref_kl_weights=optional(credit.ref_kl_weights),
        ref_logprobs=optional(credit.ref_logprobs),
    )


def batch_metrics(step: int, groups: Sequence[GroupInProgress], trained: set[str]) -> dict[str, float]:
    """Metrics of batch ``step``: rewards, errors, lengths, staleness; names as ``metrics`` declares them."""
    usable = [member for group in groups for member in group.usable]
    everything = [member for group in groups for member in group.members.values()]
    values: dict[str, float] = {
        names.BATCH_GROUPS: float(len(groups)),
        names.BATCH_ROLLOUTS: float(len(everything)),
        names.BATCH_TRAINED: float(len(trained)),
        names.BATCH_ERRORED: _share(sum(member.rollout.error is not None for member in everything), len(everything)),
        names.BATCH_TRUNCATED: _share(sum(member.rollout.truncated for member in usable), len(usable)),
        names.BATCH_ZERO_ADVANTAGE: _share(len(usable) - len(trained), len(usable)),
    }
    if not usable:
        return values
    rewards = np.array([member.rollout.reward for member in usable], dtype=np.float64)
    values |= names.summary(names.REWARD_EFFECTIVE, rewards)
    for source in sorted({group.group.source for group in groups}):
        of_source = [
            member.rollout.reward or 0.0 for group in groups if group.group.source == source for member in group.usable
        ]
        if of_source:
            values[names.reward_of_source(source)] = float(np.mean(of_source, dtype=np.float64))
    sampled = np.array([_sampled_tokens(member) for member in usable], dtype=np.float64)
    values |= names.summary(names.OUTPUT_TOKENS, sampled)
    lags = [staleness(step, oldest) for member in usable if (oldest := member.oldest) is not None]
    if lags:
        values[names.OFF_POLICY_MEAN] = float(np.mean(lags))
        values[names.OFF_POLICY_MAX] = float(max(lags))
        values[names.OFF_POLICY_IN_FLIGHT] = float(
            np.mean([(member.newest or 0) - (member.oldest or 0) for member in usable])
        )
    seconds = [(member.rollout.finished - member.rollout.started) / 1e9 for member in usable]
    values[names.EPISODE_SECONDS] = float(np.mean(seconds))
    rates = solve_rates([[float(member.rollout.reward or 0.0) for member in group.usable] for group in groups])
    values |= {names.solve_rate(kind): rate for kind, rate in rates.items()}
    return values


def _share(count: int, total: int) -> float:
    return count / total if total else 0.0


def _sampled_tokens(member: Received) -> int:
    return sum(span.end - span.start for branch in member.rollout.branches for span in branch.spans)
