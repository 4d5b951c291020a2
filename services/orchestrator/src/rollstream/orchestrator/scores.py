"""Scores over the attempts at a task: means, pass@k and pass^k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb

import numpy as np


def pass_at_k(attempts: int, correct: int, k: int) -> float:
    """Chance that at least one of ``k`` attempts drawn from ``attempts`` is among the ``correct`` ones.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374). Raises ``ValueError`` for k outside 1..attempts.
    """
    _check(attempts, correct, k)
    return 1.0 - comb(attempts - correct, k) / comb(attempts, k)


def pass_hat_k(attempts: int, correct: int, k: int) -> float:
    """Chance that all of ``k`` attempts drawn from ``attempts`` are correct (pass^k)."""
    _check(attempts, correct, k)
    return comb(correct, k) / comb(attempts, k)


def _check(attempts: int, correct: int, k: int) -> None:
    if not (0 <= correct <= attempts and 1 <= k <= attempts):
        raise ValueError(f"no score @{k} for {correct} correct of {attempts} attempts")


def eval_scores(rewards: Mapping[int, Sequence[float]]) -> dict[str, float]:
    """Scores of an eval from the rewards of each task's attempts (tasks without a reward are left out).

    ``reward/mean`` weighs tasks equally, as does ``avg@k`` with k the largest number of attempts at a task.
    ``pass@k`` and ``pass^k`` (k = 1, 2, 4, … attempts) exist only when every reward is 0 or 1.
    """
    tasks = [list(values) for values in rewards.values() if values]
    if not tasks:
        return {}
    mean = float(np.mean([np.mean(values, dtype=np.float64) for values in tasks]))
    scores = {"reward/mean": mean, f"avg@{max(map(len, tasks))}": mean}
    fewest = min(map(len, tasks))
    if fewest < 2 or any(value not in (0.0, 1.0) for values in tasks for value in values):
        return scores
    k = 1
    while k <= fewest:
        counts = [(len(values), int(sum(values))) for values in tasks]
        scores[f"pass@{k}"] = float(np.mean([pass_at_k(n, c, k) for n, c in counts]))
        scores[f"pass^{k}"] = float(np.mean([pass_hat_k(n, c, k) for n, c in counts]))
        k *= 2
    return scores


def solve_rates(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Share of groups whose every (``all``), no (``none``) or some but not every (``some``) reward is 1.

    Groups with a reward other than 0 or 1 give no rates.
    """
    if not groups or any(reward not in (0.0, 1.0) for group in groups for reward in group):
        return {}
    every = sum(all(reward == 1.0 for reward in group) for group in groups) / len(groups)
    none = sum(all(reward == 0.0 for reward in group) for group in groups) / len(groups)
    return {"all": every, "none": none, "some": 1.0 - every - none}
