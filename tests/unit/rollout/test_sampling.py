"""Sampling by inversion draws from softmax(logits / temperature), one uniform number per token."""

from __future__ import annotations

import pytest
import torch

from heedful.errors import EngineError
from heedful.rollout.engine import Request, Sampling
from heedful.rollout.hf import _sample, _uniforms

LOGITS_V = torch.tensor([2.0, 1.0, 0.0, -1.0, -float("1e9"), 0.5])
NUM_DRAWS = 20_000


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_are_the_probabilities(temperature):
    uniforms_B = torch.rand(NUM_DRAWS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens_B, logprobs_B = _sample(LOGITS_V.expand(NUM_DRAWS, -1), uniforms_B, temperature)
    expected_V = (LOGITS_V / temperature).softmax(0)
    counts_V = torch.bincount(tokens_B, minlength=6).double()
    assert counts_V[4] == 0
    possible_V = expected_V > 0
    expected = expected_V[possible_V] * NUM_DRAWS
    chi_square = float(((counts_V[possible_V] - expected) ** 2 / expected).sum())
    assert chi_square < 18.47  # 0.1 % point at 4 degrees of freedom
    wrong = (LOGITS_V / (temperature * 1.1)).softmax(0)[possible_V] * NUM_DRAWS
    assert float(((counts_V[possible_V] - wrong) ** 2 / wrong).sum()) > 18.47  # the check can fail
    assert torch.allclose(logprobs_B, (LOGITS_V / temperature).log_softmax(0)[tokens_B])


def test_rows_have_their_own_distribution():
    logits_BV = torch.tensor([[0.0, -1e9, -1e9], [-1e9, 0.0, -1e9], [-1e9, -1e9, 0.0]])
    for u in (0.0, 0.5, 1 - 1e-16):
        tokens_B, logprobs_B = _sample(logits_BV, torch.full((3,), u, dtype=torch.float64), 1.0)
        assert tokens_B.tolist() == [0, 1, 2] and logprobs_B.tolist() == [0, 0, 0]


def test_small_probabilities_of_a_large_vocabulary_are_kept():
    """100,000 equal tokens: a float32 running sum would make steps of unequal size."""
    logits_BV = torch.zeros(3, 100_000)
    uniforms_B = torch.tensor([0.123456789, 0.5, 0.987654321], dtype=torch.float64)
    tokens_B, _ = _sample(logits_BV, uniforms_B, 1.0)
    assert (tokens_B - torch.tensor([12345, 50000, 98765])).abs().max() <= 1  # 0.5 lies on a border


def test_temperature_0_takes_the_best_token_and_reports_its_log_prob():
    tokens_B, logprobs_B = _sample(LOGITS_V[None], torch.tensor([0.999], dtype=torch.float64), 0.0)
    assert tokens_B.tolist() == [0]
    assert logprobs_B.tolist() == pytest.approx([float(LOGITS_V.log_softmax(0)[0])])


def test_ROL_07_streams_of_uniforms():
    def stream(seed, prompt, sample, length=8):
        return _uniforms(seed, Request(prompt, sample, []), Sampling(length))

    assert stream(0, "a", 0) == stream(0, "a", 0) and stream(0, "a", 0, 4) == stream(0, "a", 0)[:4]
    others = [stream(1, "a", 0), stream(0, "b", 0), stream(0, "a", 1), stream(0, "a\x001", 0), stream(0, "a1", 0)]
    assert all(other != stream(0, "a", 0) for other in others) and len(set(map(tuple, others))) == 5


@pytest.mark.parametrize("num_tokens", [6, 256, 1000])
def test_blocks_find_the_token_that_one_running_sum_finds(num_tokens):
    generator = torch.Generator().manual_seed(1)
    logits_BV = 3 * torch.randn(400, num_tokens, generator=generator)
    uniforms_B = torch.rand(400, generator=generator, dtype=torch.float64)
    tokens_B, logprobs_B = _sample(logits_BV, uniforms_B, 1.5)
    logprobs_BV = (logits_BV.double() / 1.5).log_softmax(-1)
    expected_B = torch.searchsorted(logprobs_BV.exp().cumsum(-1), uniforms_B[:, None]).squeeze(1)
    assert (tokens_B != expected_B).sum() <= 1  # a border may round to the other side
    assert torch.allclose(logprobs_B.double(), logprobs_BV.gather(1, tokens_B[:, None]).squeeze(1), atol=1e-5)


@pytest.mark.parametrize("num_tokens", [255, 256, 257, 1000])
def test_the_last_uniform_takes_the_last_possible_token(num_tokens):
    logits_BV = torch.randn(4, num_tokens, generator=torch.Generator().manual_seed(2))
    logits_BV[2:, num_tokens // 2 :] = -1e9
    tokens_B, logprobs_B = _sample(logits_BV, torch.full((4,), 1 - 2**-53, dtype=torch.float64), 1.0)
    assert tokens_B.tolist() == [num_tokens - 1] * 2 + [num_tokens // 2 - 1] * 2
    assert bool(torch.isfinite(logprobs_B).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_not_finite_are_refused(bad, dtype):
    logits_BV = torch.zeros(3, 300, dtype=dtype)
    logits_BV[1, 290] = bad
    with pytest.raises(EngineError, match="not finite"):
        _sample(logits_BV, torch.zeros(3, dtype=torch.float64), 1.0)
