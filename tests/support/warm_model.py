"""The warmed-up model of the reverse-text example, made once under models/ as `make demo` does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "reverse-text"


def warm_model() -> Path:
    """Directory of the model; about 40 s of training when it is not there yet."""
    model = ROOT / "models" / "reverse-text"
    found = importlib.util.spec_from_file_location("reverse_text_recipe", EXAMPLE / "recipe.py")
    assert found is not None and found.loader is not None
    recipe = importlib.util.module_from_spec(found)
    found.loader.exec_module(recipe)
    if not recipe.is_current(model):
        command = [sys.executable, str(EXAMPLE / "warmup.py"), "--out", str(model)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=400)
    return model
