"""The ``rollstream`` command. Imports little: each command loads what it needs when it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""The command's arguments, ``--help`` included, belong to its configuration: ``@ file.toml``, ``--dotted.flags``."""

app = typer.Typer(
    name="rollstream", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Asynchronous reinforcement learning of language models as a stack of small services.",
)

COMPONENTS = {
    "trainer": ("rollstream.trainer", "rollstream-trainer"),
    "orchestrator": ("rollstream.orchestrator", "rollstream-orchestrator"),
    "env-worker": ("rollstream.orchestrator.worker", "rollstream-orchestrator"),
    "inference": ("rollstream.inference", "rollstream-inference"),
    "router": ("rollstream.router", "rollstream-router"),
}
"""Command → the package whose ``main`` it runs, and the distribution that carries it."""


@app.command(context_settings=PASS_ON)
def rl(context: typer.Context) -> None:
    """Start a whole run here: servers, inference, router, trainer, orchestrator and env workers."""
    from rollstream.core.config import RlConfig, load_config
    from rollstream.core.errors import run_main

    config = load_config(RlConfig, context.args, prog="rollstream rl")

    def launch() -> int:
        from rollstream.cli.launcher.rl import launch_rl

        return launch_rl(config, context.args)

    raise typer.Exit(run_main(launch))


def _component(name: str, about: str) -> None:
    @app.command(name, context_settings=PASS_ON, help=about)
    def command(context: typer.Context) -> None:
        package, distribution = COMPONENTS[name]
        _become(f"{package}.main", package, distribution, context.args)


_component("trainer", "Run the trainer alone, from its own configuration (@ trainer.json).")
_component("orchestrator", "Run the orchestrator alone, from its own configuration.")
_component("env-worker", "Run one env worker alone, from its own configuration.")
_component("inference", "Run one inference replica alone, from its own configuration.")
_component("router", "Run the router alone, from its own configuration.")


@app.command(context_settings=PASS_ON)
def replay(context: typer.Context) -> None:
    """Rebuild a run's final weights from v0 and the archive of its batches; --verify compares digests."""
    _become("rollstream.trainer.replay", "rollstream.trainer", "rollstream-trainer", context.args)


@app.command()
def status(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Tell where a run stands and who waits for what."""
    from rollstream.core.errors import run_main

    def show() -> int:
        from rollstream.cli.status import show_status

        return show_status(run, as_json=json)

    raise typer.Exit(run_main(show))


@app.command()
def plot(
    metrics: Annotated[Path, typer.Argument(help="A run's metrics.jsonl.")],
    out: Annotated[Path | None, typer.Option(help="PNG to write; reward.png beside the metrics by default.")] = None,
) -> None:
    """Draw the reward curve of a run."""
    from rollstream.core.errors import run_main

    def draw() -> int:
        from rollstream.cli.plot import plot_reward

        typer.echo(plot_reward(metrics, out or metrics.with_name("reward.png")))
        return 0

    raise typer.Exit(run_main(draw))


def _become(module: str, package: str, distribution: str, arguments: list[str]) -> None:
    """Replace this process by ``python -m module``: signals and exit codes are then the component's own."""
    import importlib.util

    parent = ".".join(package.split(".")[:2])
    if importlib.util.find_spec(parent) is None:
        typer.echo(f"error: {distribution} is not installed here\n  → pip install {distribution}", err=True)
        raise typer.Exit(2)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    app()
