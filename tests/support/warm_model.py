"""The warmed-up model of the reverse-text example, made once under models/ as `make demo` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "reverse-text"


def warm_model() -> Path:
    """Directory of the model; about 40 s of training when it is not there yet."""
    model = ROOT / "models" / "reverse-text"
    if not (model / "config.json").exists():
        subprocess.run(
            [sys.executable, str(EXAMPLE / "warmup.py"), "--out", str(model)], cwd=ROOT, check=True, timeout=280
        )
    return model
