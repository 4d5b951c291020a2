"""Messages: msgspec structs as MessagePack, arrays as numpy bytes."""

from rollstream.core.wire.arrays import Array
from rollstream.core.wire.codec import MalformedRecord, decode, decode_as, digest, encode
from rollstream.core.wire.records import (
    AnyRecord,
    Batch,
    Branch,
    ChainRecord,
    CommitRecord,
    Episode,
    Epoch,
    Event,
    Group,
    Kind,
    OpenGroup,
    OrchestratorState,
    Record,
    Rewind,
    Rollout,
    RolloutError,
    Sample,
    Sampling,
    VersionSpan,
    WeightNotice,
)

__all__ = [
    "AnyRecord", "Array", "Batch", "Branch", "ChainRecord", "CommitRecord", "Episode", "Epoch", "Event", "Group", "Kind",
    "MalformedRecord", "OpenGroup", "OrchestratorState", "Record", "Rewind", "Rollout", "RolloutError", "Sample",
    "Sampling", "VersionSpan", "WeightNotice", "decode", "decode_as", "digest", "encode",
]
