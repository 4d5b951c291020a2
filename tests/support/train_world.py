"""For torchrun (-m support.train_world): a few steps, then rank 0 saves weights and measurements to a file."""

from __future__ import annotations

import dataclasses
import sys

import torch

from rollstream.core.config import AdamWConfig, DppoLossConfig, ModelConfig, ScheduleConfig
from rollstream.trainer.model import Policy
from rollstream.trainer.ranks import Ranks
from rollstream.trainer.state import full_state
from rollstream.trainer.step import TrainStep
from support.train_samples import make_samples


def main(model: str, out: str, count: int) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.join(60.0)
    policy = Policy.load(ModelConfig(name=model)).shard(ranks)
    step = TrainStep(
        policy, ranks, seq_len=64, loss=DppoLossConfig(), optim=AdamWConfig(lr=1e-3),
        schedule=ScheduleConfig(), max_steps=3,
    )
    results = [dataclasses.asdict(step.fit(number, make_samples(count, seed=number))) for number in (1, 2, 3)]
    weights = full_state(policy, sharded=ranks.world > 1)
    if ranks.is_lead:
        torch.save({"weights": weights, "results": results}, out)
    ranks.leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
