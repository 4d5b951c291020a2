"""From one run configuration to one a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollstream.cli.resolve import Resolved, default_run_name, fill, resolve
from rollstream.core.config import EnvWorkerConfig, RlConfig, TrainerConfig
from rollstream.core.errors import UsageError


def resolved(**values: Any) -> Resolved:
    return resolve(RlConfig.model_validate(values), Path("/runs/a"), "nats://127.0.0.1:1", "redis://127.0.0.1:2/0")


def test_shared_values_reach_every_component_that_leaves_them_unset() -> None:
    run = resolved(
        model={"name": "m"}, max_steps=30, seq_len=256, seed=7, log={"level": "debug"},
        monitors={"file": {"enabled": False}}, orchestrator={"train": [{"id": "reverse-text"}]}, replicas=2,
    )  # fmt: skip
    parts = run.components()
    assert {part.log.level for part in parts.values()} == {"debug"}
    assert {part.bus.url for part in parts.values()} == {"nats://127.0.0.1:1"}
    assert {part.store.url for part in parts.values()} == {"redis://127.0.0.1:2/0"}
    assert {part.run_dir for part in parts.values()} == {Path("/runs/a")}
    for part in (run.trainer, run.orchestrator):
        assert (part.model.name, part.max_steps, part.seq_len, part.seed) == ("m", 30, 256, 7)
        assert not part.monitors.file.enabled
    assert [(part.replica_id, part.model.name, part.seq_len) for part in run.inference] == [
        ("replica-0", "m", 256), ("replica-1", "m", 256),
    ]  # fmt: skip


def test_workers_take_the_orchestrators_section_and_a_name_each() -> None:
    run = resolved(orchestrator={"train": [{"id": "reverse-text"}], "workers": {"count": 2}})
    assert [worker.worker_id for worker in run.workers] == ["worker-0", "worker-1"]
    assert all(isinstance(worker, EnvWorkerConfig) and worker.train == run.orchestrator.train for worker in run.workers)


def test_a_section_may_say_the_same_or_more_but_nothing_else() -> None:
    run = resolved(model={"name": "m"}, trainer={"model": {"trust_remote_code": True}, "max_steps": 5}, max_steps=5)
    assert (run.trainer.model.name, run.trainer.model.trust_remote_code) == ("m", True)
    assert not run.orchestrator.model.trust_remote_code
    with pytest.raises(UsageError, match=r"max_steps = 5 at the top and trainer\.max_steps = 6"):
        resolved(max_steps=5, trainer={"max_steps": 6})
    with pytest.raises(UsageError, match=r"model\.name = 'm' at the top and inference\.model\.name = 'n'"):
        resolved(model={"name": "m"}, inference={"model": {"name": "n"}})


def test_a_top_level_default_pushes_nothing_and_none_is_kept() -> None:
    run = resolved(trainer={"optim": {"max_norm": None}, "ckpt": None})
    assert run.trainer.optim.max_norm is None and run.trainer.ckpt is None
    assert TrainerConfig.model_validate_json(run.trainer.model_dump_json()) == run.trainer


def test_components_that_must_agree_and_do_not_are_refused() -> None:
    with pytest.raises(UsageError, match=r"disagree about max_steps: trainer has 100, orchestrator has 30"):
        resolved(orchestrator={"max_steps": 30})


def test_a_rule_that_the_push_down_breaks_is_found() -> None:
    schedule = {"type": "linear", "warmup_steps": 20, "decay_steps": 100}
    assert resolved(max_steps=150, trainer={"schedule": schedule}).trainer.schedule.decay_steps == 100
    with pytest.raises(UsageError, match=r"trainer: .*= 120 exceed max_steps = 50"):
        resolved(max_steps=50, trainer={"schedule": schedule})


def test_fill_never_changes_what_it_is_given() -> None:
    own, shared = {"a": {"b": 1}}, {"a": {"c": 2}}
    assert fill(own, shared, "trainer") == {"a": {"b": 1, "c": 2}}
    assert (own, shared) == ({"a": {"b": 1}}, {"a": {"c": 2}})


def test_the_default_name_tells_environments_and_model() -> None:
    config = RlConfig.model_validate({"orchestrator": {"train": [{"id": "a/b c"}, {"id": "x", "name": "y"}]}})
    assert default_run_name(config, "Qwen/Qwen3-0.6B", "1f2e") == "a-b-c+y--Qwen3-0.6B--1f2e"
    assert default_run_name(RlConfig(), "models/x", "1f2e") == "no-env--x--1f2e"
