"""From configuration to the engine's command line and environment."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from rollstream.core.config import InferenceConfig, ModelConfig
from rollstream.inference.arguments import ArgumentError, check, command, cores, engine_arguments, environment, flags


def test_flags_render_every_kind_of_value() -> None:
    rendered = flags({
        "max_num_seqs": 64, "enforce_eager": True, "enable_prefix_caching": False, "seed": None,
        "weight_transfer_config": {"backend": "x"}, "lora_modules": ["a=b", {"name": "c"}],
    })
    assert rendered == [
        "--max-num-seqs", "64", "--enforce-eager", "--no-enable-prefix-caching",
        "--weight-transfer-config", '{"backend": "x"}', "--lora-modules", "a=b", '{"name": "c"}',
    ]


def test_configured_vllm_arguments_win_over_our_defaults() -> None:
    config = InferenceConfig(vllm={"gpu-memory-utilization": 0.5, "max_num_seqs": 7})
    arguments = engine_arguments(config, cpu=True)
    assert arguments["gpu_memory_utilization"] == 0.5
    assert arguments["max_num_seqs"] == 7
    assert "gpu-memory-utilization" not in arguments


@pytest.mark.parametrize("name", ["logprobs_mode", "logprobs-mode", "weight_transfer_config", "model", "port"])
def test_what_the_contract_fixes_cannot_be_configured(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"inference.vllm.{name} is fixed"):
        engine_arguments(InferenceConfig(vllm={name: "x"}), cpu=True)


def test_one_cpu_worker_runs_inside_the_engine_core() -> None:
    assert engine_arguments(InferenceConfig(), cpu=True)["distributed_executor_backend"] == "uni"
    assert environment(InferenceConfig(), "secret", cpu=True)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    for vllm in ({"tensor-parallel-size": 2}, {"distributed_executor_backend": "mp"}):
        config = InferenceConfig(vllm=vllm)
        assert engine_arguments(config, cpu=True).get("distributed_executor_backend") != "uni"
        assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment(config, "secret", cpu=True)


def test_core_lists_are_read_or_refused() -> None:
    assert cores("0-1,3") == {0, 1, 3}
    with pytest.raises(ArgumentError, match="cpu_cores = 'a-b'"):
        cores("a-b")


def test_what_no_engine_could_start_with_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = ModelConfig(name=str(tmp_path))
    check(InferenceConfig(model=model))
    with pytest.raises(ArgumentError, match=r"model /no/such: there is no config\.json"):
        check(InferenceConfig(model=ModelConfig(name="/no/such")))
    with pytest.raises(ArgumentError, match="may not use core 4096"):
        check(InferenceConfig(model=model, cpu_cores="4096"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ArgumentError, match=rf"cannot bind 127\.0\.0\.1:{port} \(Address already in use\)"):
            check(InferenceConfig(model=model, port=port))


def test_sampling_reports_processed_logprobs_and_ignores_the_models_own_defaults() -> None:
    arguments = engine_arguments(InferenceConfig(), cpu=False)
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["generation_config"] == "vllm"
    assert "kv_cache_memory_bytes" not in arguments


def test_a_configured_command_gets_the_replicas_own_arguments(tmp_path: Path) -> None:
    config = InferenceConfig(model=ModelConfig(name="m"), engine_command=["engine", "--fast"], vllm={"seed": 1})
    assert command(config, tmp_path / "url", "base", cpu=True) == [
        "engine", "--fast", "--announce", str(tmp_path / "url"), "--label", "base",
        "--model", "m", "--host", "127.0.0.1", "--port", "0",
    ]
    assert command(InferenceConfig(), tmp_path / "url", "base", cpu=True)[:3] == [
        sys.executable, "-m", "rollstream.inference.server",
    ]


def test_the_environment_holds_no_proxy_and_binds_what_is_configured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    monkeypatch.setenv("http_proxy", "http://proxy")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    env = environment(InferenceConfig(cpu_cores="0-1", model=ModelConfig(name=str(tmp_path))), "secret", cpu=True)
    assert not [name for name in env if name.lower().endswith("_proxy")]
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert environment(InferenceConfig(), "secret", cpu=True)["OMP_NUM_THREADS"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in environment(InferenceConfig(), "secret", cpu=False)
