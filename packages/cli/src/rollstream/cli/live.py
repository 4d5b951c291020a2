"""What a launch shows while it runs: one screen on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from rollstream.cli.snapshot import Snapshot, number, one_line, versions, waiting

if TYPE_CHECKING:
    from rich.console import RenderableType

BARS = "▁▂▃▄▅▆▇█"

PLAIN_INTERVAL = 5.0
"""Seconds between plain lines while no step is made."""


class Screen(Protocol):
    """Shows snapshots and notes; a context manager."""

    def __enter__(self) -> Screen: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, snapshot: Snapshot) -> None: ...
    def note(self, line: str) -> None: ...


class PlainLines:
    """A line at each step, and one every few seconds in between; notes at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._step = 0
        self._said = -PLAIN_INTERVAL

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, snapshot: Snapshot) -> None:
        """Print the snapshot when it is news."""
        now = time.monotonic()
        if snapshot.step > self._step or now - self._said >= PLAIN_INTERVAL:
            self._step, self._said = snapshot.step, now
            self._print(one_line(snapshot))

    def note(self, line: str) -> None:
        """Something happened."""
        self._print(line)

    def _print(self, line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {line}", file=self._stream, flush=True)


class LiveScreen:
    """One screen that is redrawn in place, with the last notes below."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)
        self._notes: deque[str] = deque(maxlen=6)
        self._snapshot: Snapshot | None = None

    def __enter__(self) -> LiveScreen:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, snapshot: Snapshot) -> None:
        """Redraw."""
        self._snapshot = snapshot
        self._draw()

    def note(self, line: str) -> None:
        """Something happened: shown below the figures."""
        self._notes.append(f"{time.strftime('%H:%M:%S')} {line}")
        self._draw()

    def _draw(self) -> None:
        if self._snapshot is None:
            self._live.update("\n".join(self._notes))
        else:
            self._live.update(render(self._snapshot, list(self._notes)))


def render(snapshot: Snapshot, notes: list[str]) -> RenderableType:
    """The screen as a rich renderable."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column()
    for name, value in rows(snapshot):
        table.add_row(name, Text(value))
    parts: list[RenderableType] = [table]
    if notes:
        parts.append(Text("\n".join(notes), style="dim"))
    state = f"{snapshot.phase}{' (paused)' if snapshot.paused else ''}"
    return Panel(Group(*parts), title=f"{snapshot.run} · {state} · {snapshot.elapsed:,.0f} s", title_align="left")


def rows(snapshot: Snapshot) -> list[tuple[str, str]]:
    """The figures as (name, text) pairs."""
    replicas = [member for member in snapshot.members if member.role == "inference"]
    states = ", ".join(f"{member.id} {member.state} v{member.version} ({member.inflight} open)" for member in replicas)
    result = [
        ("step", f"{bar(snapshot.step, snapshot.max_steps)} {snapshot.step}/{snapshot.max_steps}"),
        ("reward", f"{number(snapshot.reward)}  {sparkline(snapshot.rewards)}"),
        ("held out", "  ".join(f"{name}: {_first_last(points)}" for name, points in snapshot.evals.items()) or "–"),
        ("versions", f"newest v{snapshot.newest_version}, committed batch {snapshot.committed}, "
                     f"serving {versions([member for member in replicas if member.state == 'ready'])}"),
        ("lag", f"mean {number(snapshot.lag_mean, 2)}, max {number(snapshot.lag_max, 0)} versions"),
        ("speed", f"{number(snapshot.tokens_per_second, 0)} tok/s, {number(snapshot.step_seconds, 2)} s a step, "
                  f"{number(snapshot.wait_for_batch_seconds, 2)} s of it waiting for the batch"),
        ("learning", f"grad norm {number(snapshot.grad_norm)}, mismatch KL {number(snapshot.mismatch_kl, 6)}, "
                     f"entropy {number(snapshot.entropy)}"),
        ("limit", snapshot.limit or "none binds"),
        ("replicas", states or "none yet"),
        ("waiting", "\n".join(waiting(wait) for wait in snapshot.waits) or "nobody"),
    ]  # fmt: skip
    if snapshot.restarts:
        result.append(("restarts", str(snapshot.restarts)))
    if snapshot.problem:
        result.append(("problem", snapshot.problem))
    return result


def bar(done: int, total: int, width: int = 30) -> str:
    """A progress bar in text."""
    filled = round(width * min(done / total, 1.0)) if total else 0
    return "█" * filled + "░" * (width - filled)


def sparkline(values: tuple[float, ...], width: int = 50) -> str:
    """The last values as small bars, scaled to their own range."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)


def _first_last(points: tuple[tuple[int, float], ...]) -> str:
    (first, before), (last, after) = points[0], points[-1]
    return f"{before:.3f} (step {first})" if first == last else f"{before:.3f} → {after:.3f} (step {last})"


def open_screen(live: bool) -> Screen:
    """The screen that fits where standard output goes."""
    return LiveScreen() if live and sys.stdout.isatty() else PlainLines(sys.stdout)
