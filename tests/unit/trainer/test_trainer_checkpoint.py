"""Checkpoints: exact, whole or not there, and never the last one deleted too early."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollstream.core.config import AdamWConfig, DppoLossConfig, ModelConfig, ScheduleConfig
from rollstream.trainer.checkpoint import (
    MANIFEST,
    CheckpointError,
    CheckpointManifest,
    Checkpoints,
    latest,
    validate,
)
from rollstream.trainer.model import Policy
from rollstream.trainer.ranks import Ranks
from rollstream.trainer.step import TrainStep
from support.tiny_model import make_tiny_model
from support.train_samples import make_samples

RANKS = Ranks.alone()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=2, hidden=64)


def train_step(model_dir: Path) -> TrainStep:
    return TrainStep(
        Policy.load(ModelConfig(name=str(model_dir))), RANKS, seq_len=64, loss=DppoLossConfig(),
        optim=AdamWConfig(lr=1e-3), schedule=ScheduleConfig(type="cosine", warmup_steps=2), max_steps=10,
    )


def manifest(step: int) -> CheckpointManifest:
    return CheckpointManifest(step=step, timeline=1, commit="c", weights="w", config_digest="d", world=1)


def save(step: TrainStep, root: Path, number: int, keep_last: int = 2) -> Path:
    return Checkpoints(root, RANKS, keep_last).save(step.policy, step.optimizer, manifest(number), b"state")


def test_going_on_from_a_checkpoint_gives_the_same_bits(model_dir: Path, tmp_path: Path) -> None:
    straight = train_step(model_dir)
    for number in (1, 2, 3, 4):
        straight.fit(number, make_samples(5, seed=number))
        if number == 2:
            save(straight, tmp_path, 2)
    found = latest(tmp_path)
    assert found is not None and found.manifest.step == 2
    assert (found.directory / "orchestrator.msgpack").read_bytes() == b"state"
    resumed = train_step(model_dir)
    Checkpoints(tmp_path, RANKS, 2).load(found, resumed.policy, resumed.optimizer)
    for number in (3, 4):
        resumed.fit(number, make_samples(5, seed=number))
    expected = straight.policy.state_dict()
    assert all(torch.equal(expected[name], value) for name, value in resumed.policy.state_dict().items())


def test_partial_foreign_and_damaged_directories_are_never_latest(model_dir: Path, tmp_path: Path) -> None:
    step = train_step(model_dir)
    step.fit(1, make_samples(3))
    good = save(step, tmp_path, 1)
    damaged, cut, no_manifest = (save(step, tmp_path, number, keep_last=9) for number in (2, 3, 4))
    shard = next((damaged / "trainer").glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(bytes(data))
    next((cut / "trainer").glob("*.distcp")).write_bytes(b"")
    (no_manifest / MANIFEST).unlink()
    (tmp_path / "step_9").mkdir()
    (tmp_path / ".step_10.partial").mkdir()
    (tmp_path / "step_11").write_text("a file")
    (tmp_path / "steps_12").mkdir()
    (tmp_path / "step_13").mkdir()
    (tmp_path / "step_13" / MANIFEST).write_text('{"step": 13')
    found = latest(tmp_path)
    assert found is not None and found.directory == good
    assert latest(tmp_path / "nothing") is None


def test_old_checkpoints_go_only_after_the_next_is_complete(model_dir: Path, tmp_path: Path) -> None:
    step = train_step(model_dir)
    for number in (1, 2, 3):
        step.fit(number, make_samples(3, seed=number))
        save(step, tmp_path, number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_3"]
    assert all(validate(tmp_path / name) for name in ("step_2", "step_3"))


def test_killed_half_way_leaves_the_last_good_one(model_dir: Path, tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from support.train_samples import make_samples
from rollstream.core.config import AdamWConfig, DppoLossConfig, ModelConfig, ScheduleConfig
from rollstream.trainer.checkpoint import CheckpointManifest, Checkpoints
from rollstream.trainer.model import Policy
from rollstream.trainer.ranks import Ranks
from rollstream.trainer.step import TrainStep
step = TrainStep(Policy.load(ModelConfig(name={str(model_dir)!r})), Ranks.alone(), seq_len=64, loss=DppoLossConfig(),
                 optim=AdamWConfig(), schedule=ScheduleConfig(), max_steps=10)
for number in (1, 2):
    step.fit(number, make_samples(3))
    Checkpoints(Path({str(tmp_path)!r}), Ranks.alone(), 1).save(step.policy, step.optimizer,
        CheckpointManifest(step=number, timeline=1, commit="", weights="", config_digest="", world=1), b"")
"""
    killed = subprocess.run(
        [sys.executable, "-c", script], env={"ROLLSTREAM_FAILPOINT": "mid_checkpoint:2", "OMP_NUM_THREADS": "1"},
        timeout=60, check=False, capture_output=True, text=True,
    )
    assert killed.returncode == -9, killed.stderr[-2000:]
    found = latest(tmp_path)
    assert found is not None and found.manifest.step == 1
    # The next attempt sweeps what the dead one left.
    step = train_step(model_dir)
    step.fit(1, make_samples(3))
    save(step, tmp_path, 2, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_a_checkpoint_of_another_model_is_refused(model_dir: Path, tmp_path: Path) -> None:
    step = train_step(model_dir)
    step.fit(1, make_samples(3))
    save(step, tmp_path / "ckpt", 1)
    found = latest(tmp_path / "ckpt")
    other = train_step(make_tiny_model(tmp_path / "other", layers=3, hidden=64))
    assert found is not None
    with pytest.raises(CheckpointError, match="does not fit"):
        Checkpoints(tmp_path / "ckpt", RANKS, 1).load(found, other.policy, other.optimizer)
