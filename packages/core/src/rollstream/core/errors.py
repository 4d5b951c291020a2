"""Errors that people see, and the one place that turns them into a message and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rollstream.core.redaction import redact

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_STALE = 4
"""Exit code of a writer that another one has replaced: it must not be restarted."""


class RollstreamError(Exception):
    """An error that the operator can act on: what happened, and in ``hint`` the way out."""

    exit_code = EXIT_FAILURE

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n  → {self.hint}" if self.hint else message


class UsageError(RollstreamError):
    """Bad input or a bad environment: nothing was written, the process ends with exit code 2."""

    exit_code = EXIT_USAGE


def first_cause(error: BaseException) -> BaseException:
    """The first leaf of nested exception groups, which is what ended the task owner."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def run_main(main: Callable[[], int | None]) -> int:
    """Run ``main``; a :class:`RollstreamError` becomes one message on stderr and its exit code, without a traceback
    and without secrets."""
    try:
        return main() or 0
    except Exception as error:
        cause = first_cause(error)
        if not isinstance(cause, RollstreamError):
            raise
        print(f"error: {redact(str(cause))}", file=sys.stderr, flush=True)
        return cause.exit_code
