"""Named failpoints: a real SIGKILL at the worst places of a real run, a scripted token source behind the route.

After each, the run completes by itself and an auditor that shares no code with us finds every step once, no rollout
used twice and every version announced with one digest.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollstream.cli.servers import EmbeddedNats
from support.independent_reader import audit_run
from support.launches import launched, scripted_engine
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.timeout(300)

STEPS = 5

# failpoint → which pass of it kills (the first is rarely the interesting one) and who dies
FAILPOINTS = {
    "after_epoch": (1, "orchestrator"),
    "after_group_before_episodes": (3, "orchestrator"),
    "after_commit_before_ack": (2, "orchestrator"),
    "after_rollout_before_ack": (5, "env-worker-0"),
    "after_weights_before_notice": (3, "trainer"),
    "after_notice": (3, "trainer"),
    "mid_checkpoint": (1, "trainer"),
    "after_checkpoint_before_archive": (1, "trainer"),
    "between_purges": (1, "trainer"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=64)


def run_arguments(model: Path, steps: int = STEPS) -> list[str]:
    return [
        "rl", "--run.name", "run", "--model.name", str(model), "--max-steps", str(steps), "--seq-len", "128",
        "--orchestrator.train", json.dumps([{"id": "reverse-text"}]), "--orchestrator.sampling.max-tokens", "8",
        "--orchestrator.groups-per-batch", "2", "--orchestrator.group-size", "4", "--trainer.threads", "1",
        "--orchestrator.workers.lease-seconds", "3", "--trainer.ckpt.interval", "2", *scripted_engine(),
    ]  # fmt: skip


@pytest.mark.parametrize("failpoint", FAILPOINTS)
async def test_a_death_at_a_failpoint_costs_nothing(failpoint: str, model: Path, tmp_path: Path) -> None:
    count, victim = FAILPOINTS[failpoint]
    marker = tmp_path / "died"
    run = tmp_path / "outputs" / "run"
    armed = {"ROLLSTREAM_FAILPOINT": f"{failpoint}:{count}:{marker}"}
    with launched(*run_arguments(model), cwd=tmp_path, env=armed) as launch:
        assert launch.wait(200) == 0, launch.text()[-6000:]
        assert launch.alive() == []
        assert marker.exists(), f"{failpoint} was never reached"
        assert f"{victim} ended with" in launch.text()

    server = EmbeddedNats(run / "bus")
    server.start()
    try:
        audit = await audit_run(server.url, run, STEPS)
    finally:
        server.stop()
    assert audit.problems == []
