"""The bus: durable records on NATS JetStream."""

from rollstream.core.bus.chain import ChainReader, CommitChain, commit_of, with_chain
from rollstream.core.bus.chain_state import ChainHead, Lineage
from rollstream.core.bus.commands import CommandFailed, Commands
from rollstream.core.bus.connection import Bus, PutResult, Stored
from rollstream.core.bus.errors import (
    BlobMissing,
    BusClosed,
    BusUnavailable,
    ChainBroken,
    ChainRewound,
    DigestMismatch,
    RecordsLost,
    RecordTooLarge,
    StaleWriter,
    StreamMismatch,
    StreamMissing,
)
from rollstream.core.bus.intent import Intent, IntentStore, Phase
from rollstream.core.bus.leases import EpisodeLease, EpisodeQueue
from rollstream.core.bus.reader import Reader
from rollstream.core.bus.streams import STREAMS, StreamSettings
from rollstream.core.bus.subjects import Subjects, group_id, token
from rollstream.core.bus.weights import WeightLog

__all__ = [
    "STREAMS",
    "BlobMissing",
    "Bus",
    "BusClosed",
    "BusUnavailable",
    "ChainBroken",
    "ChainHead",
    "ChainReader",
    "ChainRewound",
    "CommandFailed",
    "Commands",
    "CommitChain",
    "DigestMismatch",
    "EpisodeLease",
    "EpisodeQueue",
    "Intent",
    "IntentStore",
    "Lineage",
    "Phase",
    "PutResult",
    "Reader",
    "RecordTooLarge",
    "RecordsLost",
    "StaleWriter",
    "Stored",
    "StreamMismatch",
    "StreamMissing",
    "StreamSettings",
    "Subjects",
    "WeightLog",
    "commit_of",
    "group_id",
    "token",
    "with_chain",
]
