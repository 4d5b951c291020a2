"""Every durable record, declared once. The bus carries them as MessagePack maps with a ``type`` field.

Conventions: times are Unix nanoseconds (int); steps are 1-indexed, versions 0-indexed; ``timeline`` is 1-indexed;
T is the number of tokens of a branch. Unknown fields are ignored on read, so a field may be added without a new type;
a change of meaning gets a new tag (``….v2``).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rollstream.core.wire.arrays import Array

Kind = Literal["train", "eval"]


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of all records: frozen, keyword-only, self-describing through ``type``."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the engine samples. Training sampling keeps top_p 1, top_k -1, min_p 0 and temperature > 0."""

    temperature: float = 1.0
    max_tokens: int | None = None
    seed: int | None = None
    extra: dict[str, Any] = {}


# --- GROUPS and EPISODES ------------------------------------------------------------------------------------------


class Group(Record, frozen=True, kw_only=True, tag="group.v1"):
    """A task and how many members sample it. Written once, before its episodes.

    ``group`` is deterministic (see ``bus.subjects.group_id``), so a restarted dispatcher that draws the same task
    meets its own earlier record instead of making a second group.
    """

    group: str
    kind: Kind
    source: str
    task: int
    size: int
    sampling: Sampling
    timeline: int
    created: int
    sampler_state: bytes = b""
    eval_version: int | None = None


class Episode(Record, frozen=True, kw_only=True, tag="episode.v1"):
    """One member of a group as leased work."""

    group: str
    member: int
    kind: Kind
    source: str
    task: int
    sampling: Sampling
    timeline: int
    min_version: int = 0
    attempt: int = 0


# --- ROLLOUTS -----------------------------------------------------------------------------------------------------


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Token positions ``[start, end)`` of a branch that policy ``version`` of ``timeline`` sampled."""

    timeline: int
    version: int
    start: int
    end: int


class Branch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One root-to-leaf token sequence; each becomes at most one training sample.

    token_ids i32 [T]; sampled bool [T]; logprobs f32 [T] (after temperature; 0 where not sampled).
    Spans cover every sampled position. ``extras`` holds arrays aligned to T (routed experts, images).
    """

    token_ids: Array
    sampled: Array
    logprobs: Array
    temperature: float
    spans: tuple[VersionSpan, ...]
    agent: str = "agent"
    trainable: bool = True
    extras: dict[str, Array] = {}


class RolloutError(msgspec.Struct, frozen=True, kw_only=True):
    """Why an episode failed: exception type, one-line message."""

    kind: str
    message: str


class Rollout(Record, frozen=True, kw_only=True, tag="rollout.v1"):
    """The result of one episode; the first write to its subject wins for ever."""

    group: str
    member: int
    kind: Kind
    source: str
    task: int
    timeline: int
    worker: str
    branches: tuple[Branch, ...]
    reward: float | None
    reward_parts: dict[str, float] = {}
    metrics: dict[str, float] = {}
    stop: str | None = None
    truncated: bool = False
    turns: int = 1
    started: int
    finished: int
    timing: dict[str, float] = {}
    error: RolloutError | None = None
    messages: tuple[dict[str, Any], ...] = ()


# --- COMMITS ------------------------------------------------------------------------------------------------------


class OpenGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that is dispatched and not yet decided as of a commit."""

    group: str
    source: str
    task: int
    size: int


class OrchestratorState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a starting orchestrator needs to go on exactly where a commit left off.

    ``cursors``: source → number of training groups created so far. ``rng``: opaque sampler state.
    ``low_water``: ROLLOUTS stream sequence below which every training rollout is decided. ``task_counts``: taskset and
    args, by fingerprint → number of tasks (-1: endless).
    """

    cursors: dict[str, int] = {}
    rng: bytes = b""
    curriculum: dict[str, bytes] = {}
    baselines: dict[str, float] = {}
    open_groups: tuple[OpenGroup, ...] = ()
    low_water: int = 1
    evals: dict[str, int] = {}
    task_counts: dict[str, int] = {}


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One branch of one rollout as it is trained.

    advantages f32 [T], zero on tokens that were not sampled. Weight streams f32 [T]; ``rl_weights`` None means 1 on
    every sampled token, the others None mean 0. ``digest`` is the sha256 of the rollout's record bytes.
    """

    subject: str
    digest: str
    branch: int
    advantages: Array
    rl_weights: Array | None = None
    ce_weights: Array | None = None
    ref_kl_weights: Array | None = None
    ref_logprobs: Array | None = None


class ChainRecord(Record, frozen=True, kw_only=True):
    """Base of what stands on COMMITS. ``previous`` is the digest of the record before ("" for the first)."""

    timeline: int
    epoch: int
    created: int
    previous: str


class Epoch(ChainRecord, frozen=True, kw_only=True, tag="epoch.v1"):
    """A starting orchestrator takes the chain; every append of an earlier epoch is refused from here on."""

    writer: str


class Batch(ChainRecord, frozen=True, kw_only=True, tag="batch.v1"):
    """Batch ``step``: trains on v{step-1}, makes v{step}. References rollouts, does not copy them."""

    step: int
    version: int
    samples: tuple[Sample, ...]
    rejected: tuple[str, ...] = ()
    state: OrchestratorState
    metrics: dict[str, float] = {}


class Rewind(ChainRecord, frozen=True, kw_only=True, tag="rewind.v1"):
    """Opens ``timeline`` at ``from_step`` of ``parent``: its next batch is from_step + 1."""

    parent: int
    from_step: int
    state: OrchestratorState


# --- WEIGHTS and EVENTS -------------------------------------------------------------------------------------------


class WeightNotice(Record, frozen=True, kw_only=True, tag="weights.v1"):
    """Policy ``version`` exists and can be loaded; for version ≥ 1 also: batch ``version`` is trained.

    ``digest`` is the content digest of the weights (see ``run.weights``); ``commit`` the digest of the batch record
    ("" for v0); ``location`` a path relative to the run directory (filesystem transport).
    """

    timeline: int
    version: int
    transport: str
    location: str
    nbytes: int
    digest: str
    commit: str = ""
    full: bool = True
    created: int


class Event(Record, frozen=True, kw_only=True, tag="event.v1"):
    """Something an operator wants to know. ``kind`` is a dotted-free token, ``level`` as in logging."""

    kind: str
    component: str
    message: str
    level: Literal["info", "warning", "error"] = "info"
    data: dict[str, Any] = {}
    created: int


AnyRecord = Group | Episode | Rollout | Epoch | Batch | Rewind | WeightNotice | Event
CommitRecord = Epoch | Batch | Rewind
