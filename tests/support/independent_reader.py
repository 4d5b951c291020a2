"""An auditor that shares no code with rollstream: plain nats-py, msgpack and hashlib.

It walks what a run left behind (COMMITS, ROLLOUTS and WEIGHTS on the bus, the archive under batches/) and says whether
every step exists once, the chain is unbroken, no rollout was used twice and every version was announced once.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import nats
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError


@dataclass
class Audit:
    """What the auditor saw. ``problems`` is empty for a sound run."""

    steps: dict[int, bytes] = field(default_factory=dict)
    """step → bytes of its batch record (chain or archive)."""

    epochs: int = 0
    uses: dict[str, int] = field(default_factory=dict)
    """Rollout subject → the one step that trained it (all its branches)."""

    versions: dict[int, str] = field(default_factory=dict)
    """version → weights digest, from notices on the bus and in the archive."""

    problems: list[str] = field(default_factory=list)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def _messages(js: JetStreamContext, stream: str) -> list[tuple[str, int, bytes]]:
    """All messages of a stream in order: (subject, sequence, data)."""
    state = (await js.stream_info(stream)).state
    found: list[tuple[str, int, bytes]] = []
    for sequence in range(state.first_seq, state.last_seq + 1):
        try:
            message = await js.get_msg(stream, sequence)
        except NotFoundError:
            continue
        found.append((message.subject or "", sequence, message.data or b""))
    return found


def _use_batch(audit: Audit, batch: dict[str, Any], data: bytes, rollouts: dict[str, bytes]) -> None:
    step = batch["step"]
    standing = audit.steps.get(step)
    if standing is not None:
        if standing != data:
            audit.problems.append(f"step {step} exists twice with different content")
        return
    audit.steps[step] = data
    if batch["version"] != step - 1:
        audit.problems.append(f"step {step} trains on v{batch['version']}")
    branches: set[tuple[str, int]] = set()
    for sample in batch["samples"]:
        subject, branch = sample["subject"], sample["branch"]
        if audit.uses.setdefault(subject, step) != step:
            audit.problems.append(f"{subject} is used by steps {audit.uses[subject]} and {step}")
        if (subject, branch) in branches:
            audit.problems.append(f"step {step} uses branch {branch} of {subject} twice")
        branches.add((subject, branch))
        rollout = rollouts.get(subject)
        if rollout is None:
            audit.problems.append(f"step {step}: rollout {subject} is neither archived nor on the bus")
        elif _sha(rollout) != sample["digest"]:
            audit.problems.append(f"step {step}: rollout {subject} is not the one that was committed")


def _note_version(audit: Audit, data: bytes) -> None:
    notice = msgpack.unpackb(data)
    standing = audit.versions.setdefault(notice["version"], notice["digest"])
    if standing != notice["digest"]:
        audit.problems.append(f"v{notice['version']} was announced with two digests")


def _read_archive(audit: Audit, run_dir: Path, rollouts: dict[str, bytes]) -> None:
    for path in sorted((run_dir / "batches").glob("step_*")):
        try:
            archive = msgpack.unpackb(path.read_bytes())
        except ValueError as error:
            audit.problems.append(f"{path.name} cannot be read: {error}")
            continue
        held = {**rollouts, **archive["rollouts"]}
        _use_batch(audit, msgpack.unpackb(archive["commit"]), archive["commit"], held)
        if archive.get("notice"):
            _note_version(audit, archive["notice"])


def _walk_chain(audit: Audit, chain: list[tuple[str, int, bytes]], rollouts: dict[str, bytes]) -> None:
    previous: str | None = None
    for _, sequence, data in chain:
        record = msgpack.unpackb(data)
        if previous is not None and record["previous"] != previous:
            audit.problems.append(f"COMMITS {sequence} does not follow the record before it")
        previous = _sha(data)
        if record["type"] == "epoch.v1":
            audit.epochs += 1
        elif record["type"] == "batch.v1" and record["step"] not in audit.steps:
            _use_batch(audit, record, data, rollouts)
        elif record["type"] == "batch.v1" and audit.steps[record["step"]] != data:
            audit.problems.append(f"step {record['step']} differs between the chain and the archive")


async def audit_run(nats_url: str, run_dir: Path, max_steps: int) -> Audit:
    """Walk the run and check it end to end; see :class:`Audit`."""
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    audit = Audit()
    connection = await nats.connect(nats_url, connect_timeout=10)
    try:
        js = connection.jetstream(timeout=10)
        rollouts = {subject: data for subject, _, data in await _messages(js, f"RS_{run_id}_ROLLOUTS")}
        _read_archive(audit, run_dir, rollouts)
        _walk_chain(audit, await _messages(js, f"RS_{run_id}_COMMITS"), rollouts)
        for _, _, data in await _messages(js, f"RS_{run_id}_WEIGHTS"):
            _note_version(audit, data)
    finally:
        await connection.close()
    if sorted(audit.steps) != list(range(1, max_steps + 1)):
        audit.problems.append(f"steps are {sorted(audit.steps)}, expected 1..{max_steps}")
    missing = [version for version in range(1, max_steps + 1) if version not in audit.versions]
    if missing:
        audit.problems.append(f"versions {missing} were never announced")
    return audit
