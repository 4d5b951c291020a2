"""Two gloo ranks under FSDP2 train like one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.tiny_model import make_tiny_model

TESTS = Path(__file__).parents[2]

WEIGHT_TOLERANCE = 2e-6
"""Absolute, fp32, after three AdamW steps at lr 1e-3: only the order of additions differs."""


def train(model: Path, out: Path, world: int, count: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [*command, "-m", "support.train_world", str(model), str(out), str(count)],
        timeout=120, env=environment, capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out)


@pytest.mark.parametrize(("tied", "count"), [(True, 9), (False, 1)])  # with one sample the second rank has only a dummy
def test_two_ranks_equal_one(tmp_path: Path, tied: bool, count: int) -> None:
    model = make_tiny_model(tmp_path / "model", layers=2, hidden=64, tied=tied)
    one, two = (train(model, tmp_path / f"world{world}.pt", world, count) for world in (1, 2))
    assert one["weights"].keys() == two["weights"].keys()
    assert ("lm_head.weight" in one["weights"]) is not tied
    for name, value in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], value, atol=WEIGHT_TOLERANCE, rtol=0)
    for mine, theirs in zip(one["results"], two["results"], strict=True):
        for field in ("loss", "grad_norm", "mismatch_kl", "entropy", "lr"):
            assert theirs[field] == pytest.approx(mine[field], rel=1e-5, abs=1e-6)
        assert theirs["trained_tokens"] == mine["trained_tokens"]
