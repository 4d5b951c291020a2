"""From command-line arguments to a validated configuration, or to one clear message and exit code 2."""

from __future__ import annotations

import sys
from typing import TypeVar

from pydantic_config import BaseConfig, cli

from rollstream.core.errors import EXIT_USAGE

ConfigT = TypeVar("ConfigT", bound=BaseConfig)


def load_config(cls: type[ConfigT], argv: list[str], *, prog: str) -> ConfigT:
    """Parse ``argv`` (``@ file.toml``, ``--dotted.kebab-flags``) into ``cls``; ``--help`` prints and exits 0.

    Bad input prints one box that names the flag or file and raises ``SystemExit(2)``.
    """
    saved = sys.argv
    # The library draws its error box only for the process's own arguments, and leaves with 1.
    sys.argv = [prog, *argv]
    try:
        about = (cls.__doc__ or "").splitlines()[0]
        # The library's overloads omit prog and description, its implementation takes them.
        return cli(cls, prog=prog, description=about)  # type: ignore[call-overload,no-any-return]
    except SystemExit as error:
        raise SystemExit(EXIT_USAGE if error.code == 1 else error.code) from None
    except OSError as error:
        print(f"cannot read the configuration file {error.filename}: {error.strerror}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None
    finally:
        sys.argv = saved
