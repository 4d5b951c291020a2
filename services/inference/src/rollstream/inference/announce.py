"""How an engine tells its agent where it serves: one line in a file that appears whole."""

from __future__ import annotations

import os
from pathlib import Path


def announce(path: Path, url: str) -> None:
    """Write ``url`` so that a reader sees all of it or nothing."""
    partial = path.with_suffix(".partial")
    partial.write_text(url + "\n")
    os.replace(partial, path)


def announced(path: Path) -> str | None:
    """The URL, or None while there is none."""
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None
