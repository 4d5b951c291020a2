"""Checkpoints: shards by torch DCP, the orchestrator's state, and a manifest that is written last.

``checkpoints/step_<n>/{trainer/,orchestrator.msgpack,manifest.json}``. A directory is written under a hidden name
and renamed when it is complete. Only one with a manifest whose sizes and hashes hold counts.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from rollstream.core import failpoints
from rollstream.core.errors import RollstreamError
from rollstream.core.run import atomic_write, sync_directory
from rollstream.core.run.weights import sha256_of
from rollstream.trainer.disk import writing
from rollstream.trainer.model import Policy
from rollstream.trainer.ranks import Ranks

MANIFEST = "manifest.json"
ORCHESTRATOR = "orchestrator.msgpack"
SHARDS = "trainer"
_NAME = re.compile(r"step_(\d+)")


class CheckpointError(RollstreamError):
    """A checkpoint cannot be read into this trainer."""


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint: path relative to it, size, content."""

    name: str
    bytes: int
    sha256: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds. ``commit`` is the digest of batch ``step``, ``weights`` that of v{step}."""

    step: int
    timeline: int
    commit: str
    weights: str
    config_digest: str
    world: int
    environment: dict[str, str | int] = {}
    files: tuple[FileEntry, ...] = ()


@dataclass(frozen=True)
class Found:
    """A checkpoint that validates."""

    directory: Path
    manifest: CheckpointManifest


def validate(directory: Path) -> CheckpointManifest | None:
    """The manifest of a whole checkpoint; None when anything is missing, or its size or hash is not as promised."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=CheckpointManifest)
    except (OSError, msgspec.DecodeError):
        return None
    for entry in manifest.files:
        path = directory / entry.name
        if not path.is_file() or path.stat().st_size != entry.bytes or sha256_of(path) != entry.sha256:
            return None
    return manifest


def candidates(root: Path) -> list[tuple[int, Path]]:
    """(step, directory) of everything that looks like a checkpoint, newest first; hidden and foreign names are not."""
    if not root.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def latest(root: Path) -> Found | None:
    """The newest checkpoint under ``root`` that validates."""
    for _, path in candidates(root):
        manifest = validate(path)
        if manifest is not None:
            return Found(path, manifest)
    return None


class Checkpoints:
    """Writes, reads and thins out the checkpoints of one run.

    :meth:`save` and :meth:`load` are collectives: every rank calls them with the same step. Invariant: at each moment
    the newest complete checkpoint stays; older ones go only after a newer one is complete.
    """

    def __init__(self, root: Path, ranks: Ranks, keep_last: int) -> None:
        self._root = root
        self._ranks = ranks
        self._keep_last = keep_last

    def save(self, policy: Policy, optimizer: Optimizer, manifest: CheckpointManifest, orchestrator: bytes) -> Path:
        """Write ``step_<n>`` and return it; an older directory of that name is replaced once the new one is whole."""
        final = self._root / f"step_{manifest.step}"
        temporary = self._root / f".step_{manifest.step}.partial"
        if self._ranks.is_lead:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self._ranks.barrier()
        model, optim = get_state_dict(policy, optimizer)
        try:
            with writing(self._root):
                _save_shards({"model": model, "optim": optim}, temporary / SHARDS)
        except RollstreamError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        failpoints.hit("mid_checkpoint")
        self._ranks.barrier()
        if self._ranks.is_lead:
            atomic_write(temporary / ORCHESTRATOR, orchestrator)
            manifest = msgspec.structs.replace(manifest, files=_entries(temporary))
            atomic_write(temporary / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2))
            if final.exists():
                _discard(final)
            temporary.rename(final)
            sync_directory(self._root)
            self._thin_out()
        self._ranks.barrier()
        return final

    def load(self, found: Found, policy: Policy, optimizer: Optimizer) -> None:
        """Read a checkpoint into model and optimiser, whatever world size wrote it; raises :class:`CheckpointError`."""
        model, optim = get_state_dict(policy, optimizer)
        state: dict[str, Any] = {"model": model, "optim": optim}
        try:
            load(state, checkpoint_id=found.directory / SHARDS)
        except (RuntimeError, ValueError, KeyError, CheckpointException) as error:
            raise CheckpointError(
                f"checkpoint {found.directory} does not fit this model: {str(error).splitlines()[0]}",
                hint="resume with the model and optimiser that wrote it, or start a new run",
            ) from error
        set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    def _thin_out(self) -> None:
        whole = [path for _, path in candidates(self._root) if (path / MANIFEST).is_file()]
        for path in whole[self._keep_last :]:
            _discard(path)


def _save_shards(state: dict[str, Any], directory: Path) -> None:
    try:
        save(state, checkpoint_id=directory)
    except CheckpointException as error:  # a BaseException, which nobody above expects
        raise CheckpointError(f"checkpoint {directory.parent} cannot be written: {error}") from error


def _entries(directory: Path) -> tuple[FileEntry, ...]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return tuple(FileEntry(str(path.relative_to(directory)), path.stat().st_size, sha256_of(path)) for path in files)


def _discard(directory: Path) -> None:
    """Remove a directory so that no moment shows half of it under its own name."""
    hidden = directory.with_name(f".{directory.name}.discarded")
    shutil.rmtree(hidden, ignore_errors=True)
    directory.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
