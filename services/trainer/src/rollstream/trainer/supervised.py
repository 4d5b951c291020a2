"""Supervised warm-up through the same step as RL: samples with ce weights, no bus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from rollstream.core.config import AdamWConfig, DppoLossConfig, ModelConfig, ScheduleConfig
from rollstream.trainer.model import Policy
from rollstream.trainer.ranks import Ranks
from rollstream.trainer.samples import TrainSample
from rollstream.trainer.step import StepResult, TrainStep


def fit(
    model_dir: Path,
    samples: Sequence[TrainSample],
    *,
    steps: int,
    batch_size: int,
    optim: AdamWConfig,
    schedule: ScheduleConfig | None = None,
    seq_len: int = 2048,
    seed: int = 0,
    save_to: Path | None = None,
    on_step: Callable[[int, StepResult], bool] | None = None,
) -> Policy:
    """Train the model in ``model_dir`` on ``samples`` (see :meth:`TrainSample.supervised`) for ``steps`` steps.

    Each epoch is a new seeded order. ``on_step(step, result)`` may return True to stop early. The result is saved as
    a HF model directory to ``save_to`` when given (tokenizer files are not copied). One process, CPU or the first GPU.
    """
    if not samples:
        raise ValueError("supervised training needs at least one sample")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    policy = Policy.load(ModelConfig(name=str(model_dir)), device)
    step = TrainStep(
        policy, Ranks.alone(device), seq_len=seq_len, loss=DppoLossConfig(), optim=optim,
        schedule=schedule or ScheduleConfig(), max_steps=steps,
    )
    order = _endless_order(len(samples), seed)
    for number in range(1, steps + 1):
        result = step.fit(number, [samples[next(order)] for _ in range(batch_size)])
        if on_step is not None and on_step(number, result):
            break
    if save_to is not None:
        policy.hf.save_pretrained(save_to)
    return policy


def _endless_order(count: int, seed: int) -> Iterator[int]:
    generator = np.random.default_rng(seed)
    while True:
        yield from generator.permutation(count).tolist()
