"""A version directory is trusted only when it is what its manifest and its notice say."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream.inference.weights import WeightsError, verify
from support.weight_versions import write_version


def test_a_whole_version_is_accepted(tmp_path: Path) -> None:
    notice = write_version(tmp_path, 1, 3)
    assert [path.name for path in verify(tmp_path / notice.location, notice.digest)] == ["model.safetensors"]


def test_a_flipped_bit_names_the_file(tmp_path: Path) -> None:
    notice = write_version(tmp_path, 1, 3, flip=True)
    with pytest.raises(WeightsError, match=r"v3/model\.safetensors: sha256"):
        verify(tmp_path / notice.location, notice.digest)


def test_a_truncated_file_is_refused_by_size(tmp_path: Path) -> None:
    notice = write_version(tmp_path, 1, 3)
    path = tmp_path / notice.location / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=f"{notice.nbytes - 1} bytes, the manifest promises {notice.nbytes}"):
        verify(path.parent)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    notice = write_version(tmp_path, 1, 3)
    (tmp_path / notice.location / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model\.safetensors: No such file"):
        verify(tmp_path / notice.location)


def test_other_content_than_announced_is_refused(tmp_path: Path) -> None:
    notice = write_version(tmp_path, 1, 3)
    with pytest.raises(WeightsError, match="was announced"):
        verify(tmp_path / notice.location, "0" * 64)


@pytest.mark.parametrize("manifest", [None, b"", b"{"])
def test_a_directory_without_a_readable_manifest_is_refused(tmp_path: Path, manifest: bytes | None) -> None:
    if manifest is not None:
        (tmp_path / "manifest.json").write_bytes(manifest)
    with pytest.raises(WeightsError, match=r"manifest\.json: cannot be read"):
        verify(tmp_path)
