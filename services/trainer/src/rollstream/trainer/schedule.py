"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math

from rollstream.core.config import ScheduleConfig

FIRST_FACTOR = 1e-8
"""What a warm-up from zero starts at: a rate of exactly zero would leave the optimiser's moments without meaning."""


def lr_factor(schedule: ScheduleConfig, step: int, max_steps: int) -> float:
    """Factor of the base rate in training step ``step`` (1-indexed) of ``max_steps``; past the end as in the last.

    linear: up over ``warmup_steps``, flat, down over ``decay_steps`` so that the last step is at ``min_factor``.
    cosine: up, then half a cosine over the rest. constant: up, then flat.
    """
    index = min(step, max_steps) - 1
    floor = schedule.min_factor
    if index < schedule.warmup_steps:
        return max(floor + (1 - floor) * index / schedule.warmup_steps, FIRST_FACTOR)
    if schedule.type == "cosine":
        progress = (index - schedule.warmup_steps) / max(1, max_steps - schedule.warmup_steps)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule.type == "linear":
        into_decay = index - (max_steps - schedule.decay_steps)
        if into_decay >= 0 and schedule.decay_steps > 0:
            progress = into_decay / (schedule.decay_steps - 1) if schedule.decay_steps > 1 else 1.0
            return 1 - (1 - floor) * progress
    return 1.0
