"""The training step: packing must not change gradients, bad numbers must not be published, equal input equal bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from rollstream.core.config import AdamWConfig, DppoLossConfig, ModelConfig, ScheduleConfig
from rollstream.trainer.loss import make_objective, total_loss
from rollstream.trainer.micro_batch import build
from rollstream.trainer.model import Policy
from rollstream.trainer.packing import DUMMY, Bin
from rollstream.trainer.ranks import Ranks
from rollstream.trainer.samples import TrainSample
from rollstream.trainer.step import NonFinite, TrainStep
from rollstream.trainer.supervised import fit
from support.tiny_model import make_tiny_model
from support.train_samples import make_samples

GRADIENT_TOLERANCE = 2e-6
"""Absolute, fp32: sums over tokens are taken in another order."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=2, hidden=64)


def load(model_dir: Path) -> Policy:
    return Policy.load(ModelConfig(name=str(model_dir)))


def train_step(policy: Policy, *, seq_len: int = 64, lr: float = 1e-3) -> TrainStep:
    return TrainStep(
        policy, Ranks.alone(), seq_len=seq_len, loss=DppoLossConfig(), optim=AdamWConfig(lr=lr),
        schedule=ScheduleConfig(), max_steps=10,
    )


def gradients(policy: Policy, bins: list[Bin], samples: dict[int, TrainSample]) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    batches = [build(entry, samples) for entry in bins]
    counts = torch.stack([batch.streams.counts() for batch in batches]).sum(0)
    for batch in batches:
        logprobs, entropy = policy(batch)
        total_loss(logprobs, entropy, batch.streams, counts, make_objective(DppoLossConfig())).total.backward()
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters() if parameter.grad is not None}


def test_packed_gradients_equal_the_sum_over_unpacked_samples(model_dir: Path) -> None:
    policy, samples = load(model_dir), dict(enumerate(make_samples(7)))
    lengths = {index: len(sample) for index, sample in samples.items()}
    packed = gradients(policy, [Bin(tuple(lengths), tuple(lengths.values()))], samples)
    alone = gradients(policy, [Bin((index,), (length,)) for index, length in lengths.items()], samples)
    padded = gradients(policy, [Bin(tuple(lengths), tuple(lengths.values())), DUMMY, DUMMY], samples)
    assert packed.keys() == alone.keys() == padded.keys() and len(packed) > 10
    for name, gradient in packed.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, alone[name], atol=GRADIENT_TOLERANCE, rtol=1e-4)
        torch.testing.assert_close(gradient, padded[name], atol=0, rtol=0)


def test_the_bin_size_changes_nothing_but_rounding(model_dir: Path) -> None:
    results = []
    for seq_len in (32, 256):
        policy = load(model_dir)
        result = train_step(policy, seq_len=seq_len).fit(1, make_samples(9))
        results.append(result)
    small, large = results
    assert small.micro_batches > large.micro_batches
    assert small.loss == pytest.approx(large.loss, abs=1e-6)
    assert small.grad_norm == pytest.approx(large.grad_norm, rel=1e-5)
    assert small.mismatch_kl == pytest.approx(large.mismatch_kl, rel=1e-5)
    assert small.entropy == pytest.approx(large.entropy, rel=1e-6)


def test_equal_steps_give_equal_bits(model_dir: Path) -> None:
    weights = []
    for _ in range(2):
        policy = load(model_dir)
        step = train_step(policy)
        for number in (1, 2, 3):
            step.fit(number, make_samples(9, seed=number))
        weights.append(policy.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_batch_without_loss_tokens_has_zero_gradients(model_dir: Path) -> None:
    policy = load(model_dir)
    sample = make_samples(1)[0]
    zeros = np.zeros(len(sample), np.float32)
    silent = dataclasses.replace(sample, rl_weights=zeros, ce_weights=zeros, ref_kl_weights=zeros)
    for samples in ([silent], []):
        result = train_step(policy).fit(1, samples)
        assert (result.loss, result.grad_norm, result.trained_tokens) == (0, 0, 0)


def test_a_bad_loss_stops_before_the_update_and_names_the_sample(tmp_path: Path) -> None:
    policy = load(make_tiny_model(tmp_path, layers=2, hidden=64, tied=False))
    with torch.no_grad():
        policy.hf.get_input_embeddings().weight[99] = torch.nan
    samples = make_samples(4)
    for sample in samples:
        sample.token_ids[sample.token_ids == 99] = 98
    samples[2].token_ids[3] = 99
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    with pytest.raises(NonFinite) as caught:
        train_step(policy, seq_len=256).fit(3, samples)
    assert all(torch.equal(before[n], v) or "embed_tokens" in n for n, v in policy.state_dict().items())
    assert samples[2].name in str(caught.value) and "step 3" in str(caught.value)
    assert samples[1].name not in str(caught.value)


def test_an_exploding_gradient_stops_before_the_update(model_dir: Path) -> None:
    policy = load(model_dir)
    samples = [dataclasses.replace(s, advantages=np.full(len(s), -3e38, np.float32)) for s in make_samples(3)]
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    with pytest.raises(NonFinite, match="step 1"):
        train_step(policy).fit(1, samples)
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())


def test_clipping_and_learning(model_dir: Path) -> None:
    """The policy gradient raises the probability of tokens with a positive advantage."""
    policy = load(model_dir)
    samples = [dataclasses.replace(s, advantages=np.where(s.sampled, 1, 0).astype(np.float32)) for s in make_samples(6)]
    bins = [Bin(tuple(range(6)), tuple(len(s) for s in samples))]
    batch = build(bins[0], dict(enumerate(samples)))
    before = policy(batch)[0][batch.streams.rl].mean().item()
    step = train_step(policy, lr=3e-3)
    for number in range(1, 6):
        step.fit(number, samples)
    assert policy(batch)[0][batch.streams.rl].mean().item() > before + 0.1


def test_supervised_fit_memorises(model_dir: Path, tmp_path: Path) -> None:
    samples = [TrainSample.supervised(f"s{i}", [i, 50 + i, 60 + i, 70 + i], [0, 1, 1, 1]) for i in range(8)]
    losses: list[float] = []
    fit(
        model_dir, samples, steps=40, batch_size=8, optim=AdamWConfig(lr=1e-2), save_to=tmp_path / "out",
        on_step=lambda _, result: losses.append(result.loss) or False,
    )
    assert losses[-1] < 0.1 < losses[0]
    assert (tmp_path / "out" / "config.json").exists()
