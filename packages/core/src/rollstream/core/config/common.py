"""What every component's configuration shares."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_config import BaseConfig

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


class BusConfig(BaseConfig):
    """Where NATS is. Without a URL the local launcher starts a server of its own."""

    url: str | None = None
    """NATS URL, for example nats://127.0.0.1:4222; the launcher embeds a server when it is not set."""

    credentials_file: Path | None = None
    """File with the NATS token (mode 0600); its content never reaches a log."""

    connect_timeout: PositiveFloat = 30.0
    """Seconds to wait for the first connection before giving up with exit code 2."""


class StoreConfig(BaseConfig):
    """Where Redis (or Valkey) is. Without a URL the local launcher starts a server of its own."""

    url: str | None = None
    """Redis URL, for example redis://127.0.0.1:6379/0; the launcher embeds a server when it is not set."""

    password_file: Path | None = None
    """File with the Redis password (mode 0600); its content never reaches a log."""

    connect_timeout: PositiveFloat = 30.0
    """Seconds to wait for the first connection before giving up with exit code 2."""


class LogConfig(BaseConfig):
    """Structured logs."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is written."""

    json_lines: bool = False
    """Write JSON lines instead of the console format."""


class FileMonitorConfig(BaseConfig):
    """metrics.jsonl in the run directory."""

    enabled: bool = True
    """Write one JSON object a line with ``step`` and metric names."""


class WandbMonitorConfig(BaseConfig):
    """Weights & Biases; a failure here never stops a run."""

    project: str = "rollstream"
    """W&B project."""

    name: str | None = None
    """Display name of the W&B run; the run's name when not set."""

    entity: str | None = None
    """W&B team or user."""

    offline: bool = False
    """Record on disk without sending anything."""


class MonitorsConfig(BaseConfig):
    """Where metrics go besides Prometheus."""

    file: FileMonitorConfig = FileMonitorConfig()
    """The JSONL file monitor, on by default."""

    wandb: WandbMonitorConfig | None = None
    """W&B, off unless the table is given."""


class MetricsServerConfig(BaseConfig):
    """Prometheus endpoint of a service."""

    enabled: bool = True
    """Serve /metrics."""

    host: str = "127.0.0.1"
    """Address to bind."""

    port: NonNegativeInt = 0
    """Port to bind; 0 lets the OS choose (the address is then published in the service's lease)."""


class ModelConfig(BaseConfig):
    """The policy model."""

    name: str = "Qwen/Qwen3-0.6B"
    """Model directory or hub id, as transformers takes it."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter and compute dtype of the trainer and of the engine."""

    trust_remote_code: bool = False
    """Allow code that ships with the model."""


class SamplingConfig(BaseConfig):
    """How training and eval episodes sample. top_p 1, top_k -1 and min_p 0 are fixed for training."""

    temperature: PositiveFloat = 1.0
    """Softmax temperature; the trainer applies the same one."""

    max_tokens: PositiveInt | None = None
    """Completion tokens a turn; the rest of the context when not set."""

    seed: int | None = None
    """Engine seed of a request; not set means the engine chooses."""


class ComponentConfig(BaseConfig):
    """What each process of a run is told besides its own section."""

    run_dir: Path = Path("outputs/run")
    """Run directory with run.json; every path on the bus is relative to it."""

    bus: BusConfig = BusConfig()
    """NATS JetStream."""

    store: StoreConfig = StoreConfig()
    """Redis."""

    log: LogConfig = LogConfig()
    """Logging."""

    metrics_server: MetricsServerConfig = MetricsServerConfig()
    """Prometheus endpoint."""
