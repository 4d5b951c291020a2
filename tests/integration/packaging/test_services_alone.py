"""Each service installs alone into a venv of its own and starts; router and orchestrator hold no torch there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# The two light services resolve for real, from their own requirements. The two heavy ones share torch and vLLM with
# the environment that runs this test (a second and third copy would be 5 GB): their venv holds the service and core
# only, and sees the rest through a path file, so that an import of another service still fails.
LIGHT = ["router", "orchestrator"]
HEAVY = ["trainer", "inference"]


def run(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        command, capture_output=True, text=True, timeout=280, env=environment, **kwargs
    )


def make_venv(directory: Path, service: str) -> Path:
    """A venv with ``service`` and core installed as wheels; returns its python."""
    assert run([sys.executable, "-m", "venv", str(directory)]).returncode == 0
    python = directory / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints" / "cpu.txt")]
    if service in HEAVY:
        install.append("--no-deps")
        site = next((directory / "lib").glob("python3*/site-packages"))
        theirs = [path for path in sys.path if path.endswith("site-packages")]
        # A plain path line: packages resolve, but editable hooks of the outer environment (.pth files) do not run.
        (site / "outer.pth").write_text("\n".join(theirs) + "\n")
        install += ["--no-build-isolation"]
    done = run([*install, str(ROOT / "packages" / "core"), str(ROOT / "services" / service)])
    assert done.returncode == 0, done.stderr
    return python


@pytest.mark.venv
@pytest.mark.parametrize("service", LIGHT + HEAVY)
def test_installs_alone_and_starts(service: str, tmp_path: Path) -> None:
    python = make_venv(tmp_path / "venv", service)

    helped = run([str(python), "-m", f"rollstream.{service}.main", "--help"], cwd=tmp_path)
    assert helped.returncode == 0, helped.stdout + helped.stderr
    assert "--bus" in helped.stdout

    others = sorted({"trainer", "orchestrator", "inference", "router", "cli"} - {service})
    probe = f"import importlib.util as u; print([n for n in {others} if u.find_spec('rollstream.' + n)])"
    assert run([str(python), "-c", probe], cwd=tmp_path).stdout.strip() == "[]"

    # Started for real where there is no run, bus or store: bad input, one message, exit code 2.
    urls = ["--bus.url", "nats://127.0.0.1:1", "--store.url", "redis://127.0.0.1:1/0"]
    patience = ["--bus.connect-timeout", "1", "--store.connect-timeout", "1"]
    where = ["--run-dir", str(tmp_path / "run")]
    started = run([str(python), "-m", f"rollstream.{service}.main", *urls, *patience, *where], cwd=tmp_path)
    assert started.returncode == 2, started.stdout + started.stderr
    assert "error:" in started.stderr
    assert "Traceback" not in started.stderr

    if service in LIGHT:
        holds_torch = run([str(python), "-c", "import importlib.util as u; print(u.find_spec('torch'))"], cwd=tmp_path)
        assert holds_torch.stdout.strip() == "None"
