"""An attempt: one launch of a run, with its own configurations and logs beside those of earlier launches."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollstream.core.config import ComponentConfig

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


@dataclass(frozen=True)
class Attempt:
    """Directories of launch number ``number`` (1-indexed) of the run in ``run_dir``."""

    run_dir: Path
    number: int

    @property
    def configs(self) -> Path:
        """``configs/attempt_<n>``."""
        return self.run_dir / "configs" / f"attempt_{self.number}"

    @property
    def logs(self) -> Path:
        """``logs/attempt_<n>``."""
        return self.run_dir / "logs" / f"attempt_{self.number}"

    def log(self, component: str) -> Path:
        """Where ``component`` logs; replicas and env workers have folders of their own."""
        role, _, index = component.rpartition("-")
        folder = {"inference": "inference", "env-worker": "envs"}.get(role)
        return self.logs / folder / f"{index}.log" if folder else self.logs / f"{component}.log"

    def resolved(self, component: str) -> Path:
        """The resolved configuration that ``component`` is started with."""
        return self.configs / "resolved" / f"{component}.json"


def open_attempt(run_dir: Path) -> Attempt:
    """Make the directories of the next attempt and point ``configs/latest`` and ``logs/latest`` to it."""
    taken = [int(path.name.removeprefix("attempt_")) for path in (run_dir / "configs").glob("attempt_*")
             if path.name.removeprefix("attempt_").isdigit()]  # fmt: skip
    attempt = Attempt(run_dir, max(taken, default=0) + 1)
    (attempt.configs / "resolved").mkdir(parents=True)
    attempt.logs.mkdir(parents=True)
    for target in (attempt.configs, attempt.logs):
        link = target.with_name(".latest")
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        link.replace(target.with_name("latest"))
    return attempt


def record_command(attempt: Attempt, entry: str, argv: Sequence[str]) -> None:
    """Keep what was asked for: the command line (without credentials) and copies of the files it names."""
    command = shlex.join(["rollstream", entry, *argv])
    (attempt.configs / "command.txt").write_text(_CREDENTIALS.sub("***", command) + "\n")
    files = [Path(after) for sign, after in itertools.pairwise(argv) if sign == "@"]
    for index, path in enumerate(files):
        name = entry if len(files) == 1 else f"{entry}.{index}"
        shutil.copyfile(path, attempt.configs / f"{name}{path.suffix}")


def write_resolved(attempt: Attempt, components: Mapping[str, ComponentConfig]) -> None:
    """One JSON file a component. They can hold server credentials: readable by their owner alone."""
    for name, config in components.items():
        path = attempt.resolved(name)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(config.model_dump_json(indent=2) + "\n")
