"""Check a version directory before anything trusts it."""

from __future__ import annotations

from pathlib import Path

from rollstream.core.run import WeightsDamaged, WeightsManifest

HALF_LOADED = "model half loaded"
"""Stands in the message of an update that failed after it had touched the model. vLLM carries only messages across."""


def verified_files(directory: Path, digest: str = "") -> list[Path]:
    """The directory's files, each with the size and sha256 that its manifest promises.

    ``digest`` is the content digest of the weight notice ("" skips that comparison). Raises ``WeightsDamaged``.
    """
    manifest = WeightsManifest.read(directory)
    if digest and manifest.digest != digest:
        raise WeightsDamaged(f"{directory}: holds content {manifest.digest[:16]}, but {digest[:16]} was announced")
    manifest.verify(directory)
    return [directory / file.name for file in manifest.files]
