"""Everything of a rank that touches torch: model, step, checkpoints, weights. Called from the compute thread."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollstream.core.config import TrainerConfig
from rollstream.core.run import RunDir
from rollstream.trainer import determinism
from rollstream.trainer.checkpoint import CheckpointManifest, Checkpoints, Found
from rollstream.trainer.model import Policy
from rollstream.trainer.packing import Bin
from rollstream.trainer.ranks import Ranks
from rollstream.trainer.samples import TrainSample
from rollstream.trainer.state import full_state
from rollstream.trainer.step import StepResult, TrainStep
from rollstream.trainer.weights import WeightFiles, Written


@dataclass(frozen=True)
class Position:
    """Where training stands: after ``step`` on ``timeline``; ``commit`` is the digest of that batch ("" for none)."""

    step: int
    timeline: int
    commit: str = ""


class Engine:
    """One rank's model and optimiser between two steps.

    Every method but the constructor's helpers is a collective: all ranks call it with equal arguments.
    """

    def __init__(self, config: TrainerConfig, ranks: Ranks, run: RunDir, found: Found | None) -> None:
        """Load the base model, shard it, and take the checkpoint ``found`` when there is one."""
        self.config = config
        self.ranks = ranks
        self.policy = Policy.load(config.model, ranks.device).shard(ranks)
        self.step = TrainStep(
            self.policy, ranks, seq_len=config.seq_len, loss=config.loss, optim=config.optim, schedule=config.schedule,
            max_steps=config.max_steps,
        )
        self._checkpoints = Checkpoints(run.checkpoints, ranks, config.ckpt.keep_last if config.ckpt else 1)
        self._weights = WeightFiles(run, config.weights.keep_last)
        if found is not None:
            self._checkpoints.load(found, self.policy, self.step.optimizer)

    def bins(self, lengths: Sequence[int]) -> list[Bin]:
        """This rank's micro-batches."""
        return self.step.mine(lengths)

    def train(self, step: int, bins: Sequence[Bin], samples: Mapping[int, TrainSample]) -> StepResult:
        """One optimiser step; see :meth:`TrainStep.run`."""
        return self.step.run(step, bins, samples)

    def write_weights(self, timeline: int, version: int) -> Written | None:
        """Write v{version}; what was written on rank 0, None elsewhere."""
        state = full_state(self.policy, sharded=self.ranks.world > 1)
        if not self.ranks.is_lead:
            return None
        described = self.policy.hf.config if version == 0 else None
        return self._weights.write(timeline, version, state, described, environment(self.config, self.ranks))

    def save_checkpoint(self, position: Position, weights: str, orchestrator: bytes) -> Path:
        """A checkpoint of ``position``; ``weights`` is the content digest of that version (read on rank 0)."""
        manifest = CheckpointManifest(
            step=position.step, timeline=position.timeline, commit=position.commit, weights=weights,
            config_digest=config_digest(self.config), world=self.ranks.world,
            environment=environment(self.config, self.ranks),
        )
        return self._checkpoints.save(self.policy, self.step.optimizer, manifest, orchestrator)


def environment(config: TrainerConfig, ranks: Ranks) -> dict[str, str | int]:
    """What a replay must have equal."""
    return {**determinism.environment(), "world": ranks.world}


def config_digest(config: TrainerConfig) -> str:
    """sha256 of what decides the numbers: model, loss, optimiser, schedule, packing, seed."""
    deciding = config.model_dump(
        mode="json", include={"model", "max_steps", "seq_len", "seed", "loss", "optim", "schedule"}
    )
    return hashlib.sha256(msgspec.json.encode(deciding, order="sorted")).hexdigest()
