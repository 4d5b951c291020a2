"""The run directory: one place for every path in it, and run.json that says whose it is."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollstream.core.errors import UsageError
from rollstream.core.run.files import atomic_write


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """run.json. ``run_id`` is random and names the streams and keys of the run; ``created`` is Unix seconds."""

    run_id: str
    name: str
    created: float
    timeline: int = 1
    format: int = 1


@dataclass(frozen=True)
class RunDir:
    """A run directory that carries a valid run.json. Immutable; holds no open files."""

    path: Path
    info: RunInfo

    @classmethod
    def create(cls, path: Path, *, name: str | None = None) -> RunDir:
        """Make ``path`` a new run; raises :class:`UsageError` when it already is one or cannot be written."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{path} cannot be made: {error.strerror or error}", hint="choose another --output-dir"
            ) from error
        if (path / "run.json").exists():
            raise UsageError(f"{path} already holds a run", hint="go on with --resume, or choose another name")
        info = RunInfo(run_id=secrets.token_hex(6), name=name or path.name, created=time.time())
        atomic_write(path / "run.json", msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n")
        return cls(path, info)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open an existing run; raises :class:`UsageError` for a foreign or unreadable directory."""
        file = path / "run.json"
        try:
            info = msgspec.json.decode(file.read_bytes(), type=RunInfo)
        except FileNotFoundError:
            raise UsageError(
                f"{path} is not a run directory: it has no run.json", hint="name the directory of a run"
            ) from None
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise UsageError(
                f"{file} cannot be read ({error})", hint="restore it; the run itself is untouched"
            ) from error
        if info.format != RunInfo.__struct_defaults__[-1]:
            raise UsageError(
                f"{file} has format {info.format}, this release reads 1", hint="use the release that made the run"
            )
        return cls(path, info)

    @property
    def run_id(self) -> str:
        """Random id: streams, keys and subjects carry it."""
        return self.info.run_id

    @property
    def name(self) -> str:
        """What people call the run."""
        return self.info.name

    @property
    def timeline(self) -> int:
        """The timeline that is trained."""
        return self.info.timeline

    @property
    def metrics(self) -> Path:
        """metrics.jsonl."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Directory of step_<n>/ checkpoints."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Directory of one checkpoint."""
        return self.checkpoints / f"step_{step}"

    @property
    def weights(self) -> Path:
        """Directory of published weights."""
        return self.path / "weights"

    def version(self, timeline: int, version: int) -> Path:
        """Directory of one policy version."""
        return self.weights / str(timeline) / f"v{version}"

    @property
    def batches(self) -> Path:
        """Directory of the archived chain."""
        return self.path / "batches"

    def batch(self, step: int) -> Path:
        """Archive of one batch."""
        return self.batches / f"step_{step}.msgpack"

    @property
    def rollouts(self) -> Path:
        """Directory of readable traces."""
        return self.path / "rollouts"

    @property
    def logs(self) -> Path:
        """Log directory of the present attempt."""
        latest = self.path / "logs" / "latest"
        return latest if latest.exists() else self.path / "logs"

    def engine_log(self, replica: str) -> Path:
        """Log of one replica's engine."""
        return self.logs / "inference" / f"{replica}.engine.log"
