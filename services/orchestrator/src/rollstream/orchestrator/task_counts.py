"""How many tasks each source has, counted in a child process.

verifiers takes seconds to import and a few hundred megabytes; the orchestrator needs nothing of it but these numbers.
They are kept in the chain, so that an orchestrator that is restarted is back in a second.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Sequence

import msgspec

from rollstream.core.config import SourceConfig
from rollstream.core.errors import UsageError

ENDLESS = -1
"""Count of a taskset without an end."""

COUNT_SECONDS = 600.0


class Answer(msgspec.Struct):
    """What the child found: a count a source, or why one of them cannot be used."""

    counts: list[int] = []
    error: str = ""
    hint: str = ""


def fingerprint(source: SourceConfig) -> str:
    """Names a taskset with its args: the same tasks as long as the package stays the same."""
    args = msgspec.json.encode(source.args, order="deterministic", enc_hook=str)
    return f"{source.id}-{hashlib.sha256(args).hexdigest()[:12]}"


async def task_counts(sources: Sequence[SourceConfig], known: dict[str, int]) -> dict[str, int]:
    """Counts by fingerprint; only what is not ``known`` is counted. Raises ``UsageError`` for a broken taskset."""
    wanted = {fingerprint(source): source for source in sources}
    missing = [name for name in wanted if name not in known]
    found = {name: known[name] for name in wanted if name in known}
    if missing:
        counts = await _ask_child([wanted[name] for name in missing])
        found |= dict(zip(missing, counts, strict=True))
    return found


async def _ask_child(sources: list[SourceConfig]) -> list[int]:
    question = msgspec.json.encode([source.model_dump(mode="json", include={"id", "args"}) for source in sources])
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(COUNT_SECONDS):
            output, _ = await child.communicate(question)
    except TimeoutError:
        names = ", ".join(repr(source.id) for source in sources)
        raise UsageError(
            f"the tasks of {names} were not counted within {COUNT_SECONDS:g} s",
            hint="the taskset's load() hangs, or it is endless and does not say so (INFINITE = True)",
        ) from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    try:
        # What a taskset prints while it loads comes first.
        answer = msgspec.json.decode(output.rpartition(b"\x1e")[2], type=Answer)
    except msgspec.DecodeError:
        raise UsageError(
            f"counting tasks ended with exit code {child.returncode}", hint="its own messages are above this one"
        ) from None
    if answer.error:
        raise UsageError(answer.error, hint=answer.hint)
    return answer.counts


def main() -> None:
    """The child: sources as JSON on stdin, an :class:`Answer` behind a record separator on stdout."""
    from rollstream.orchestrator.worker.environments import count_tasks

    sources = [SourceConfig.model_validate(entry) for entry in msgspec.json.decode(sys.stdin.buffer.read())]
    try:
        counts = [count_tasks(source) for source in sources]
        answer = Answer(counts=[ENDLESS if count is None else count for count in counts])
    except UsageError as error:
        answer = Answer(error=error.args[0], hint=error.hint)
    sys.stdout.buffer.write(b"\x1e" + msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
