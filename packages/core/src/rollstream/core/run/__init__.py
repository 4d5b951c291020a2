"""The run directory: paths, run.json, weights, the archive of the chain."""

from rollstream.core.run.archive import ArchiveDamaged, BatchArchive, archived_steps, read_archive, write_archive
from rollstream.core.run.directory import RunDir, RunInfo
from rollstream.core.run.files import DiskFull, atomic_write, sync_directory
from rollstream.core.run.weights import WeightFile, WeightsDamaged, WeightsManifest

__all__ = [
    "ArchiveDamaged",
    "BatchArchive",
    "DiskFull",
    "RunDir",
    "RunInfo",
    "WeightFile",
    "WeightsDamaged",
    "WeightsManifest",
    "archived_steps",
    "atomic_write",
    "read_archive",
    "sync_directory",
    "write_archive",
]
