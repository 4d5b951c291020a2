"""What is checked and made before anything is started: the configuration, the run directory, secrets."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from rollstream.cli.resolve import default_run_name, resolve
from rollstream.core.config import RlConfig
from rollstream.core.errors import UsageError
from rollstream.core.run import RunDir

MIN_FREE_BYTES = 64 * 1024 * 1024
"""Room that a run directory must have at launch; below it the bus could not even be opened."""

LEAST_FREE_BYTES = 4 * 1024 * 1024
"""Room below which a run is stopped while it goes on: a bus without room would hold every service back for ever."""


def check_configuration(config: RlConfig) -> None:
    """Raise ``UsageError`` for what no run could be made of."""
    resolve(config, Path(), "nats://unknown", "redis://unknown")
    if not config.orchestrator.train:
        raise UsageError(
            "no training source is configured",
            hint='add [[orchestrator.train]] with id = "…" to the configuration file',
        )


def open_run(config: RlConfig) -> RunDir:
    """Create the run's directory, or open it with ``--resume``. Raises ``UsageError`` when the two do not fit."""
    model = config.model or config.trainer.model
    name = config.run.name or default_run_name(config, model.name, secrets.token_hex(2))
    if Path(name).name != name:
        raise UsageError(f"run.name = {name!r} is not one directory name", hint="put folders into --output-dir")
    path = (config.output_dir / name).absolute()
    held = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if config.resume is not None and not held:
        raise UsageError(f"{path} holds no run to resume", hint="name one by --run.name, or drop --resume")
    if config.resume is None and held:
        raise UsageError(f"{path} is not empty", hint="go on with that run by --resume, or choose another --run.name")
    with writable(path):
        path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path).free
    if free < MIN_FREE_BYTES:
        raise UsageError(
            f"{path} has {free / 2**20:.0f} MiB free; a run needs {MIN_FREE_BYTES / 2**20:.0f} MiB at least",
            hint="free some space or choose another --output-dir",
        )
    return RunDir.open(path) if config.resume is not None else RunDir.create(path, name=name)


def check_room(path: Path) -> None:
    """Raise ``UsageError`` when the run's file system is about to be full."""
    free = shutil.disk_usage(path).free
    if free < LEAST_FREE_BYTES:
        raise UsageError(
            f"{path} has {free / 2**20:.1f} MiB free: the run was stopped before its records could suffer",
            hint="free some space, then go on with --resume",
        )


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn what the operating system says about the run directory into a usage error."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write to {error.filename or path}: {error.strerror or error}",
            hint="free some space there, or choose another --output-dir",
        ) from error


def read_secret(path: Path | None, field: str) -> str | None:
    """Content of a secret's file, without blanks around it."""
    if path is None:
        return None
    try:
        return path.read_text().strip()
    except OSError as error:
        raise UsageError(f"cannot read {field} {path}: {error.strerror}", hint="correct the path") from error
