"""Training samples with every stream in use, made from a seed."""

from __future__ import annotations

import numpy as np

from rollstream.trainer.samples import TrainSample


def make_samples(count: int, *, seed: int = 0, vocab: int = 100) -> list[TrainSample]:
    """``count`` samples of 8–24 tokens: rl on the completion, some ce on the prompt, some ref_kl."""
    generator = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        length, prompt = int(generator.integers(8, 25)), 4
        sampled = np.arange(length) >= prompt
        noise = generator.normal(size=(4, length)).astype(np.float32)
        samples.append(
            TrainSample(
                name=f"sample-{seed}-{index}",
                token_ids=generator.integers(0, vocab, length),
                sampled=sampled,
                logprobs=np.where(sampled, -4.6 + 0.1 * noise[0], 0).astype(np.float32),
                advantages=np.where(sampled, noise[1].mean(), 0).astype(np.float32),
                rl_weights=np.ones(length, np.float32),
                ce_weights=np.where(sampled | (noise[2] < 0), 0, 0.1).astype(np.float32),
                ref_kl_weights=np.where(sampled & (noise[2] > 0.5), 1, 0).astype(np.float32),
                ref_logprobs=np.where(sampled, -4.5 + 0.1 * noise[3], 0).astype(np.float32),
                temperature=0.7 + 0.1 * (index % 3),
            )
        )
    return samples
