"""Version directories as the trainer writes them, for tests of whoever loads them."""

from __future__ import annotations

import time
from pathlib import Path

from rollstream.core.run import WeightsManifest
from rollstream.core.wire import WeightNotice

NAME = "model.safetensors"


def write_version(
    run_dir: Path, timeline: int, version: int, content: bytes = b"", *, flip: bool = False
) -> WeightNotice:
    """Write ``content`` (safetensors bytes; made up when empty) as a version and return its notice.

    ``flip`` damages the last byte after the manifest was made.
    """
    content = content or f"weights {timeline}:{version}".encode()
    directory = run_dir / "weights" / str(timeline) / f"v{version}"
    directory.mkdir(parents=True)
    (directory / NAME).write_bytes(content)
    manifest = WeightsManifest.of(directory, timeline, version, [NAME])
    manifest.write(directory)
    if flip:
        (directory / NAME).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return WeightNotice(
        timeline=timeline, version=version, transport="filesystem", location=str(directory.relative_to(run_dir)),
        nbytes=manifest.nbytes, digest=manifest.digest, created=time.time_ns(),
    )  # fmt: skip
