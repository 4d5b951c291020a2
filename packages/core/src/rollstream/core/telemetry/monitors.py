"""Where metrics go: metrics.jsonl and W&B. A monitor can fail; a run never stops because of one."""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Protocol

import structlog

from rollstream.core.config import MonitorsConfig, WandbMonitorConfig

WANDB_START_SECONDS = 30
WANDB_CLOSE_SECONDS = 15.0

_log = structlog.get_logger(__name__)


class Monitor(Protocol):
    """Takes the metrics of a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class FileMonitor:
    """Appends one JSON object a line with ``step`` and ``time`` to metrics.jsonl.

    Several processes write one file: a lock is held for the moment of a write (the kernel frees it when its holder
    dies), so lines never mix. Values that are not finite are written as null. A line that a crash or a full disk cut
    off is ended first, so that it takes no other with it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line; ``OSError`` when it could not be written whole."""
        values = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, "time": round(time.time(), 3), **values}).encode() + b"\n"
        # Without the lock, another's half-written line would look like a torn one.
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            if self._torn():
                line = b"\n" + line
            if os.write(self._descriptor, line) != len(line):
                raise OSError("no room for the line")
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _torn(self) -> bool:
        size = os.fstat(self._descriptor).st_size
        return size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class WandbMonitor:
    """One W&B run that all processes of a run share (``wandb_id`` names it).

    Lifecycle: starts, takes metrics and finishes on one thread of its own, so that W&B (its start waits 30 s for a
    server that is away) never holds up the caller; :meth:`close` waits for it, with a deadline.
    Invariants: a failure is one warning, after which metrics are dropped. The API key comes from W&B's own environment
    or files and is never read here. Raises ``ImportError`` where wandb is not installed.
    """

    def __init__(
        self, config: WandbMonitorConfig, *, name: str, wandb_id: str, label: str, directory: Path, primary: bool
    ) -> None:
        import wandb

        offline = config.offline or os.environ.get("WANDB_MODE") == "offline"
        # Two offline writers cannot share a run: each records its own, under the same id, for one later sync.
        mode: Literal["offline", "shared"] = "offline" if offline else "shared"
        self._start: Callable[[], Any] = lambda: wandb.init(
            project=config.project, entity=config.entity, name=config.name or name, id=wandb_id, dir=str(directory),
            mode=mode, resume=None if offline else "allow",
            settings=wandb.Settings(
                init_timeout=WANDB_START_SECONDS, console="off", x_label=label, x_primary=primary or offline,
                silent=True, x_update_finish_state=primary, disable_git=True, save_code=False,
            ),
        )  # fmt: skip
        self._waiting: SimpleQueue[dict[str, float] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the metrics over."""
        if self._thread.is_alive():
            # The step is a value of its own: processes of one run log out of order, and W&B drops steps that go back.
            self._waiting.put({"step": step, **metrics})

    def close(self) -> None:
        """Finish this process's part."""
        self._waiting.put(None)
        self._thread.join(WANDB_CLOSE_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"W&B did not take the last metrics within {WANDB_CLOSE_SECONDS:g} s")

    def _work(self) -> None:
        try:
            run = self._start()
            while (metrics := self._waiting.get()) is not None:
                run.log(metrics)
            run.finish()
        except Exception as error:
            _warn("wandb", "go on", error)


class MonitorGroup:
    """All monitors of one process.

    Invariants: nothing is raised. A monitor that does not start is left out; one that fails later is tried again with
    the next metrics (a disk is freed, a server comes back). Each failure in a row is warned about once.
    """

    def __init__(self, monitors: Mapping[str, Callable[[], Monitor]]) -> None:
        self._monitors: dict[str, Monitor] = {}
        self._failing: set[str] = set()
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
        for name in self._monitors:
            self._attempt(name, "log", lambda monitor: monitor.log(step, metrics))

    def close(self) -> None:
        """Close every monitor."""
        for name in self._monitors:
            self._attempt(name, "close", lambda monitor: monitor.close())
        self._monitors.clear()

    def _attempt(self, name: str, verb: str, action: Callable[[Monitor], Any]) -> None:
        try:
            action(self._monitors[name])
            self._failing.discard(name)
        except Exception as error:
            if name not in self._failing:
                self._failing.add(name)
                _warn(name, verb, error)


_WAY_OUT = {
    "file": "free some space; lines are written again as soon as there is room",
    "wandb": "see wandb/debug.log in the run directory; `wandb login`, WANDB_API_KEY, or wandb.offline = true",
}


def _warn(name: str, verb: str, error: Exception) -> None:
    # Only the type: the message of an authentication error may quote a key.
    _log.warning(
        f"the {name} monitor failed to {verb}; training goes on without it",
        error=type(error).__name__, hint=_WAY_OUT.get(name, ""),
    )  # fmt: skip
