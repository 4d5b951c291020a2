"""Entry point of the trainer: configuration in, ranks out.

``rollstream-trainer @ trainer.toml`` checks what can be checked before torch is imported, then starts ``nproc`` ranks
(``python -m rollstream.trainer.rank``) by torchrun's launcher. A single rank runs in this process: a launcher beside it
would only cost its memory and the seconds of a second import of torch.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rollstream.core.config import TrainerConfig
from rollstream.core.config.load import load_config
from rollstream.core.errors import UsageError, run_main
from rollstream.core.run import RunDir
from rollstream.core.telemetry import configure_logging
from rollstream.trainer.connect import connect_bus, connect_store
from rollstream.trainer.leave import end


def check(config: TrainerConfig) -> None:
    """Raise ``UsageError`` for whatever would make every rank fail."""
    model = Path(config.model.name)
    if model.is_dir() and not (model / "config.json").is_file():
        raise UsageError(
            f"model directory {model} has no config.json", hint="give --model.name a directory that transformers saved"
        )
    if not model.is_dir() and (model.is_absolute() or config.model.name.startswith(".")):
        raise UsageError(
            f"model directory {model} does not exist", hint="correct --model.name, or make the model first"
        )
    if config.fake_data is None:
        asyncio.run(_check_servers(config))


async def _check_servers(config: TrainerConfig) -> None:
    run = RunDir.open(config.run_dir)
    bus = await connect_bus(config, run, "trainer check")
    await bus.close()
    store = await connect_store(config, run)
    await store.close()


def main() -> int:
    """``rollstream-trainer @ trainer.toml --nproc 2``; returns the exit code."""
    arguments = sys.argv[1:]

    def start() -> int:
        config = load_config(TrainerConfig, arguments, prog="rollstream-trainer")
        configure_logging(config.log, "trainer")
        check(config)
        if config.nproc == 1:
            from rollstream.trainer.rank import train

            return train(config)
        from rollstream.trainer.launch import launch_ranks

        return launch_ranks("rollstream.trainer.rank", arguments, config.nproc)

    return run_main(start)


def run() -> None:
    """The console script: :func:`main`, then leave without waiting for threads."""
    end(main)


if __name__ == "__main__":
    run()
