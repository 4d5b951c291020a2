"""Whether a rollout that came over the bus can be trusted: the bus is open to workers in other languages."""

from __future__ import annotations

import math

import numpy as np

from rollstream.core.wire import Branch, Rollout


def rollout_fault(rollout: Rollout) -> str | None:
    """What is wrong with a (resolved) rollout, or None. An errored rollout needs nothing but its error."""
    if rollout.error is not None:
        return None
    if rollout.reward is None or not math.isfinite(rollout.reward):
        return f"its reward is {rollout.reward}, not a finite number"
    for index, branch in enumerate(rollout.branches):
        fault = _branch_fault(branch)
        if fault is not None:
            return f"branch {index}: {fault}"
    return None


def _branch_fault(branch: Branch) -> str | None:
    try:
        tokens, sampled, logprobs = branch.token_ids.numpy(), branch.sampled.numpy(), branch.logprobs.numpy()
    except (ValueError, TypeError) as error:
        return str(error)
    if tokens.ndim != 1 or tokens.shape != sampled.shape or tokens.shape != logprobs.shape:
        return f"token_ids {tokens.shape}, sampled {sampled.shape} and logprobs {logprobs.shape} differ in shape"
    mask = sampled.astype(bool)
    if branch.temperature <= 0:
        return f"temperature {branch.temperature} is not positive"
    if not np.isfinite(logprobs[mask]).all() or (logprobs[mask] > 1e-3).any():
        return "a sampled token has no valid logprob"
    covered = np.zeros(len(tokens), dtype=np.int64)
    for span in branch.spans:
        if not 0 <= span.start < span.end <= len(tokens):
            return f"version span [{span.start}, {span.end}) lies outside its {len(tokens)} tokens"
        covered[span.start : span.end] += 1
    return None if np.array_equal(covered, mask.astype(np.int64)) else "its version spans are not its sampled tokens"
