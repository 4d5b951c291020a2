"""Which recipe made a model: a kept model is used again only while its recipe stands. Imports nothing heavy."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

STEPS = 220
"""Optimiser steps of the warm-up."""

BATCH_SIZE = 256
"""Demonstrations a step."""

STAMP = "recipe.sha256"
"""File in the model's directory that holds the digest of the recipe that made it."""


def digest(steps: int = STEPS, batch_size: int = BATCH_SIZE) -> str:
    """SHA-256 over everything here that decides the warmed-up weights: model, demonstrations, phrases and amounts."""
    found = find_spec("reverse_text")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("reverse_text is not installed: pip install ./environments/reverse_text")
    here, taskset = Path(__file__).resolve().parent, Path(found.origin).parent
    sources = [here / "model.py", here / "warmup.py", taskset / "phrases.py", taskset / "data" / "sentences.txt"]
    whole = hashlib.sha256(f"{steps} {batch_size}".encode())
    for source in sources:
        whole.update(hashlib.sha256(source.read_bytes()).digest())
    return whole.hexdigest()


def is_current(model: Path) -> bool:
    """Whether ``model`` was made by the recipe as it is now."""
    stamp = model / STAMP
    return stamp.exists() and stamp.read_text(encoding="utf-8").strip() == digest()
