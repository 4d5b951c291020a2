"""The loop with everything real: vLLM, verifiers, NATS, Redis, two env workers, a trainer of two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from rollstream.cli.servers import EmbeddedNats
from support.independent_reader import audit_run
from support.launches import launched
from support.warm_model import EXAMPLE, warm_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(800)]

STEPS = 24
REWARD = "train/agg/effective/agent/reward/mean"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run to its end; its directory."""
    where = tmp_path_factory.mktemp("e2e")
    arguments = [
        "rl", "@", str(EXAMPLE / "rl.toml"), "--output-dir", str(where / "outputs"), "--run.name", "run",
        "--model.name", str(warm_model()), "--max-steps", str(STEPS), "--trainer.nproc", "2",
        "--orchestrator.workers.count", "2", "--orchestrator.workers.concurrency", "64",
    ]  # fmt: skip
    with launched(*arguments, cwd=where) as launch:
        assert launch.wait(400) == 0, launch.text()[-6000:]
        assert launch.alive() == []
    return where / "outputs" / "run"


def rows(run: Path, metric: str) -> dict[int, dict[str, float]]:
    """step → its line of metrics.jsonl, for the lines that hold ``metric``."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if metric in line]
    assert len({line["step"] for line in found}) == len(found), f"{metric} has two lines of one step"
    return {line["step"]: line for line in found}


def test_every_step_is_trained_and_the_reward_rises(run: Path) -> None:
    steps = rows(run, "optim/grad_norm")
    assert list(steps) == list(range(1, STEPS + 1))
    rewards = [steps[step][REWARD] for step in steps]
    assert fmean(rewards[-5:]) - fmean(rewards[:5]) > 0.05
    assert all(line["optim/grad_norm"] > 0 for line in steps.values())


def test_the_trainer_sees_what_the_engine_sampled(run: Path) -> None:
    """Before anything was learned the two agree in fp32; a wrong temperature or shift would show here."""
    first = rows(run, "mismatch_kl/all/mean")[1]
    assert abs(first["mismatch_kl/all/mean"]) < 1e-6


def test_lag_is_bounded(run: Path) -> None:
    lags = [line["off_policy/max"] for line in rows(run, "off_policy/max").values()]
    assert max(lags) <= 3
    assert max(lags) >= 1, "nothing was sampled while the trainer trained: the loop was not asynchronous"


def test_the_base_and_the_last_version_are_evaluated(run: Path) -> None:
    held_out = rows(run, "eval/reverse-text/reward/mean")
    assert {0, STEPS} <= set(held_out)
    assert held_out[STEPS]["eval/reverse-text/reward/mean"] > held_out[0]["eval/reverse-text/reward/mean"]


def test_both_workers_and_both_ranks_took_part(run: Path) -> None:
    traces = [json.loads(line) for path in run.glob("rollouts/step_*/train.jsonl") for line in path.open()]
    assert len({trace["worker"] for trace in traces}) == 2
    resolved = json.loads((run / "configs" / "latest" / "resolved" / "trainer.json").read_text())
    assert resolved["nproc"] == 2
    shards = list(run.glob(f"checkpoints/step_{STEPS}/trainer/*.distcp"))
    assert len(shards) == 2


async def test_an_auditor_finds_the_run_sound(run: Path) -> None:
    server = EmbeddedNats(run / "bus")
    server.start()
    try:
        audit = await audit_run(server.url, run, STEPS)
    finally:
        server.stop()
    assert audit.problems == []
    assert len(audit.uses) >= STEPS * 64
