"""A writer that dies between the blobs and the record that names them, and a stale orchestrator that wakes up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from rollstream.cli.servers import EmbeddedNats
from rollstream.core.bus import Bus, StaleWriter
from rollstream.core.errors import EXIT_STALE
from rollstream.core.wire import Rollout
from support.chains import next_batch

WRITER = """
import asyncio, sys
import numpy as np
from rollstream.core.bus import Bus
from rollstream.core.wire import Array, Branch, Rollout

async def main(url, run):
    bus = await Bus.connect(url, run, name="writer")
    big = np.arange(200_000)
    branch = Branch(token_ids=Array.of(big, np.int32), sampled=Array.of(big > 1), logprobs=Array.of(-big, np.float32),
                    temperature=1.0, spans=())
    rollout = Rollout(group="g", member=0, kind="train", source="s", task=0, timeline=1, worker="w",
                      branches=(branch,), reward=1.0, started=1, finished=2)
    await bus.put_once(bus.subjects.rollout("train", "g", 0), rollout)
    await bus.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_blobs_without_their_record_are_harmless(bus: Bus, nats_server: EmbeddedNats, tmp_path: Path) -> None:
    def write(failpoint: str) -> int:
        environment = {**os.environ, "ROLLSTREAM_FAILPOINT": failpoint}
        return subprocess.run(
            [sys.executable, "-c", WRITER, nats_server.url, bus.run], env=environment, timeout=60
        ).returncode

    subject = bus.subjects.rollout("train", "g", 0)
    assert write("after_blobs") == -signal.SIGKILL
    assert await bus.last_sequence("BLOBS") > 0
    assert await bus.get(subject) is None  # the record is the commit point
    blobs = await bus.last_sequence("BLOBS")
    assert write("") == 0
    stored = await bus.get(subject)
    assert stored is not None
    assert await bus.last_sequence("BLOBS") == blobs  # content-addressed: nothing is written twice
    record = stored.record
    assert isinstance(record, Rollout)
    whole = await bus.resolve(record)
    assert np.array_equal(whole.branches[0].token_ids.numpy(), np.arange(200_000))


async def test_a_stale_orchestrator_that_wakes_up_is_refused(bus: Bus) -> None:
    sleeper = await bus.chain()
    await sleeper.take("sleeper")
    await sleeper.append(next_batch(sleeper))
    woken_with = next_batch(sleeper)

    successor = await bus.chain()
    await successor.take("successor")
    await successor.append(next_batch(successor))

    try:
        await sleeper.append(woken_with)
    except StaleWriter as refused:
        assert refused.exit_code == EXIT_STALE
        assert "successor" in str(refused)
    else:
        raise AssertionError("a stale writer appended to the chain")
    fresh = await bus.chain()
    assert fresh.head == successor.head
