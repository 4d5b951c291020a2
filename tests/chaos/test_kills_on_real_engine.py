"""One run on real vLLM, three seeded ``kill -9`` (trainer, env worker, orchestrator): nothing lost, nothing doubled."""

from __future__ import annotations

import json
import random
from pathlib import Path

import psutil
import pytest

from rollstream.cli.launcher.leash import MARKER
from rollstream.cli.servers import EmbeddedNats
from support.independent_reader import audit_run
from support.launches import Launch, launched
from support.warm_model import EXAMPLE, warm_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STEPS = 16
SEED = 7


def steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return max((line["step"] for line in lines if "optim/grad_norm" in line), default=0)


def kill(launch: Launch, component: str) -> None:
    """SIGKILL every process of a component: ranks die with their launcher."""
    victims = [process for process in launch.alive() if process.environ().get(MARKER, "").endswith(f"/{component}")]
    assert victims, f"{component} does not run"
    for process in victims:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


async def test_three_kills(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "run"
    rng = random.Random(SEED)
    order = rng.sample(["trainer", "env-worker-0", "orchestrator"], 3)
    moments = sorted(rng.sample(range(2, STEPS - 2), 3))
    arguments = [
        "rl", "@", str(EXAMPLE / "rl.toml"), "--output-dir", str(tmp_path / "outputs"), "--run.name", "run",
        "--model.name", str(warm_model()), "--max-steps", str(STEPS), "--trainer.ckpt.interval", "5",
        "--orchestrator.workers.lease-seconds", "5",
    ]  # fmt: skip
    with launched(*arguments, cwd=tmp_path) as launch:
        for component, moment in zip(order, moments, strict=True):
            launch.until(lambda moment=moment: steps_done(run) >= moment, 240)  # type: ignore[misc]
            kill(launch, component)
        assert launch.wait(300) == 0, launch.text()[-6000:]
        assert launch.alive() == []
    server = EmbeddedNats(run / "bus")
    server.start()
    try:
        audit = await audit_run(server.url, run, STEPS)
    finally:
        server.stop()
    assert audit.problems == []
