"""Where metrics go: metrics.jsonl and W&B. A monitor can fail; a run never stops because of one."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import structlog

from rollstream.core.config import MonitorsConfig, WandbMonitorConfig

_log = structlog.get_logger(__name__)


class Monitor(Protocol):
    """Takes the metrics of a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class FileMonitor:
    """Appends one JSON object a line with ``step`` and ``time`` to metrics.jsonl.

    Several processes write one file: each line is a single O_APPEND write, so lines never mix. Values that are not
    finite are written as null.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, "time": round(time.time(), 3), **values}) + "\n"
        os.write(self._descriptor, line.encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class WandbMonitor:
    """One W&B run that all processes of a run share (``wandb_id`` names it).

    The API key comes from W&B's own environment or files and is never read here. Raises whatever W&B raises at start;
    :class:`MonitorGroup` turns that into a warning.
    """

    def __init__(
        self, config: WandbMonitorConfig, *, name: str, wandb_id: str, label: str, directory: Path, primary: bool
    ) -> None:
        import wandb

        offline = config.offline or os.environ.get("WANDB_MODE") == "offline"
        # Two offline writers cannot share a run: each records its own, under the same id, for one later sync.
        mode: Literal["offline", "shared"] = "offline" if offline else "shared"
        self._run = wandb.init(
            project=config.project, entity=config.entity, name=config.name or name, id=wandb_id, dir=str(directory),
            mode=mode, resume=None if offline else "allow",
            settings=wandb.Settings(
                init_timeout=30, console="off", x_label=label, x_primary=primary or offline, silent=True,
                x_update_finish_state=primary, disable_git=True, save_code=False,
            ),
        )  # fmt: skip

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the metrics to W&B's own process."""
        # The step is a value of its own: processes of one run log out of order, and W&B drops steps that go back.
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Finish this process's part."""
        self._run.finish()


class MonitorGroup:
    """All monitors of one process. Invariant: a monitor that fails is dropped with a warning; nothing is raised."""

    def __init__(self, monitors: Mapping[str, Callable[[], Monitor]]) -> None:
        self._monitors: dict[str, Monitor] = {}
        for name, build in monitors.items():
            try:
                self._monitors[name] = build()
            except Exception as error:
                _warn(name, "start", error)

    @classmethod
    def from_config(
        cls,
        config: MonitorsConfig,
        *,
        metrics_path: Path,
        run_name: str,
        run_id: str,
        component: str,
        primary: bool = False,
    ) -> MonitorGroup:
        """The monitors that ``config`` turns on. ``primary`` marks the process that owns the shared W&B run."""
        wanted: dict[str, Callable[[], Monitor]] = {}
        if config.file.enabled:
            wanted["file"] = lambda: FileMonitor(metrics_path)
        wandb_config = config.wandb
        if wandb_config is not None:
            wanted["wandb"] = lambda: WandbMonitor(
                wandb_config,
                name=run_name,
                wandb_id=run_id,
                label=component,
                directory=metrics_path.parent,
                primary=primary,
            )
        return cls(wanted)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give ``metrics`` of ``step`` to every monitor."""
        for name in list(self._monitors):
            self._attempt(name, "log", lambda monitor: monitor.log(step, metrics))

    def close(self) -> None:
        """Close every monitor."""
        for name in list(self._monitors):
            self._attempt(name, "close", lambda monitor: monitor.close())
        self._monitors.clear()

    def _attempt(self, name: str, verb: str, action: Callable[[Monitor], Any]) -> None:
        try:
            action(self._monitors[name])
        except Exception as error:
            del self._monitors[name]
            _warn(name, verb, error)


def _warn(name: str, verb: str, error: Exception) -> None:
    # Only the type: the message of an authentication error may quote a key.
    _log.warning(f"the {name} monitor failed to {verb}; training goes on without it", error=type(error).__name__)
