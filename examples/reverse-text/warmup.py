"""The model that RL starts from: a small Qwen3, taught to write phrases backwards by imperfect demonstrations.

In each demonstration a share of the characters is replaced by a random one. The model learns how to reverse and, as
well, to err as often as its teacher: it samples what it saw. That leaves headroom which reinforcement
learning closes from rewards alone.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from pathlib import Path

from model import make_model, make_tokenizer, save
from recipe import BATCH_SIZE, STAMP, STEPS, digest
from reverse_text.phrases import phrases
from transformers import PreTrainedTokenizerFast

from rollstream.core.config import AdamWConfig, ScheduleConfig
from rollstream.trainer.samples import TrainSample
from rollstream.trainer.step import StepResult
from rollstream.trainer.supervised import fit

NOISE = 0.35
"""Share of the demonstrated characters that are wrong."""

LETTERS = " abcdefghijklmnopqrstuvwxyz"


def demonstration(tokenizer: PreTrainedTokenizerFast, phrase: str, rng: random.Random) -> TrainSample:
    """One prompt and its imperfect answer; only the answer carries a loss."""
    answer = "".join(rng.choice(LETTERS) if rng.random() < NOISE else letter for letter in reversed(phrase))
    asked = [{"role": "user", "content": phrase}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    whole = [*prompt, *tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    return TrainSample.supervised(phrase, whole, [float(position >= len(prompt)) for position in range(len(whole))])


def main() -> int:
    """Make, warm up and save the model; a directory that stands is complete."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the finished model")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimiser steps")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help="demonstrations a step")
    arguments = parser.parse_args()

    tokenizer = make_tokenizer()
    rng = random.Random(0)
    train = phrases("train")
    samples = [demonstration(tokenizer, rng.choice(train), rng) for _ in range(arguments.steps * arguments.batch_size)]
    draft = arguments.out.with_name(arguments.out.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    save(make_model(tokenizer, hidden=128, layers=3, heads=4, seed=0), tokenizer, draft)

    began = time.monotonic()

    def progress(step: int, result: StepResult) -> bool:
        if step % 20 == 0:
            print(
                f"warm-up step {step}/{arguments.steps}  loss {result.loss:.3f}  {time.monotonic() - began:.0f} s",
                flush=True,
            )
        return False

    steps = arguments.steps
    schedule = ScheduleConfig(type="linear", warmup_steps=min(20, steps // 4), decay_steps=steps // 3, min_factor=0.05)
    fit(
        draft,
        samples,
        steps=steps,
        batch_size=arguments.batch_size,
        optim=AdamWConfig(lr=2e-3, betas=(0.9, 0.98)),
        schedule=schedule,
        seq_len=2048,
        save_to=draft,
        on_step=progress,
    )
    (draft / STAMP).write_text(digest(steps, arguments.batch_size) + "\n", encoding="utf-8")
    shutil.rmtree(arguments.out, ignore_errors=True)
    draft.rename(arguments.out)
    print(f"the model is ready: {arguments.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
