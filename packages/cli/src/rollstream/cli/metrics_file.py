"""Reading metrics.jsonl, also while it grows: trainer and orchestrator write their own lines for a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class MetricsFile:
    """The file as it stands and grows. Invariant: every complete line is taken once; a line in the making waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.steps: dict[int, Row] = {}

    def refresh(self) -> bool:
        """Take what was written since; returns whether there was anything. A file that is not there yet is empty."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return False
        end = data.rfind(b"\n") + 1
        self._offset += end
        for line in data[:end].splitlines():
            row = _parse(line)
            if row is not None:
                self.steps.setdefault(row["step"], {}).update(row)
        return end > 0

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of metric ``name`` where it was written, by step."""
        return [(step, float(row[name])) for step, row in sorted(self.steps.items()) if _number(row.get(name))]

    def latest(self, name: str) -> float | None:
        """The newest value of metric ``name``."""
        series = self.series(name)
        return series[-1][1] if series else None

    def names(self) -> set[str]:
        """Every metric name that occurs."""
        return {name for row in self.steps.values() for name in row}


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
