"""Check a version directory against its manifest before anything trusts it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

HALF_LOADED = "model half loaded"
"""Stands in the message of an update that failed after it had touched the model. vLLM carries only messages across."""


class WeightsError(ValueError):
    """A version directory is incomplete or damaged. The message names the file and the way out."""


def verify(directory: Path, digest: str = "") -> list[Path]:
    """The directory's safetensors files, each with the size and sha256 that manifest.json promises.

    ``digest`` is the content digest of the weight notice ("" skips that comparison). Raises :class:`WeightsError`.
    """
    manifest_path = directory / "manifest.json"
    try:
        manifest = json.loads(manifest_path.read_bytes())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{manifest_path}: cannot be read ({error}); wait for the trainer's next version") from error
    if digest and manifest.get("digest") != digest:
        raise WeightsError(f"{manifest_path}: digest {manifest.get('digest')}, but {digest} was announced")
    files = []
    for entry in manifest["files"]:
        path = directory / entry["name"]
        try:
            size = path.stat().st_size
        except OSError as error:
            raise WeightsError(f"{path}: {error.strerror}, though the manifest lists it") from error
        if size != entry["bytes"]:
            raise WeightsError(f"{path}: {size} bytes, the manifest promises {entry['bytes']}")
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != entry["sha256"]:
            raise WeightsError(f"{path}: sha256 {found}, the manifest promises {entry['sha256']}")
        files.append(path)
    return files
