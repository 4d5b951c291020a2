"""A version directory is trusted only when it is what its manifest and its notice say."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream.core.run import WeightsDamaged
from rollstream.inference.weights import verified_files
from support.weight_versions import write_version


def test_a_whole_version_is_accepted(tmp_path: Path) -> None:
    notice = write_version(tmp_path, 1, 3)
    assert [path.name for path in verified_files(tmp_path / notice.location, notice.digest)] == ["model.safetensors"]


def test_a_flipped_bit_names_the_file(tmp_path: Path) -> None:
    notice = write_version(tmp_path, 1, 3, flip=True)
    with pytest.raises(WeightsDamaged, match=r"v3/model\.safetensors: its sha256"):
        verified_files(tmp_path / notice.location, notice.digest)


def test_other_content_than_announced_is_refused(tmp_path: Path) -> None:
    notice = write_version(tmp_path, 1, 3)
    with pytest.raises(WeightsDamaged, match="was announced"):
        verified_files(tmp_path / notice.location, "0" * 64)


def test_a_directory_that_was_pruned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsDamaged, match=r"manifest\.json cannot be read"):
        verified_files(tmp_path / "gone")
