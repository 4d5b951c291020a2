"""Configuration of a whole run: what ``rollstream rl`` reads."""

from __future__ import annotations

from pathlib import Path

from pydantic_config import BaseConfig

from rollstream.core.config.common import (
    BusConfig,
    LogConfig,
    ModelConfig,
    MonitorsConfig,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StoreConfig,
)
from rollstream.core.config.orchestrator import OrchestratorConfig
from rollstream.core.config.serving import InferenceConfig, RouterConfig
from rollstream.core.config.trainer import TrainerConfig


class RunSectionConfig(BaseConfig):
    """What the run is called and where it lives."""

    name: str | None = None
    """Directory under output_dir; <envs>--<model>--<short id> when not set."""


class ResumeConfig(BaseConfig):
    """Go on with an existing run where its chain of batches stands."""


class RlConfig(BaseConfig):
    """A reinforcement-learning run. Values at the top are pushed down into each component that leaves them unset."""

    output_dir: Path = Path("outputs")
    """Where runs live."""

    run: RunSectionConfig = RunSectionConfig()
    """Name of the run."""

    resume: ResumeConfig | None = None
    """Go on with the run in its directory; without it a directory that holds a run is refused."""

    model: ModelConfig | None = None
    """Policy model of all components."""

    max_steps: PositiveInt | None = None
    """Steps of the run, for trainer and orchestrator."""

    seq_len: PositiveInt | None = None
    """Longest sample, for trainer, orchestrator and engines."""

    seed: int | None = None
    """Seed of trainer and orchestrator."""

    replicas: NonNegativeInt = 1
    """Inference replicas that the local launcher starts."""

    bus: BusConfig = BusConfig()
    """NATS of all components."""

    store: StoreConfig = StoreConfig()
    """Redis of all components."""

    log: LogConfig = LogConfig()
    """Logging of all components."""

    monitors: MonitorsConfig | None = None
    """Where metrics go, for trainer and orchestrator."""

    trainer: TrainerConfig = TrainerConfig()
    """The trainer."""

    orchestrator: OrchestratorConfig = OrchestratorConfig()
    """The orchestrator and its env workers."""

    inference: InferenceConfig = InferenceConfig()
    """The inference replicas."""

    router: RouterConfig = RouterConfig()
    """The router."""

    max_restarts: NonNegativeInt = 20
    """Restarts of one component within ten minutes before the run fails."""

    stop_grace: PositiveFloat = 20.0
    """Seconds that components get to stop before they are killed."""

    live: bool = True
    """Show the live screen on a terminal; plain lines elsewhere."""
