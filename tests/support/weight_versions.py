"""Version directories as the trainer writes them, for tests of whoever loads them."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from rollstream.core.wire import WeightNotice


def write_version(
    run_dir: Path, timeline: int, version: int, content: bytes = b"", *, flip: bool = False
) -> WeightNotice:
    """Write ``content`` (safetensors bytes; made up when empty) as a version and return its notice.

    ``flip`` damages the last byte after the manifest was made.
    """
    content = content or f"weights {timeline}:{version}".encode()
    directory = run_dir / "weights" / str(timeline) / f"v{version}"
    directory.mkdir(parents=True)
    digest = hashlib.sha256(content).hexdigest()
    entry = {"name": "model.safetensors", "bytes": len(content), "sha256": digest}
    manifest = {"timeline": timeline, "version": version, "files": [entry], "digest": digest}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    written = content[:-1] + bytes([content[-1] ^ 1]) if flip else content
    (directory / "model.safetensors").write_bytes(written)
    return WeightNotice(
        timeline=timeline, version=version, transport="filesystem", location=str(directory.relative_to(run_dir)),
        nbytes=len(content), digest=digest, created=time.time_ns(),
    )
