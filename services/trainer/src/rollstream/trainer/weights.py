"""Policy versions as files: ``weights/<timeline>/v<version>/`` with safetensors and, last, their manifest."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from rollstream.core.errors import RollstreamError
from rollstream.core.run import RunDir, WeightsDamaged, WeightsManifest, atomic_write, sync_directory
from rollstream.trainer.disk import writing

SHARD_BYTES = 4 << 30
ENVIRONMENT = "environment.json"
_NAME = re.compile(r"v(\d+)")


@dataclass(frozen=True)
class Written:
    """A version that is whole on disk. ``location`` is relative to the run directory."""

    location: str
    nbytes: int
    digest: str


class WeightFiles:
    """The version directories of one run; used by rank 0 alone.

    Invariant: a directory appears under its name only when it is whole; one that already holds the same content is
    left alone (a replica may be reading it). v0 never goes, and carries the model's config and what computed it.
    """

    def __init__(self, run: RunDir, keep_last: int) -> None:
        self._run = run
        self._keep_last = keep_last

    def write(
        self, timeline: int, version: int, state: Mapping[str, Tensor], config: Any, environment: dict[str, str | int]
    ) -> Written:
        """Write v{version}; ``config`` (transformers) and ``environment`` go beside v0. Raises ``DiskFull``."""
        final = self._run.version(timeline, version)
        draft = final.with_name(f".v{version}.partial")
        try:
            shutil.rmtree(draft, ignore_errors=True)
            with writing(self._run.path):
                draft.mkdir(parents=True)
                manifest = WeightsManifest.of(draft, timeline, version, _save(draft, state))
                if not _holds(final, manifest):
                    if version == 0:
                        config.save_pretrained(draft)
                        atomic_write(draft / ENVIRONMENT, json.dumps(environment, indent=2).encode())
                    manifest.write(draft)
                    _move_in(draft, final, durable=version == 0)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return Written(str(final.relative_to(self._run.path)), manifest.nbytes, manifest.digest)

    def prune(self, timeline: int, newest: int) -> None:
        """Delete versions that are more than ``keep_last`` behind ``newest``, except v0."""
        for path in self._run.version(timeline, newest).parent.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and 0 < int(match[1]) < newest - self._keep_last:
                _discard(path)


def read_version(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a version directory, after its hashes were compared; raises ``WeightsDamaged``."""
    manifest = WeightsManifest.read(directory)
    manifest.verify(directory)
    state: dict[str, Tensor] = {}
    for file in manifest.files:
        state |= load_file(directory / file.name)
    return state


def save_version(directory: Path, timeline: int, version: int, state: Mapping[str, Tensor], config: Any) -> None:
    """A version directory anywhere, with the model's config beside it; what it holds already is replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    WeightsManifest.of(directory, timeline, version, _save(directory, state)).write(directory)


def digest_of(state: Mapping[str, Tensor], scratch: Path) -> str:
    """The content digest that these weights have as a version directory; ``scratch`` is an empty directory to use."""
    names = _save(scratch, state)
    try:
        return WeightsManifest.of(scratch, 0, 0, names).digest
    finally:
        for name in names:
            (scratch / name).unlink()


def read_environment(directory: Path) -> dict[str, str | int]:
    """What computed the run, from its v0 directory; raises :class:`RollstreamError` when it is gone."""
    try:
        found: dict[str, str | int] = json.loads((directory / ENVIRONMENT).read_bytes())
    except (OSError, ValueError) as error:
        raise RollstreamError(f"{directory / ENVIRONMENT} cannot be read ({error})") from error
    return found


def _save(directory: Path, state: Mapping[str, Tensor]) -> list[str]:
    """Write the tensors in files of at most :data:`SHARD_BYTES`, in sorted order, and return the file names."""
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name in sorted(state):
        size = state[name].nbytes
        if size > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = state[name]
        room -= size
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, directory / name, metadata={"format": "pt"})
    return names


def _holds(directory: Path, manifest: WeightsManifest) -> bool:
    """Whether ``directory`` is whole and has this content."""
    try:
        standing = WeightsManifest.read(directory)
        standing.verify(directory)
    except WeightsDamaged:
        return False
    return standing.digest == manifest.digest


def _move_in(draft: Path, final: Path, *, durable: bool) -> None:
    if final.exists():
        _discard(final)
    if durable:
        for path in draft.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(draft)
    draft.rename(final)
    if durable:
        sync_directory(final.parent)


def _discard(directory: Path) -> None:
    hidden = directory.with_name(f".{directory.name}.discarded")
    shutil.rmtree(hidden, ignore_errors=True)
    directory.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
