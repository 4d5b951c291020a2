"""``make demo``: reinforcement learning end to end on this machine, and what it did to the reward.

Makes (once) the small warmed-up model, runs ``rollstream rl @ rl.toml`` into outputs/demo, then prints the reward of
the first and last five steps, the held-out reward before and after, and the path of the curve. ``--control`` shuffles
the rewards within each group: the same work without a learning signal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from recipe import is_current

from rollstream.cli.metrics_file import MetricsFile
from rollstream.cli.plot import eval_rewards, plot_reward
from rollstream.cli.servers import is_served
from rollstream.core.telemetry import names

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main() -> int:
    """Run the demo and report; the exit code is the run's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of task order, sampling and trainer")
    parser.add_argument("--control", action="store_true", help="shuffle rewards within groups: nothing to learn from")
    parser.add_argument("overrides", nargs=argparse.REMAINDER, help="after --: more arguments for rollstream rl")
    arguments = parser.parse_args()

    began = time.monotonic()
    name = "demo-control" if arguments.control else "demo"
    run_dir = ROOT / "outputs" / name
    model = warmed_up_model()
    remove_previous(run_dir)
    command = [
        sys.executable, "-m", "rollstream.cli.main", "rl", "@", str(HERE / "rl.toml"),
        "--output-dir", str(run_dir.parent), "--run.name", name, "--model.name", str(model),
        "--seed", str(arguments.seed), *device_overrides(),
    ]  # fmt: skip
    if arguments.control:
        command.append("--orchestrator.shuffle-rewards")
    command += [argument for argument in arguments.overrides if argument != "--"]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code == 0:
        print(f"\n{report(run_dir)}\n{name} took {time.monotonic() - began:.0f} s")
    return code


def warmed_up_model() -> Path:
    """The model that RL starts from, made on first use or when its recipe changed, and kept under models/."""
    model = ROOT / "models" / "reverse-text"
    if not is_current(model):
        print("making the model: a small Qwen3, warmed up by supervised fine-tuning (about a minute)", flush=True)
        # A model this small gains little from a second thread, and on a busy machine loses all to waiting for it.
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **os.environ}
        command = [sys.executable, str(HERE / "warmup.py"), "--out", str(model)]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return model


def remove_previous(run_dir: Path) -> None:
    """A demo starts from nothing. Only a run directory (or nothing) is removed, never something else of that name."""
    if not run_dir.exists():
        return
    if not (run_dir / "run.json").exists() and any(run_dir.iterdir()):
        sys.exit(f"{run_dir} exists and is not a run; move it away, then try again")
    if is_served(run_dir / "bus"):
        sys.exit(f"{run_dir} is running; stop that launch first")
    shutil.rmtree(run_dir)


def device_overrides() -> list[str]:
    """With a GPU the engine leaves room for the trainer beside it."""
    import torch

    if not torch.cuda.is_available():
        return []
    return ["--inference.vllm", json.dumps({"gpu_memory_utilization": 0.3})]


def report(run_dir: Path) -> str:
    """What the run did to the reward, in three lines."""
    metrics = MetricsFile(run_dir / "metrics.jsonl")
    metrics.refresh()
    rewards = [value for _, value in metrics.series(names.REWARD_MEAN)]
    lines = [f"reward: first 5 steps {mean(rewards[:5]):.3f} → last 5 steps {mean(rewards[-5:]):.3f}"]
    for metric in sorted(eval_rewards(metrics)):
        points = metrics.series(metric)
        lines.append(f"held out ({metric}): before {points[0][1]:.3f} → after {points[-1][1]:.3f}")
    picture = plot_reward(run_dir / "metrics.jsonl", run_dir / "reward.png")
    return "\n".join([*lines, f"curve: {picture.relative_to(ROOT)}"])


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; not a number of nothing."""
    return sum(values) / len(values) if values else float("nan")


if __name__ == "__main__":
    sys.exit(main())
