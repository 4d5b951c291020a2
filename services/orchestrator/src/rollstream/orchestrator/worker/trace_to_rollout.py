"""A finished verifiers episode as the rollout record that goes on the bus."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from verifiers.v1.episode import Episode as VerifiersEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Branch as TraceBranch
from verifiers.v1.trace import Trace

from rollstream.core.wire import Array, Branch, Episode, Rollout, RolloutError, VersionSpan
from rollstream.orchestrator.worker.answer import PolicySpan
from rollstream.orchestrator.worker.policy_client import Exchange

MESSAGE_LIMIT = 2000
"""Characters of an error's message that a record keeps."""


class MissingEvidence(ValueError):
    """A sampled node of the trace has no record of the version that sampled it."""


@dataclass
class _Evidence:
    """Version spans of the completions of one trace, handed out by the tokens that were sampled."""

    by_tokens: dict[tuple[int, ...], list[tuple[PolicySpan, ...]]] = field(default_factory=dict)
    by_node: dict[int, tuple[PolicySpan, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, exchange: Exchange) -> _Evidence:
        evidence = cls()
        for completion in exchange.completions:
            evidence.by_tokens.setdefault(tuple(completion.token_ids), []).append(completion.spans)
        return evidence

    def spans(self, node: MessageNode, tokens: list[int]) -> tuple[PolicySpan, ...]:
        """Spans of a node's sampled ``tokens``. Equal completions of a trace are told apart by their order."""
        if id(node) not in self.by_node:
            candidates = self.by_tokens.get(tuple(tokens))
            if not candidates:
                raise MissingEvidence(f"{len(tokens)} sampled tokens are none that the policy is known to have sampled")
            self.by_node[id(node)] = candidates.pop(0)
        return self.by_node[id(node)]


def branches_of(trace: Trace, exchange: Exchange) -> list[Branch]:
    """Training branches of a trace: each sampled node is trained in the first branch that it appears in.

    Later branches carry it as context. A branch in which nothing is left to train is dropped.
    Raises :class:`MissingEvidence`.
    """
    evidence = _Evidence.of(exchange)
    trained: set[int] = set()
    trainable = trace.agent.trainable
    branches = [_branch(branch, evidence, trained, exchange.episode, trace, trainable) for branch in trace.branches]
    return [branch for branch in branches if branch.spans]


def _branch(
    branch: TraceBranch, evidence: _Evidence, trained: set[int], episode: Episode, trace: Trace, trainable: bool
) -> Branch:
    token_ids: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    spans: list[VersionSpan] = []
    for node in branch.nodes:
        count = sum(node.mask)
        offset = len(token_ids)
        token_ids += node.token_ids
        if not count or id(node) in trained:
            sampled += [False] * len(node.token_ids)
            logprobs += [0.0] * len(node.token_ids)
            continue
        trained.add(id(node))
        positions = [offset + index for index, flag in enumerate(node.mask) if flag]
        tokens = [token for token, flag in zip(node.token_ids, node.mask, strict=True) if flag]
        if len(node.logprobs) != count or positions[-1] - positions[0] + 1 != count:
            raise MissingEvidence(f"a sampled message holds {count} tokens and {len(node.logprobs)} logprobs")
        sampled += node.mask
        logprobs += [0.0] * (positions[0] - offset) + list(node.logprobs)
        logprobs += [0.0] * (len(token_ids) - len(logprobs))
        spans += [
            VersionSpan(
                timeline=span.timeline,
                version=span.version,
                start=positions[0] + span.start,
                end=positions[0] + span.end,
            )
            for span in evidence.spans(node, tokens)
        ]
    return Branch(
        token_ids=Array.of(np.array(token_ids, dtype="<i4")),
        sampled=Array.of(np.array(sampled, dtype=np.bool_)),
        logprobs=Array.of(np.array(logprobs, dtype="<f4")),
        temperature=episode.sampling.temperature,
        spans=tuple(spans),
        agent=trace.agent.name,
        trainable=trainable and branch.trainable,
    )


def errored_rollout(episode: Episode, worker: str, kind: str, message: str, started: int) -> Rollout:
    """The rollout of an episode that came to nothing; its member takes no part in the group's baseline."""
    return Rollout(
        group=episode.group, member=episode.member, kind=episode.kind, source=episode.source, task=episode.task,
        timeline=episode.timeline, worker=worker, branches=(), reward=None, started=started, finished=time.time_ns(),
        error=RolloutError(kind=kind, message=" ".join(message.split())[:MESSAGE_LIMIT] or kind),
    )


def failure_of(played: VerifiersEpisode) -> tuple[str, str] | None:
    """Kind and message of what failed in an episode, or None."""
    if played.ok:
        return None
    errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
    if not errors:
        return "EpisodeFailed", "the episode ended without a verdict"
    return errors[0].type, errors[0].message


def rollout_of(
    episode: Episode, played: VerifiersEpisode, exchanges: Sequence[Exchange], worker: str, started: int
) -> Rollout:
    """The record of ``played``, whose traces are in the order of ``exchanges``; an errored rollout if it failed.

    The reward is the mean over the traces that train the policy (all, if none does).
    """
    failure = failure_of(played)
    if failure is not None:
        return errored_rollout(episode, worker, *failure, started)
    try:
        branches = [
            branch
            for trace, exchange in zip(played.traces, exchanges, strict=True)
            for branch in branches_of(trace, exchange)
        ]
    except MissingEvidence as error:
        return errored_rollout(episode, worker, type(error).__name__, str(error), started)
    judged = [trace for trace in played.traces if trace.agent.trainable] or played.traces
    last = judged[-1]
    return Rollout(
        group=episode.group, member=episode.member, kind=episode.kind, source=episode.source, task=episode.task,
        timeline=episode.timeline, worker=worker, branches=tuple(branches),
        reward=float(np.mean([trace.reward for trace in judged], dtype=np.float64)),
        reward_parts={name: part.value for name, part in last.rewards.items() if part is not None},
        metrics={name: value for name, value in last.metrics.items() if value is not None},
        stop=last.stop_condition,
        truncated=any(trace.is_truncated for trace in judged),
        turns=sum(trace.num_turns for trace in played.traces),
        started=started,
        finished=time.time_ns(),
        timing={
            "model": sum(exchange.seconds for exchange in exchanges),
            "scoring": sum(trace.timing.scoring.duration for trace in played.traces),
        },
        messages=tuple(message.model_dump(exclude_none=True) for message in last.messages),
    )
