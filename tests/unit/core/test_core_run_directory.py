"""The run directory, atomic writes and the weights manifest: whole or not there, foreign things refused."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.core.errors import UsageError
from rollstream.core.run import DiskFull, RunDir, WeightsDamaged, WeightsManifest, atomic_write

# --- run.json ------------------------------------------------------------------------------------------------------


def test_a_run_is_made_once_and_opened_again(tmp_path: Path) -> None:
    made = RunDir.create(tmp_path / "out" / "my.run", name="my.run")
    opened = RunDir.open(made.path)
    assert opened == made and re.fullmatch("[0-9a-f]{12}", opened.run_id)
    assert (opened.name, opened.timeline) == ("my.run", 1) and abs(opened.info.created - time.time()) < 60
    shown = json.loads((made.path / "run.json").read_text())
    assert shown["run_id"] == made.run_id and (made.path / "run.json").read_text().count("\n") > 3, "for people to read"
    with pytest.raises(UsageError, match="already holds a run"):
        RunDir.create(made.path)
    assert RunDir.open(made.path) == made
    assert RunDir.create(tmp_path / "other", name="my.run").run_id != made.run_id


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run\.json\n  → "):
        RunDir.open(tmp_path)
    (tmp_path / "file").write_text("")
    for act in (RunDir.open, RunDir.create):
        with pytest.raises(UsageError, match=re.escape(str(tmp_path / "file"))):
            act(tmp_path / "file")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"run_id": 3, "name": "x", "created": 1}', "\x00"])
def test_a_damaged_run_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path / 'run.json'} cannot be read")):
        RunDir.open(tmp_path)
    assert (tmp_path / "run.json").read_text() == content, "nothing is overwritten"


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    info = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({**info, "format": 2}))
    with pytest.raises(UsageError, match="format 2"):
        RunDir.open(run.path)


# --- atomic writes -------------------------------------------------------------------------------------------------


def test_a_write_replaces_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    for data in (b"one", b"", b"x" * 1_000_000):
        atomic_write(tmp_path / "file", data)
        assert (tmp_path / "file").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


WRITER = """
import sys
from pathlib import Path
from rollstream.core.run import atomic_write
print("ready", flush=True)
number = 0
while True:
    number += 1
    atomic_write(Path(sys.argv[1]), bytes([number % 251]) * 300_000)
"""


def test_a_killed_writer_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    for attempt in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "file")], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        time.sleep(0.05 + attempt * 0.0113)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(10)
        writer.stdout.close()
        data = (tmp_path / "file").read_bytes()
        assert len(data) == 300_000 and len(set(data)) == 1
    others = [path.name for path in tmp_path.iterdir() if path.name != "file"]
    assert all(name.startswith(".file.") and name.endswith(".tmp") for name in others), "drafts are hidden"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs needs privileges: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_named_and_costs_nothing(small_disk: Path) -> None:
    atomic_write(small_disk / "file", b"old")
    with pytest.raises(DiskFull, match=r"MiB are free\n  → free some space") as refused:
        atomic_write(small_disk / "file", bytes(2_000_000))
    assert str(small_disk / "file") in str(refused.value) and refused.value.exit_code == 2
    assert isinstance(refused.value.__cause__, OSError) and refused.value.__cause__.errno == errno.ENOSPC
    assert (small_disk / "file").read_bytes() == b"old"
    assert [path.name for path in small_disk.iterdir()] == ["file"], "no draft keeps the room"


# --- weights -------------------------------------------------------------------------------------------------------


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version of two files with its manifest."""
    (tmp_path / "a.safetensors").write_bytes(b"a" * 1000)
    (tmp_path / "b.safetensors").write_bytes(b"b" * 2000)
    WeightsManifest.of(tmp_path, 1, 3, ["b.safetensors", "a.safetensors"]).write(tmp_path)
    return tmp_path


def test_a_manifest_fits_its_files(version: Path) -> None:
    manifest = WeightsManifest.read(version)
    manifest.verify(version)
    assert (manifest.timeline, manifest.version, manifest.nbytes) == (1, 3, 3000)
    assert [file.name for file in manifest.files] == ["a.safetensors", "b.safetensors"]


def test_the_digest_is_of_the_content_alone(version: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    twin = tmp_path_factory.mktemp("twin")
    for name in ("a.safetensors", "b.safetensors"):
        (twin / name).write_bytes((version / name).read_bytes())
    same = WeightsManifest.of(twin, 2, 9, ["a.safetensors", "b.safetensors"])
    assert same.digest == WeightsManifest.read(version).digest
    (twin / "b.safetensors").write_bytes(b"b" * 1999 + b"c")
    assert WeightsManifest.of(twin, 2, 9, ["a.safetensors", "b.safetensors"]).digest != same.digest
    (twin / "b.safetensors").rename(twin / "c.safetensors")
    assert WeightsManifest.of(twin, 2, 9, ["a.safetensors"]).digest != same.digest


def test_the_bad_file_is_named(version: Path) -> None:
    manifest, file = WeightsManifest.read(version), version / "b.safetensors"
    file.write_bytes(b"b" * 1999 + b"c")
    with pytest.raises(WeightsDamaged, match=r"b\.safetensors: its sha256"):
        manifest.verify(version)
    file.write_bytes(b"b" * 1999)
    with pytest.raises(WeightsDamaged, match=r"b\.safetensors: 1999 bytes, the manifest promises 2000"):
        manifest.verify(version)
    file.unlink()
    with pytest.raises(WeightsDamaged, match=r"b\.safetensors: No such file"):
        manifest.verify(version)


def test_a_manifest_that_is_not_there_not_whole_or_points_elsewhere(version: Path) -> None:
    path = version / "manifest.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(WeightsDamaged, match="cannot be read"):
        WeightsManifest.read(version)
    path.write_bytes(whole.replace(b'"a.safetensors"', b'"../a.safetensors"'))
    with pytest.raises(WeightsDamaged, match="no plain file name"):
        WeightsManifest.read(version)
    path.write_bytes(whole.replace(b'"digest":"', b'"digest":"0'))
    with pytest.raises(WeightsDamaged, match="the digest does not fit"):
        WeightsManifest.read(version).verify(version)
    path.unlink()
    with pytest.raises(WeightsDamaged, match="cannot be read"):
        WeightsManifest.read(version)
