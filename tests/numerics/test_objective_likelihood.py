"""likelihood: the loss of supervised fine-tuning."""

import torch
from closeness import POISONS, assert_close, gradient, mask_of, poisoned

from heedful.objectives import likelihood


def test_SFT_07_token_mean_over_micro_batches():
    first = likelihood.token_nll(torch.tensor([[-4.0, -9.0, -9.0]]), mask_of([1], 3), denominator=4)
    second = likelihood.token_nll(torch.tensor([[-1.0, -1.0, -2.0]]), mask_of([3], 3), denominator=4)
    assert_close(first.loss + second.loss, 2.0)
    assert_close(first.metrics["nll_nats"] + second.metrics["nll_nats"], 2.0)
    assert_close(first.loss, 1.0)
    assert first.loss.dtype == torch.float32


def test_SFT_07_same_gradient_however_the_batch_is_cut():
    torch.manual_seed(0)
    logits, targets = torch.randn(8, 6, 5), torch.randint(0, 5, (8, 6))
    mask = mask_of([6, 1, 3, 2, 5, 4, 6, 1], 6)

    def loss(x, size):
        total = torch.zeros(())
        for rows in torch.arange(8).split(size):
            logprobs = x[rows].log_softmax(-1).gather(-1, targets[rows, :, None]).squeeze(-1)
            total = total + likelihood.token_nll(logprobs, mask[rows], denominator=int(mask.sum())).loss
        return total

    whole = gradient(lambda x: loss(x, 8), logits)
    for size in (1, 2, 4):
        assert_close(loss(logits, size), loss(logits, 8))
        assert_close(gradient(lambda x, s=size: loss(x, s), logits), whole, largest=1e-7)


def test_SFT_05_rows_without_a_supervised_token():
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -5.0]])
    out = likelihood.token_nll(logprobs, mask_of([0, 2], 2), denominator=2)
    assert_close(out.loss, 4.0)
    for denominator in (0, 7):
        empty = mask_of([0, 0], 2)
        assert_close(likelihood.token_nll(logprobs, empty, denominator=denominator).loss, 0.0, largest=0.0)
        grad = gradient(
            lambda x, d=denominator: likelihood.token_nll(x, mask_of([0, 0], 2), denominator=d).loss, logprobs
        )
        assert_close(grad, torch.zeros(2, 2), largest=0.0)


def test_poison_at_masked_places_changes_nothing():
    logprobs, mask = -torch.rand(2, 3), mask_of([1, 2], 3)
    for poison in POISONS:
        bad = poisoned(logprobs, mask, poison)
        out = likelihood.token_nll(bad.requires_grad_(), mask, denominator=3)
        assert_close(out.loss, likelihood.token_nll(logprobs, mask, denominator=3).loss, largest=0.0)
        assert not out.metrics["nll_nats"].requires_grad
        grad = gradient(lambda x: likelihood.token_nll(x, mask, denominator=3).loss, bad)
        assert_close(grad, torch.where(mask, -1 / 3, 0.0))
