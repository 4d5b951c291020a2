"""Schedules and AdamW against the reference values."""

from __future__ import annotations

import pytest
import torch

from rollstream.core.config import AdamWConfig, ScheduleConfig
from rollstream.trainer.optim import make_optimizer
from rollstream.trainer.schedule import FIRST_FACTOR, lr_factor

LINEAR = ScheduleConfig(type="linear", warmup_steps=3, decay_steps=3)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LINEAR, [1e-8, 0.33333333, 0.66666667, 1, 1, 1, 1, 1, 0.5, 0]),
        (LINEAR.model_copy(update={"min_factor": 0.1}), [0.1, 0.4, 0.7, 1, 1, 1, 1, 1, 0.55, 0.1]),
        (ScheduleConfig(type="linear", decay_steps=4), [1] * 7 + [0.66666667, 0.33333333, 0]),
        (
            ScheduleConfig(type="cosine", warmup_steps=2),
            [1e-8, 0.5, 1, 0.96194, 0.853553, 0.691342, 0.5, 0.308658, 0.146447, 0.03806],
        ),
        (ScheduleConfig(warmup_steps=2), [1e-8, 0.5] + [1] * 8),
    ],
)
def test_learning_rates(schedule: ScheduleConfig, expected: list[float]) -> None:
    assert [lr_factor(schedule, step, 10) for step in range(1, 11)] == pytest.approx(expected, abs=1e-6)


def test_ends_hold() -> None:
    assert lr_factor(LINEAR, 1, 10) == FIRST_FACTOR
    assert lr_factor(LINEAR, 11, 10) == lr_factor(LINEAR, 10, 10) == 0
    assert lr_factor(ScheduleConfig(type="linear", decay_steps=1), 10, 10) == 0


def test_adamw_two_steps() -> None:
    module = torch.nn.Linear(2, 1, bias=False).double()
    module.weight.data = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    optimizer = make_optimizer(AdamWConfig(lr=0.1, weight_decay=0.01), module)
    for gradient, expected in [
        ([0.1, -0.2], [0.89900001, -1.898000005]), ([0.3, 0.4], [0.806322902, -1.932712357]),
    ]:
        module.weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        assert module.weight.tolist()[0] == pytest.approx(expected, abs=1e-9)
