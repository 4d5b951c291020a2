"""The three-component loss against the reference values of the field."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rollstream.core.config import DppoLossConfig, IcepopLossConfig, IpoLossConfig
from rollstream.trainer.loss import Objective, TokenStreams, make_objective, mismatch_kl, ref_kl, total_loss

TRIPLES = [(0.5, 0.5, 1.0), (0.9, 0.6, 1.0), (0.3, 0.6, -1.0), (0.5, 0.45, -0.5), (0.25, 0.5, 0.5), (0.95, 0.6, -1.0),
           (0.3, 0.6, 0.0)]
DPPO = [(-1, -1), (0.000164401954, 0.000810930216), (0.000480453014, -0.001386294361), (0.555566656394, 0.555766276587),
        (-0.249519546986, -0.251386294361), (1.583544503295, 1.584252397992), (0.000480453014, -0.001386294361)]
IPO = [*DPPO[:4], (0.000480453014, -0.001386294361), (0.000211169962, 0.000919064659), DPPO[6]]


def evaluate(objective: Objective, triples: list[tuple[float, float, float]]) -> tuple[Tensor, Tensor]:
    """Values and d/d lt of each token, in float64."""
    p_t, p_i, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*triples, strict=True))
    lt = p_t.log().requires_grad_()
    values = objective(lt, p_i.log(), advantages).values
    values.sum().backward()
    assert lt.grad is not None
    return values.detach(), lt.grad


def streams(length: int, **given: list[float]) -> TokenStreams:
    names = ("inference_logprobs", "advantages", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs")
    tensors = {name: torch.tensor(given.get(name, [0.0] * length)) for name in names}
    return TokenStreams(sampled=torch.tensor(given.get("sampled", [1.0] * length)).bool(), **tensors)


def loss_of(lt: Tensor, tokens: TokenStreams, counts: Tensor | None = None) -> Tensor:
    objective = make_objective(DppoLossConfig())
    return total_loss(lt, torch.zeros_like(lt), tokens, tokens.counts() if counts is None else counts, objective).total


@pytest.mark.parametrize(
    ("config", "expected"), [(DppoLossConfig(), DPPO), (IpoLossConfig(), IPO)], ids=["dppo", "ipo"]
)
def test_token_values_and_gradients(
    config: DppoLossConfig | IpoLossConfig, expected: list[tuple[float, float]]
) -> None:
    values, gradients = evaluate(make_objective(config), TRIPLES)
    assert values.tolist() == pytest.approx([value for value, _ in expected], abs=1e-9)
    assert gradients.tolist() == pytest.approx([gradient for _, gradient in expected], abs=1e-9)


def test_ipo_without_kl_has_equal_values_and_gradients() -> None:
    triples = [(0.5, 0.5, 1.0), (0.95, 0.6, 1.0), (0.2, 0.6, -1.0), (0.5, 0.4, -0.5), (0.25, 0.5, 0.5)]
    values, gradients = evaluate(make_objective(IpoLossConfig(eps=0.3, kl_tau=0)), triples)
    assert values.tolist() == pytest.approx([-1, 0, 0, 0.625, -0.25])
    assert values.sum().item() == pytest.approx(-0.625)
    assert gradients.tolist() == pytest.approx(values.tolist())


def test_icepop_counts_ratios_outside_the_band_as_zero() -> None:
    triples = [(0.5, 0.5, 1.0), (0.9, 0.1, 1.0), (0.05, 0.5, -1.0), (0.6, 0.15, 2.0)]
    values, gradients = evaluate(make_objective(IcepopLossConfig()), triples)
    assert values.tolist() == pytest.approx([-1, 0, 0, -8])
    assert gradients.tolist() == pytest.approx([-1, 0, 0, -8])


def test_mismatch_kl() -> None:
    ratios = torch.tensor([1, 1.5, 0.5, 1.25, 0.4], dtype=torch.float64)
    expected = [0, 0.094534892, 0.193147181, 0.026856449, 0.316290732]
    assert mismatch_kl(ratios.log(), torch.zeros(5, dtype=torch.float64)).tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("p_t", "p_i", "p_ref", "value", "gradient"),
    [(0.5, 0.4, 0.8, -0.587454743513, -0.587058249455), (0.2, 0.5, 0.8, 0.000839588705, -0.001832581464)],
)
def test_ref_kl(p_t: float, p_i: float, p_ref: float, value: float, gradient: float) -> None:
    lt = torch.tensor([math.log(p_t)], dtype=torch.float64, requires_grad=True)
    values = ref_kl(lt, torch.tensor([math.log(p_i)]).double(), torch.tensor([math.log(p_ref)]).double()).values
    values.sum().backward()
    # li and ref pass through float32, as they do on the wire.
    assert values.item() == pytest.approx(value, abs=1e-7)
    assert lt.grad is not None and lt.grad.item() == pytest.approx(gradient, abs=1e-7)


@pytest.mark.parametrize(
    ("weights", "expected"), [([1.0, 0.0, 1.0], 0.15), ([0.1, 0.0, 0.1], None), ([0.0, 0.1, 0.0], 0.05)]
)
def test_ce_weighs_values_but_not_counts(weights: list[float], expected: float | None) -> None:
    lt = torch.tensor([-0.1, -0.5, -0.2])
    tokens = streams(3, ce_weights=weights)
    if expected is None:  # the table's second row gives N explicitly
        assert loss_of(lt, tokens, torch.tensor([0.0, 1.0, 0.0])).item() == pytest.approx(0.03)
    else:
        assert loss_of(lt, tokens).item() == pytest.approx(expected)


def mixed() -> tuple[Tensor, TokenStreams]:
    half = math.log(0.5)
    tokens = streams(
        4, inference_logprobs=[half] * 4, advantages=[1, -1, 2, 0], rl_weights=[1] * 4, sampled=[1, 1, 1, 0],
        ce_weights=[0, 0, 0, 0.1],
    )
    return torch.full((4,), half), tokens


def test_mixed_components_each_have_their_own_count() -> None:
    lt, tokens = mixed()
    assert tokens.counts().tolist() == [3, 1, 0]
    assert loss_of(lt, tokens).item() == pytest.approx(-0.597351949, abs=1e-7)


def test_overlapping_components_add_up() -> None:
    lt = torch.tensor([-0.3, -0.9, -1.2])
    rl = {"inference_logprobs": [-0.4, -0.8, -1.0], "advantages": [1.0, -0.5, 2.0], "rl_weights": [1.0, 1.0, 0.5]}
    ce = {"ce_weights": [0.5, 0.0, 1.0]}
    both = loss_of(lt, streams(3, **rl, **ce))
    assert both.item() == pytest.approx((loss_of(lt, streams(3, **rl)) + loss_of(lt, streams(3, **ce))).item())


def test_all_components_empty_still_runs_backward() -> None:
    lt = torch.tensor([-0.5, -1.0], requires_grad=True)
    loss = loss_of(lt, streams(2))
    loss.backward()
    assert loss.item() == 0
    assert lt.grad is not None and lt.grad.tolist() == [0, 0]


def test_normalised_over_ranks_not_per_rank() -> None:
    """Rank sums 3.0 over 3 tokens and 5.0 over 1 token make 2.0; a mean of rank means would make 3.0."""
    first = streams(3, ce_weights=[1, 1, 1])
    second = streams(1, ce_weights=[1])
    counts = first.counts() + second.counts()
    total = loss_of(torch.tensor([-1.0, -1.0, -1.0]), first, counts) + loss_of(torch.tensor([-5.0]), second, counts)
    assert total.item() == pytest.approx(2.0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 89.0, -200.0])
@pytest.mark.parametrize("config", [DppoLossConfig(), IpoLossConfig(), IcepopLossConfig()], ids=lambda c: c.type)
def test_masked_tokens_cannot_leak(poison: float, config: DppoLossConfig) -> None:
    lt = torch.tensor([-0.5, poison], requires_grad=True)
    tokens = streams(
        2, inference_logprobs=[-0.5, -poison], advantages=[1.0, poison], rl_weights=[1.0, 1.0], sampled=[1, 0],
        ref_logprobs=[0.0, poison],
    )
    result = total_loss(lt, torch.zeros(2), tokens, tokens.counts(), make_objective(config))
    result.total.backward()
    assert result.total.item() == pytest.approx(-1.0)
    assert lt.grad is not None and lt.grad.tolist() == pytest.approx([-1.0, 0.0])
    assert all(torch.isfinite(value) for value in result.sums.values())


def test_a_huge_log_ratio_stays_finite() -> None:
    lt = torch.tensor([-0.1], requires_grad=True)
    tokens = streams(1, inference_logprobs=[-95.0], advantages=[-1.0], rl_weights=[1.0])
    loss = loss_of(lt, tokens)
    loss.backward()
    assert math.isfinite(loss.item()) and lt.grad is not None and math.isfinite(lt.grad.item())
