"""Configuration of the orchestrator and of the env workers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_config import BaseConfig

from rollstream.core.config.common import (
    ComponentConfig,
    ModelConfig,
    MonitorsConfig,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SamplingConfig,
)


class SourceConfig(BaseConfig):
    """One verifiers taskset that episodes come from."""

    id: str
    """verifiers taskset id (an importable environment)."""

    name: str | None = None
    """Name in metrics and subjects; the id when not set."""

    args: dict[str, Any] = {}
    """Fields of the taskset's own config."""

    sampling: SamplingConfig | None = None
    """Sampling of this source; the orchestrator's when not set."""

    @property
    def label(self) -> str:
        """The name in metrics and subjects."""
        return self.name or self.id


class TrainSourceConfig(SourceConfig):
    """A source of training episodes."""

    ratio: PositiveFloat = 1.0
    """Share of the groups, relative to the other sources."""

    group_size: PositiveInt | None = None
    """Episodes a group; the orchestrator's when not set."""


class EvalSourceConfig(SourceConfig):
    """A source of held-out episodes."""

    num_tasks: PositiveInt = 32
    """Tasks an eval takes, from the start of the split."""

    rollouts_per_task: PositiveInt = 1
    """Episodes a task."""

    interval: PositiveInt = 50
    """Steps between evals; the base model and the last version are always evaluated."""


class GrpoConfig(BaseConfig):
    """Group-relative advantage: reward minus the group's mean."""

    type: Literal["grpo"] = "grpo"
    """Selects this credit assignment."""

    normalize: Literal["none", "std"] = "none"
    """Divide by the group's standard deviation (float64, floored)."""


AlgorithmConfig = Annotated[GrpoConfig, Field()]


class EnvWorkerPoolConfig(BaseConfig):
    """How the env workers run."""

    count: PositiveInt = 1
    """Worker processes that the local launcher starts."""

    concurrency: PositiveInt = 64
    """Episodes that one worker runs at once."""

    lease_seconds: PositiveFloat = 30.0
    """A lease without a heartbeat for this long is given to another worker."""

    max_deliveries: PositiveInt = 5
    """Deliveries after which an episode is published as errored."""

    episode_timeout: PositiveFloat = 600.0
    """Seconds that one episode may take."""


class OrchestratorConfig(ComponentConfig):
    """The orchestrator: dispatches groups, assigns credit, commits batches."""

    model: ModelConfig = ModelConfig()
    """Policy model (its tokenizer renders the episodes)."""

    max_steps: PositiveInt = 100
    """Steps of the run."""

    seq_len: PositiveInt = 2048
    """Longest sample in tokens."""

    train: list[TrainSourceConfig] = []
    """Training sources."""

    eval: list[EvalSourceConfig] = []
    """Held-out sources."""

    groups_per_batch: PositiveInt = 8
    """Groups that a batch holds."""

    group_size: PositiveInt = 8
    """Episodes a group."""

    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training episodes."""

    algorithm: AlgorithmConfig = GrpoConfig()
    """Credit assignment."""

    prune_zero_advantage: bool = True
    """Leave samples whose advantages are all exactly zero out of the batch's trained samples."""

    max_lead: NonNegativeInt = 1
    """Batch n may be committed once v{n-1-max_lead} exists."""

    max_off_policy_steps: NonNegativeInt = 8
    """Versions between the one a batch trains on and the oldest that sampled any of its tokens."""

    max_inflight_episodes: PositiveInt | None = None
    """Cap of episodes that wait or run; none leaves it to the two pacing limits."""

    shuffle_rewards: bool = False
    """Control experiment: permute the rewards within each group before credit assignment (seeded)."""

    seed: int = 0
    """Seed of task order and of the control experiment."""

    workers: EnvWorkerPoolConfig = EnvWorkerPoolConfig()
    """Env workers."""

    monitors: MonitorsConfig = MonitorsConfig()
    """Where metrics go."""

    write_rollouts: bool = True
    """Write readable traces to rollouts/step_<n>/."""

    @model_validator(mode="after")
    def lag_covers_lead(self) -> OrchestratorConfig:
        """A lead of k makes batches at least k versions old when sampled by the newest."""
        if self.max_off_policy_steps < self.max_lead:
            raise ValueError(
                f"max_off_policy_steps = {self.max_off_policy_steps} is below max_lead = {self.max_lead}: "
                "every batch would be dropped; raise --max-off-policy-steps or lower --max-lead"
            )
        return self

    @model_validator(mode="after")
    def labels_are_unique(self) -> OrchestratorConfig:
        """Two sources of one kind must not share a name."""
        for kind, sources in (("train", self.train), ("eval", self.eval)):
            labels = [source.label for source in sources]
            twice = sorted({label for label in labels if labels.count(label) > 1})
            if twice:
                raise ValueError(f"{kind} sources share the name {twice[0]!r}: give each a name of its own")
        return self


class EnvWorkerConfig(OrchestratorConfig):
    """One env worker; the orchestrator's sources, plus who this worker is."""

    worker_id: str | None = None
    """Name in rollouts and logs; made from host and pid when not set."""

    router_url: str | None = None
    """Router to talk to; found through the registry when not set."""


__all__ = [
    "AlgorithmConfig",
    "EnvWorkerConfig",
    "EnvWorkerPoolConfig",
    "EvalSourceConfig",
    "GrpoConfig",
    "NonNegativeFloat",
    "OrchestratorConfig",
    "SourceConfig",
    "TrainSourceConfig",
]
