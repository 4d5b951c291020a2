"""Shifts, log-softmax, entropy, and packed scores against a naive loop on a tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollstream.core.config import ModelConfig
from rollstream.core.errors import UsageError
from rollstream.trainer.alignment import score, shift_left, shift_right, token_scores
from rollstream.trainer.micro_batch import MicroBatch, build
from rollstream.trainer.model import Policy
from rollstream.trainer.packing import Bin
from rollstream.trainer.samples import TrainSample
from support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=2, hidden=64)


@pytest.fixture(scope="module")
def policy(model_dir: Path) -> Policy:
    return Policy.load(ModelConfig(name=str(model_dir)))


def documents(*lengths: int, seed: int = 0, temperature: float = 0.7) -> dict[int, TrainSample]:
    generator = np.random.default_rng(seed)
    return {
        index: TrainSample.supervised(
            f"doc{index}", generator.integers(0, 100, length).tolist(), [1.0] * length, temperature=temperature
        )
        for index, length in enumerate(lengths)
    }


def packed(samples: dict[int, TrainSample], order: list[int] | None = None) -> MicroBatch:
    chosen = sorted(samples) if order is None else order
    return build(Bin(tuple(chosen), tuple(len(samples[index]) for index in chosen)), samples)


def naive(policy: Policy, sample: TrainSample) -> tuple[list[float], list[float]]:
    """Token by token with plain attention: logprob of token i given the tokens before it, and the entropy there."""
    logprobs, entropies = [0.0], [0.0]
    policy.hf.set_attn_implementation("eager")
    try:
        for position in range(1, len(sample)):
            with torch.no_grad():
                logits = policy.hf(torch.from_numpy(sample.token_ids[None, :position])).logits[0, -1].double()
            distribution = torch.log_softmax(logits / sample.temperature, dim=-1)
            logprobs.append(distribution[sample.token_ids[position]].item())
            entropies.append(-(distribution.exp() * distribution).sum().item())
    finally:
        policy.hf.set_attn_implementation("rollstream_documents")
    return logprobs, entropies


def test_shifts() -> None:
    values = torch.tensor([1, 2, 3])
    assert shift_right(values, -9).tolist() == [-9, 1, 2]
    assert shift_left(values, 0).tolist() == [2, 3, 0]


def test_log_softmax_and_temperature() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]] * 2, dtype=torch.float32)
    logprobs, _ = score(logits, torch.tensor([2, 2]), torch.tensor([1.0, 2.0]))
    assert logprobs.tolist() == pytest.approx([-0.407605964, -0.680269659], abs=1e-6)


def test_entropy() -> None:
    logits = torch.tensor([[0.25] * 4, [0.7, 0.1, 0.1, 0.1]]).log()
    _, entropy = score(logits, torch.tensor([0, 0]), torch.ones(2))
    assert entropy.tolist() == pytest.approx([1.386294361, 0.940447986], abs=1e-6)


def test_entropy_of_a_vocabulary_with_forbidden_tokens() -> None:
    _, entropy = score(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([0]), torch.ones(1))
    assert entropy.item() == pytest.approx(np.log(2), abs=1e-6)


def test_packed_scores_equal_a_naive_loop(policy: Policy) -> None:
    samples = documents(9, 3, 17, 1, 5)
    batch = packed(samples)
    logprobs, entropy = policy(batch)
    bounds = batch.documents.boundaries.tolist()
    for index, sample in samples.items():
        expected_logprobs, expected_entropy = naive(policy, sample)
        inside = slice(bounds[index] + 1, bounds[index + 1])
        assert logprobs[inside].tolist() == pytest.approx(expected_logprobs[1:], abs=2e-5)
        assert entropy[inside].tolist() == pytest.approx(expected_entropy[1:], abs=2e-5)


def test_perturbing_a_neighbour_changes_nothing(policy: Policy) -> None:
    samples = documents(12, 20, 12)
    changed = samples | {1: documents(12, 20, 12, seed=1)[1]}
    before, after = (policy(packed(each))[0] for each in (samples, changed))
    bounds = packed(samples).documents.boundaries.tolist()
    for index in (0, 2):
        inside = slice(bounds[index] + 1, bounds[index + 1])
        assert torch.equal(before[inside], after[inside])
    assert not torch.equal(before[bounds[1] + 1 : bounds[2]], after[bounds[1] + 1 : bounds[2]])


def test_a_document_sees_its_own_past_only(policy: Policy) -> None:
    samples = documents(16)
    tokens = samples[0].token_ids.copy()
    tokens[10] = (tokens[10] + 1) % 100
    changed = {0: TrainSample.supervised("doc0", tokens.tolist(), [1.0] * 16, temperature=0.7)}
    before, after = policy(packed(samples))[0], policy(packed(changed))[0]
    assert torch.equal(before[1:10], after[1:10])
    assert not torch.equal(before[11:], after[11:])


def test_chunks_give_the_same_scores_and_gradients() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 30, bias=False)
    hidden, tokens = torch.randn(13, 8), torch.randint(0, 30, (13,))
    results = []
    for chunk in (13, 4):
        states = hidden.clone().requires_grad_()
        logprobs, entropy = token_scores(states, head, tokens, torch.full((13,), 0.7), chunk_tokens=chunk)
        head.zero_grad()
        (logprobs * torch.arange(13)).sum().backward()
        assert states.grad is not None and head.weight.grad is not None
        results.append((logprobs.detach(), entropy, states.grad, head.weight.grad.clone()))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, atol=1e-5, rtol=1e-5)


def test_a_missing_model_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        Policy.load(ModelConfig(name=str(tmp_path / "nowhere")))
