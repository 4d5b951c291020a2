"""Packing, the cost model and the division among ranks against the reference values."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from rollstream.trainer.cost import TOKENS, CostModel, ModelShape
from rollstream.trainer.micro_batch import build
from rollstream.trainer.packing import DUMMY, Bin, pack, partition, plan
from rollstream.trainer.samples import TrainSample

TOY = ModelShape(hidden=16, layers=2, heads=2, kv_heads=2, head_dim=8, ffn=64, vocab=32)
QWEN3_06B = ModelShape(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, ffn=3072, vocab=151936)


def bins_of(lengths: list[int], seq_len: int, ranks: int) -> list[list[tuple[int, ...]]]:
    return [[entry.lengths for entry in share] for share in plan(lengths, seq_len, ranks)]


def test_two_ranks_get_equal_token_sums() -> None:
    assert bins_of([100, 90, 80, 70], 100, 2) == [[(100,), (70,)], [(90,), (80,)]]


@pytest.mark.parametrize(
    ("count", "ranks", "each", "dummies"), [(5, 2, 3, 1), (11, 4, 3, 1), (7, 1, 7, 0), (1, 4, 1, 3)]
)
def test_equal_counts_by_dummies(count: int, ranks: int, each: int, dummies: int) -> None:
    shares = plan([4] * count, 4, ranks)
    assert [len(share) for share in shares] == [each] * ranks
    assert sum(entry == DUMMY for share in shares for entry in share) == dummies


def test_best_fit_decreasing() -> None:
    lengths = [10, 9, 8, 7, 3, 2, 1]
    assert bins_of(lengths, 12, 1) == [[(10, 2), (9, 3), (8, 1), (7,)]]
    assert bins_of(lengths, 12, 2) == [[(10, 2), (8, 1)], [(9, 3), (7,)]]


def test_a_sample_longer_than_the_bin_is_cut() -> None:
    assert bins_of([12, 5], 8, 1) == [[(8,), (5,)]]


def test_nothing_to_train_still_gives_every_rank_a_micro_batch() -> None:
    assert plan([], 8, 3) == [[DUMMY], [DUMMY], [DUMMY]]


def test_partition_has_equal_counts_and_near_equal_cost() -> None:
    assert partition([8, 7, 6, 5, 4, 2], 2) == [[0, 2, 5], [1, 3, 4]]
    assert partition([9, 1, 1, 1], 2) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="evenly"):
        partition([1, 2, 3], 2)


def test_cost_model() -> None:
    toy = CostModel.of(TOY)
    assert (toy.linear, toy.quadratic) == (17408, 64)
    assert (toy([32]), toy([16, 16])) == (622592, 589824)
    qwen = CostModel.of(QWEN3_06B)
    assert (qwen.linear, qwen.quadratic) == (1_133_248_512, 114_688)
    assert (qwen([1024]), qwen([512, 512])) == (1_280_705_560_576, 1_220_576_018_432)


def test_flops() -> None:
    assert QWEN3_06B.matmul_parameters == 595_984_384
    assert QWEN3_06B.training_flops(1024) == 3_928_227_840


def test_cost_balances_long_and_short_documents() -> None:
    shares = plan([32, 32, 16, 16, 16, 16], 32, 2, CostModel.of(TOY))
    assert [sorted(entry.lengths for entry in share) for share in shares] == [[(16, 16), (32,)]] * 2


@pytest.mark.parametrize("case", range(80))
def test_invariants(case: int) -> None:
    random_ = random.Random(case)
    seq_len, ranks = random_.randint(4, 64), random_.randint(1, 5)
    lengths = [random_.randint(1, seq_len + 8) for _ in range(random_.randint(0, 40))]
    shares = plan(lengths, seq_len, ranks, random_.choice([TOKENS, CostModel.of(TOY)]))
    assert len({len(share) for share in shares}) == 1 and len(shares[0]) >= 1
    entries = [entry for share in shares for entry in share]
    assert Counter(index for entry in entries for index in entry.samples) == Counter(range(len(lengths)))
    assert all(entry.tokens <= seq_len for entry in entries)
    assert sum(entry.tokens for entry in entries) == sum(min(length, seq_len) for length in lengths)
    assert plan(lengths, seq_len, ranks, TOKENS) == plan(lengths, seq_len, ranks, TOKENS)
    for entry in entries:
        if entry == DUMMY:
            assert build(entry, {}).streams.counts().tolist() == [0, 0, 0]
            assert not build(entry, {}).streams.advantages.any()


def rl_sample(length: int, prompt: int) -> TrainSample:
    ones = np.ones(length, np.float32)
    zeros = np.zeros(length, np.float32)
    return TrainSample(
        name=f"rl{length}", token_ids=np.arange(length), sampled=np.arange(length) >= prompt, logprobs=-ones,
        advantages=ones, rl_weights=ones, ce_weights=zeros, ref_kl_weights=zeros, ref_logprobs=zeros, temperature=0.7,
    )


def test_streams_are_filled_where_a_sample_has_none() -> None:
    ce = TrainSample.supervised("ce", [1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 1])
    rl = rl_sample(4, prompt=1)
    batch = build(Bin((0, 1), (6, 4)), {0: ce, 1: rl})
    # Position 6 is the first token of its document: nothing stands before it, so nothing predicts it.
    assert batch.streams.rl_weights.tolist() == [0] * 6 + [0, 1, 1, 1]
    assert batch.streams.ce_weights.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert batch.streams.ref_kl_weights.tolist() == [0] * 10
    mirrored = build(Bin((1, 0), (4, 6)), {0: ce, 1: rl})
    assert mirrored.streams.rl_weights.tolist() == [0, 1, 1, 1] + [0] * 6
    assert mirrored.streams.ce_weights.tolist() == [0] * 4 + [0, 0, 0, 1, 1, 1]
    assert batch.temperature.tolist() == pytest.approx([1.0] * 6 + [0.7] * 4)


def test_padding_is_a_document_outside_the_loss() -> None:
    batch = build(Bin((0,), (4,)), {0: rl_sample(4, prompt=1)}, pad_multiple=6)
    assert batch.tokens == 6
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.streams.rl.tolist() == [False, True, True, True, False, False]


def test_a_cut_sample_may_lose_all_its_loss_tokens() -> None:
    batch = build(Bin((0,), (8,)), {0: rl_sample(12, prompt=9)})
    assert batch.tokens == 8
    assert batch.streams.counts().tolist() == [0, 0, 0]


def test_pack_keeps_indices_with_their_lengths() -> None:
    assert pack([3, 12, 5], 8) == [Bin((1,), (8,)), Bin((2, 0), (5, 3))]
