"""An attempt's directories, links and records."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from rollstream.cli.attempt import open_attempt, record_command, write_resolved
from rollstream.core.config import RouterConfig


def test_attempts_count_up_and_latest_follows(tmp_path: Path) -> None:
    first, second = open_attempt(tmp_path), open_attempt(tmp_path)
    assert (first.number, second.number) == (1, 2)
    assert (tmp_path / "configs" / "latest").resolve() == second.configs.resolve()
    assert (tmp_path / "logs" / "latest").resolve() == second.logs.resolve()
    assert not (tmp_path / "logs" / "latest").readlink().is_absolute()


def test_logs_are_where_the_design_puts_them(tmp_path: Path) -> None:
    attempt = open_attempt(tmp_path)
    assert attempt.log("trainer") == attempt.logs / "trainer.log"
    assert attempt.log("inference-1") == attempt.logs / "inference" / "1.log"
    assert attempt.log("env-worker-0") == attempt.logs / "envs" / "0.log"


def test_the_command_is_kept_shell_safe_without_credentials(tmp_path: Path) -> None:
    file = tmp_path / "my run.toml"
    file.write_text("max_steps = 3\n")
    attempt = open_attempt(tmp_path / "run")
    record_command(attempt, "rl", ["@", str(file), "--bus.url", "nats://me:secret@host:4222", "--run.name", "a b"])
    command = (attempt.configs / "command.txt").read_text()
    assert "'a b'" in command and "nats://***@host:4222" in command and "secret" not in command
    assert (attempt.configs / "rl.toml").read_text() == "max_steps = 3\n"


def test_resolved_files_are_private_and_complete(tmp_path: Path) -> None:
    attempt = open_attempt(tmp_path)
    write_resolved(attempt, {"router": RouterConfig(port=81)})
    path = attempt.resolved("router")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["port"] == 81
    assert RouterConfig.model_validate_json(path.read_text()) == RouterConfig(port=81)
