"""Configuration: pydantic models on prime-pydantic-config, one module a component."""

from rollstream.core.config.common import (
    BusConfig,
    ComponentConfig,
    FileMonitorConfig,
    LogConfig,
    MetricsServerConfig,
    ModelConfig,
    MonitorsConfig,
    SamplingConfig,
    StoreConfig,
    WandbMonitorConfig,
)
from rollstream.core.config.load import load_config
from rollstream.core.config.orchestrator import (
    EnvWorkerConfig,
    EnvWorkerPoolConfig,
    EvalSourceConfig,
    GrpoConfig,
    OrchestratorConfig,
    SourceConfig,
    TrainSourceConfig,
)
from rollstream.core.config.rl import ResumeConfig, RlConfig, RunSectionConfig
from rollstream.core.config.serving import InferenceConfig, RouterConfig
from rollstream.core.config.trainer import (
    AdamWConfig,
    CkptConfig,
    DppoLossConfig,
    FakeDataConfig,
    FilesystemTransportConfig,
    IcepopLossConfig,
    IpoLossConfig,
    LossConfig,
    ScheduleConfig,
    TrainerConfig,
)

__all__ = [
    "AdamWConfig",
    "BusConfig",
    "CkptConfig",
    "ComponentConfig",
    "DppoLossConfig",
    "EnvWorkerConfig",
    "EnvWorkerPoolConfig",
    "EvalSourceConfig",
    "FakeDataConfig",
    "FileMonitorConfig",
    "FilesystemTransportConfig",
    "GrpoConfig",
    "IcepopLossConfig",
    "InferenceConfig",
    "IpoLossConfig",
    "LogConfig",
    "LossConfig",
    "MetricsServerConfig",
    "ModelConfig",
    "MonitorsConfig",
    "OrchestratorConfig",
    "ResumeConfig",
    "RlConfig",
    "RouterConfig",
    "RunSectionConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "SourceConfig",
    "StoreConfig",
    "TrainSourceConfig",
    "TrainerConfig",
    "WandbMonitorConfig",
    "load_config",
]
