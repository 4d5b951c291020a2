"""Owned tasks, the shutdown event, failpoints and the exit code of errors, in real processes where it matters."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.core.errors import EXIT_FAILURE, EXIT_USAGE, RollstreamError, UsageError, first_cause, run_main
from rollstream.core.tasks import TaskOwner, shutdown_event


class Cleanup:
    """A background task that notes how it ended."""

    def __init__(self) -> None:
        self.ended = False

    async def run(self) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            self.ended = True


async def fail(after: float = 0.0) -> None:
    await asyncio.sleep(after)
    raise UsageError("the bus is gone", hint="start it")


async def test_a_failing_task_ends_the_body_and_the_others_and_comes_out() -> None:
    other = Cleanup()
    async with asyncio.timeout(5):
        with pytest.raises(ExceptionGroup) as caught:
            async with TaskOwner() as owner:
                owner.start(other.run(), "other")
                owner.start(fail(0.01), "fails")
                await asyncio.sleep(60)
    assert str(first_cause(caught.value)) == "the bus is gone\n  → start it" and other.ended


async def test_an_exception_in_the_body_ends_the_tasks() -> None:
    other = Cleanup()
    with pytest.raises(ExceptionGroup) as caught:
        async with TaskOwner() as owner:
            owner.start(other.run(), "other")
            await asyncio.sleep(0)
            raise KeyError("body")
    assert isinstance(first_cause(caught.value), KeyError) and other.ended


async def test_cancel_is_an_orderly_end() -> None:
    others = [Cleanup(), Cleanup()]
    async with asyncio.timeout(5), TaskOwner() as owner:
        tasks = [owner.start(other.run(), f"other {index}") for index, other in enumerate(others)]
        await asyncio.sleep(0)
        owner.cancel()
    assert all(other.ended for other in others) and all(task.cancelled() for task in tasks)


async def test_the_block_waits_for_tasks_that_end_by_themselves() -> None:
    async def add() -> int:
        await asyncio.sleep(0.01)
        return 3

    async with TaskOwner() as owner:
        task = owner.start(add(), "add")
    assert task.result() == 3 and task.get_name() == "add"


async def test_no_task_outlives_a_cancelled_owner() -> None:
    other = Cleanup()

    async def own() -> None:
        async with TaskOwner() as owner:
            owner.start(other.run(), "other")
            await asyncio.sleep(60)

    outer = asyncio.create_task(own())
    await asyncio.sleep(0.01)
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    assert other.ended


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_signals_set_the_shutdown_event(signum: signal.Signals) -> None:
    event = shutdown_event()
    try:
        assert not event.is_set()
        os.kill(os.getpid(), signum)
        async with asyncio.timeout(5):
            await event.wait()
    finally:
        for each in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(each)


# --- errors --------------------------------------------------------------------------------------------------------


def test_errors_become_one_message_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def main(error: Exception) -> int:
        raise error

    assert run_main(lambda: main(UsageError("no such model", hint="name one"))) == EXIT_USAGE == 2
    assert capsys.readouterr().err == "error: no such model\n  → name one\n"
    nested = ExceptionGroup("tasks", [ExceptionGroup("more", [RollstreamError("lost")])])
    assert run_main(lambda: main(nested)) == EXIT_FAILURE == 1
    assert capsys.readouterr().err == "error: lost\n"
    secret = UsageError("cannot reach nats://s3cret@host:4222", hint="is api_key=0123456789 right?")
    run_main(lambda: main(secret))
    assert capsys.readouterr().err == "error: cannot reach nats://…@host:4222\n  → is api_key=… right?\n"
    assert run_main(lambda: None) == 0
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: main(ZeroDivisionError()))


# --- failpoints ----------------------------------------------------------------------------------------------------


def passes(spec: str, *names: str) -> tuple[int, str]:
    script = (
        "import sys, atexit; from rollstream.core import failpoints\n"
        "atexit.register(lambda: print('flushed'))\n"
        "for name in sys.argv[1:]: print(name, flush=True); failpoints.hit(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *names], env={**os.environ, "ROLLSTREAM_FAILPOINT": spec},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_an_armed_failpoint_kills_for_real() -> None:
    assert passes("b", "a", "b", "c") == (-signal.SIGKILL, "a\nb\n"), "no exit hook ran"
    assert passes("b:2", "a", "b", "a", "b", "b") == (-signal.SIGKILL, "a\nb\na\nb\n")


def test_an_unarmed_one_does_nothing() -> None:
    assert passes("", "a", "b") == (0, "a\nb\nflushed\n")
    assert passes("b:3", "b", "b") == (0, "b\nb\nflushed\n")
    assert passes("b", "bb", "a") == (0, "bb\na\nflushed\n"), "names are compared whole"


def test_a_marker_lets_it_kill_once_in_the_life_of_a_run(tmp_path: Path) -> None:
    marker = tmp_path / "died"
    assert passes(f"a:1:{marker}", "a") == (-signal.SIGKILL, "a\n")
    assert marker.exists()
    assert passes(f"a:1:{marker}", "a") == (0, "a\nflushed\n")
