"""Bad input through the launcher: a message that names the thing and the way out, exit code 2, nothing left running."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.cli.servers import EmbeddedRedis
from support.launches import run_to_end, scripted_engine
from support.tiny_model import make_tiny_model

SOURCE = ["--orchestrator.train", json.dumps([{"id": "reverse-text"}])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=64)


def launch(model: Path, cwd: Path, *more: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    arguments = ["rl", *SOURCE, "--run.name", "run", "--model.name", str(model), "--max-steps", "2", *scripted_engine()]
    return run_to_end(*arguments, *more, cwd=cwd, env=env)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--orchestrator.group-sze", "4"], "--orchestrator.group-sze"),
        (["@", "missing.toml"], "missing.toml"),
        (["@", "broken.toml"], "Invalid TOML in broken.toml"),
        (["@", "."], "cannot read the configuration file ."),
        (["--max-steps", "many"], "--max-steps"),
        (["--max-steps", "5", "--trainer.max-steps", "6"], "trainer.max_steps = 6"),
        ([], "no training source"),
        ([*SOURCE, "--run.name", "a/b"], "'a/b' is not one directory name"),
        ([*SOURCE, "--run.name", "none", "--resume"], "holds no run to resume"),
    ],
)
def test_configuration(arguments: list[str], named: str, tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("max_steps = = 3\n")
    code, output = run_to_end("rl", *arguments, cwd=tmp_path)
    assert code == 2, output
    assert named in output and "Traceback" not in output
    assert not (tmp_path / "outputs").exists(), "nothing is written for a configuration that cannot work"


def test_a_directory_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outputs" / "mine").mkdir(parents=True)
    (tmp_path / "outputs" / "mine" / "thesis.tex").write_text("years of work")
    code, output = run_to_end("rl", *SOURCE, "--run.name", "mine", cwd=tmp_path)
    assert code == 2 and "mine is not empty" in output and "--resume" in output
    assert [path.name for path in (tmp_path / "outputs" / "mine").iterdir()] == ["thesis.tex"]


def test_unreachable_nats(model: Path, tmp_path: Path) -> None:
    code, output = launch(model, tmp_path, "--bus.url", "nats://127.0.0.1:1", "--bus.connect-timeout", "1")
    assert code == 2 and "nats://127.0.0.1:1" in output and "--bus.url" in output
    assert "Traceback" not in output


def test_unreachable_redis(model: Path, tmp_path: Path) -> None:
    code, output = launch(model, tmp_path, "--store.url", "redis://127.0.0.1:1/0", "--store.connect-timeout", "1")
    assert code == 2 and "redis://127.0.0.1:1" in output
    assert "Traceback" not in output


def test_a_redis_that_evicts(model: Path, tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "redis", maxmemory_policy="allkeys-lru")
    server.start()
    try:
        code, output = launch(model, tmp_path, "--store.url", server.url)
    finally:
        server.stop()
    assert code == 2 and "allkeys-lru" in output and "noeviction" in output
    assert "Traceback" not in output


def test_a_port_that_is_taken(model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = launch(model, tmp_path, "--router.port", str(port))
    assert code == 2 and f"127.0.0.1:{port}" in output and "--port" in output
    assert "Traceback" not in output


def test_a_model_that_does_not_exist(tmp_path: Path) -> None:
    code, output = launch(Path("models/no-such-model"), tmp_path)
    assert code == 2 and "models/no-such-model" in output
    assert "Traceback" not in output


def test_a_taskset_that_does_not_exist(model: Path, tmp_path: Path) -> None:
    code, output = launch(model, tmp_path, "--orchestrator.train", json.dumps([{"id": "no-such-taskset"}]))
    assert code == 2 and "no-such-taskset" in output
    assert "Traceback" not in output


def test_a_taskset_that_fails_on_import(model: Path, tmp_path: Path) -> None:
    package = tmp_path / "lib" / "broken_taskset"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the data file is gone')\n")
    code, output = launch(
        model, tmp_path, "--orchestrator.train", json.dumps([{"id": "broken_taskset"}]),
        env={"PYTHONPATH": str(package.parent)},
    )  # fmt: skip
    assert code == 2 and "broken_taskset" in output and "the data file is gone" in output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs needs privileges: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(model: Path, tmp_path: Path, small_disk: Path) -> None:
    code, output = launch(model, tmp_path, "--output-dir", str(small_disk))
    assert code == 2 and str(small_disk) in output and "MiB free" in output and "--output-dir" in output


def test_a_directory_that_cannot_be_made(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, output = launch(model, tmp_path, "--output-dir", str(tmp_path / "file"))
    assert code == 2 and str(tmp_path / "file") in output
    assert "Traceback" not in output
