"""Configuration of inference replicas and the router."""

from __future__ import annotations

from typing import Any, Literal

from rollstream.core.config.common import ComponentConfig, ModelConfig, NonNegativeInt, PositiveFloat, PositiveInt


class InferenceConfig(ComponentConfig):
    """One replica: vLLM and the agent that keeps its weights current."""

    model: ModelConfig = ModelConfig()
    """Model that vLLM serves."""

    replica_id: str | None = None
    """Name in the registry; made from host and pid when not set."""

    host: str = "127.0.0.1"
    """Address the engine binds and publishes."""

    port: NonNegativeInt = 0
    """Engine port; 0 lets the OS choose."""

    seq_len: PositiveInt | None = None
    """Longest context (vLLM max_model_len); the model's own when not set."""

    vllm: dict[str, Any] = {}
    """Any vLLM engine argument by vLLM's own name, for example {"max_num_seqs": 64}."""

    cpu_kv_cache_bytes: PositiveInt = 64 * 1024 * 1024
    """KV cache of an engine without a GPU."""

    cpu_cores: str | None = None
    """Cores that an engine without a GPU runs on, for example "0" or "0-1", one compute thread each; none means one
    thread (or OMP_NUM_THREADS) on any core."""

    engine_command: list[str] | None = None
    """Start this instead of vLLM; it gets --announce, --label, --model, --host and --port. For fault tests."""

    start_timeout: PositiveFloat = 300.0
    """Seconds an engine may take to answer."""

    load_timeout: PositiveFloat = 120.0
    """Seconds a weight update may take before the replica leaves the routing."""

    drain_timeout: PositiveFloat = 30.0
    """Seconds that requests in flight get at an orderly stop."""

    heartbeat: PositiveFloat = 1.0
    """Seconds between lease renewals."""

    lease_seconds: PositiveFloat = 10.0
    """Seconds until a lease that is not renewed expires."""


class RouterConfig(ComponentConfig):
    """The router in front of the replicas."""

    router_id: str | None = None
    """Name in the registry; made from host and pid when not set."""

    host: str = "127.0.0.1"
    """Address to bind."""

    port: NonNegativeInt = 0
    """Port to bind; 0 lets the OS choose (the address is published in the registry)."""

    policy: Literal["sticky_least_loaded"] = "sticky_least_loaded"
    """How a replica is chosen."""

    session_ttl: PositiveFloat = 600.0
    """Seconds without a request until a session is forgotten."""

    request_timeout: PositiveFloat = 600.0
    """Seconds a request may take from its last byte in to its first byte out."""

    no_replica_timeout: PositiveFloat = 60.0
    """Seconds a request waits for a ready replica before a 503."""

    max_body_bytes: PositiveInt = 64 * 1024 * 1024
    """Largest request body."""

    retries: NonNegativeInt = 2
    """Attempts on other replicas before the first byte of an answer."""

    registry_interval: PositiveFloat = 0.5
    """Seconds between looks at the registry."""

    lease_seconds: PositiveFloat = 10.0
    """Seconds until this router's own lease expires when it is not renewed."""

    drain_timeout: PositiveFloat = 30.0
    """Seconds that open requests may take after SIGTERM before they are broken off."""
