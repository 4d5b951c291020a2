"""What a replay refuses before it computes anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream.core.errors import UsageError
from rollstream.core.run import ArchiveDamaged, RunDir
from rollstream.trainer.replay import load_trainer_config, steps_to_replay


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir.create(tmp_path / "run")
    made.batches.mkdir()
    return made


def test_a_gap_in_the_archive_is_named(run: RunDir) -> None:
    for step in (1, 2, 4):
        run.batch(step).touch()
    assert steps_to_replay(run, 2) == [1, 2]
    with pytest.raises(ArchiveDamaged, match="step 3"):
        steps_to_replay(run, None)


def test_an_empty_archive_is_no_replay(run: RunDir) -> None:
    with pytest.raises(UsageError, match="no archived batch"):
        steps_to_replay(run, None)


def test_a_missing_or_wrong_configuration_is_named(run: RunDir) -> None:
    with pytest.raises(UsageError, match=r"trainer\.json"):
        load_trainer_config(run, None)
    wrong = run.path / "wrong.json"
    wrong.write_text('{"max_steps": -1}')
    with pytest.raises(UsageError, match="max_steps"):
        load_trainer_config(run, wrong)
