"""W&B, the real client: offline it records, and whatever it cannot do is one warning and no waiting.

Each case runs in a process of its own: wandb keeps global state and ends with its process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KEY = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
import json, os, sys, time
from pathlib import Path
from rollstream.core.config import LogConfig, MonitorsConfig
from rollstream.core.telemetry import MonitorGroup, configure_logging
configure_logging(LogConfig(), "trainer")
config = MonitorsConfig.model_validate(json.loads(sys.argv[2]))
path = Path(sys.argv[1])
began = time.monotonic()
monitors = MonitorGroup.from_config(
    config, metrics_path=path / "metrics.jsonl", run_name="demo", run_id="abc123", component="trainer", primary=True)
for step in range(1, 4):
    monitors.log(step, {"optim/grad_norm": step / 2})
print("logged after", time.monotonic() - began, flush=True)
if "settle" in sys.argv:
    time.sleep(float(sys.argv[-1]))
monitors.close()
print(config.model_dump_json(), flush=True)
if "leave" in sys.argv:
    os._exit(0)  # wandb's exit hooks wait for the rest of its 30 s
"""


def run(directory: Path, wandb: dict[str, object], *arguments: str, **environment: str) -> tuple[str, str, float]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory), json.dumps({"wandb": wandb}), *arguments],
        env={**clean, "HOME": str(directory), "NETRC": str(directory / "none"), **environment},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3], "the run's own file has everything whatever W&B does"
    return done.stdout, done.stderr, float(done.stdout.split("logged after ")[1].split()[0])


def recorded(directory: Path) -> bytes:
    [file] = directory.glob("wandb/offline-run-*/run-abc123.wandb")
    return file.read_bytes()


@pytest.mark.parametrize("mode", [{"WANDB_MODE": "offline"}, {}], ids=["by its variable", "by the configuration"])
def test_offline_it_records_on_disk(tmp_path: Path, mode: dict[str, str]) -> None:
    _, errors, _ = run(tmp_path, {"project": "p", "offline": not mode}, WANDB_API_KEY=KEY, **mode)
    data = recorded(tmp_path)
    assert data.count(b"optim/grad_norm") >= 3 and b"1.5" in data, "all three steps"
    assert "monitor failed" not in errors


def test_a_server_that_is_away_holds_nobody_up(tmp_path: Path) -> None:
    output, errors, seconds = run(tmp_path, {}, "leave", WANDB_BASE_URL="http://127.0.0.1:1", WANDB_API_KEY=KEY)
    assert seconds < 10, "W&B itself waits 30 s for it"
    assert errors.count("the wandb monitor failed to close") == 1 and "training goes on" in errors
    assert KEY not in output + errors


@pytest.mark.parametrize("key", ["too-short-a-key", ""])
def test_a_refused_or_missing_key_is_one_warning(tmp_path: Path, key: str) -> None:
    environment = {"WANDB_API_KEY": key} if key else {}
    output, errors, _ = run(tmp_path, {}, "settle", "5", WANDB_BASE_URL="http://127.0.0.1:1", **environment)
    assert errors.count("the wandb monitor failed") == 1 and "WANDB_API_KEY" in errors
    assert not key or key not in output + errors


def test_the_key_reaches_no_file_of_ours(tmp_path: Path) -> None:
    run(tmp_path, {"project": "p", "offline": True}, WANDB_API_KEY=KEY)
    holding = [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert holding == []
