"""preference: Bradley–Terry on pairs and rankings."""

import itertools
import math

import torch
from closeness import POISONS, assert_close, assert_gradient, gradient, mask_of, poisoned

from heedful.objectives import preference


def inverse(losses):
    """Score differences whose Bradley–Terry losses are ``losses``."""
    return torch.tensor([-math.log(math.exp(x) - 1) for x in losses])


def test_REW_04_values_without_infinity():
    assert_close(preference.bradley_terry(torch.tensor([1.0]), torch.tensor([0.0])).loss, 0.313262)
    out = preference.bradley_terry(torch.tensor([-60.0]), torch.tensor([60.0]))
    assert_close(out.loss, 120.0, largest=1e-4)
    assert_close(
        gradient(lambda x: preference.bradley_terry(x, torch.tensor([60.0])).loss, torch.tensor([-60.0]))[0], -1.0
    )
    for width in (2, 7):  # padding of the ranking changes nothing
        scores = torch.full((1, width), 5.0)
        scores[0, :2] = torch.tensor([1.0, 0.0])
        ranks = torch.ones(1, width, dtype=torch.long)
        ranks[0, 1] = 2
        assert_close(preference.ranking(scores, ranks, mask_of([2], width)).loss, 0.313262)


def test_REW_05_mean_for_every_order():
    for order in itertools.permutations((0.4, 0.8, 1.2)):
        assert_close(preference.bradley_terry(inverse(order), torch.zeros(3)).loss, 0.8)


def test_DAT_07_identical_pair():
    score = torch.tensor([0.37])
    out = preference.bradley_terry(score, score)
    assert_close(out.loss, 0.693147)
    assert_close(out.metrics["accuracy"], 0.5)
    assert_close(gradient(lambda x: preference.bradley_terry(x, x).loss, score), torch.zeros(1), largest=0.0)
    same = preference.ranking(torch.full((1, 2), 0.37), torch.tensor([[1, 2]]), mask_of([2], 2))
    assert_close(same.loss, 0.693147)
    assert_close(same.metrics["accuracy"], 0.5)


def test_margin_and_label_smoothing():
    chosen, rejected = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 2.5])
    softplus = lambda x: math.log1p(math.exp(x))  # noqa: E731
    with_margin = preference.bradley_terry(chosen, rejected, margin_N=torch.tensor([0.5, 1.0]))
    assert_close(with_margin.loss, (softplus(-0.5) + softplus(0.5)) / 2)
    assert_close(with_margin.metrics["margin"], 0.75)
    assert_close(with_margin.metrics["accuracy"], 1.0)
    smoothed = preference.bradley_terry(chosen[:1], rejected[:1], label_smoothing=0.1)
    assert_close(smoothed.loss, 0.9 * softplus(-1) + 0.1 * softplus(1))
    for bad in (-0.1, 0.5, 1.0):
        try:
            preference.bradley_terry(chosen, rejected, label_smoothing=bad)
        except ValueError as error:
            assert "label_smoothing" in str(error)
        else:
            raise AssertionError(f"label_smoothing {bad} was accepted")


def test_ranking_of_one_prompt_is_the_mean_over_its_pairs():
    scores, ranks = torch.tensor([[0.3, -1.0, 2.0, 0.3, 0.9]]), torch.tensor([[2, 1, 4, 3, 2]])
    pairs = [(i, j) for i in range(5) for j in range(5) if ranks[0, i] < ranks[0, j]]
    assert len(pairs) == 9
    better, worse = (scores[0, list(side)] for side in zip(*pairs))
    for smoothing in (0.0, 0.2):
        pairwise = preference.bradley_terry(better, worse, label_smoothing=smoothing)
        listwise = preference.ranking(scores, ranks, mask_of([5], 5), label_smoothing=smoothing)
        assert_close(listwise.loss, pairwise.loss)
        for name in ("accuracy", "margin"):
            assert_close(listwise.metrics[name], pairwise.metrics[name])


def test_ranking_weighs_prompts_equally():
    """Four answers (6 pairs), two answers (1 pair), only ties, one answer, none."""
    scores = torch.tensor([[3.0, 2, 1, 0], [0, 1, 9, 9], [1, 2, 3, 4], [5, 0, 0, 0], [0, 0, 0, 0]])
    ranks = torch.tensor([[1, 2, 3, 4], [1, 2, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    mask = mask_of([4, 2, 4, 1, 0], 4)
    softplus = lambda x: math.log1p(math.exp(x))  # noqa: E731
    first = (3 * softplus(-1) + 2 * softplus(-2) + softplus(-3)) / 6
    out = preference.ranking(scores, ranks, mask)
    assert_close(out.loss, (first + softplus(1)) / 2)
    assert_close(out.metrics["accuracy"], 0.5)
    assert_close(out.metrics["margin"], (10 / 6 - 1) / 2)
    assert int(preference.num_prompts(ranks, mask)) == 2
    grad = gradient(lambda x: preference.ranking(x, ranks, mask).loss, scores)
    assert_close(grad[2:], torch.zeros(3, 4), largest=0.0)
    assert_close(grad[1, 2:], torch.zeros(2), largest=0.0)


def test_SFT_07_ranking_micro_batches_add_up():
    torch.manual_seed(0)
    scores, ranks = torch.randn(6, 4), torch.randint(1, 5, (6, 4))
    mask = mask_of([4, 3, 2, 1, 4, 0], 4)
    count = preference.num_prompts(ranks, mask)
    whole = preference.ranking(scores, ranks, mask)
    parts = [preference.ranking(scores[[p]], ranks[[p]], mask[[p]], denominator=count) for p in range(6)]
    assert_close(sum(p.loss for p in parts), whole.loss)
    for name, total in whole.metrics.items():
        assert_close(sum(p.metrics[name] for p in parts), total)


def test_better_lists_strict_pairs_of_real_answers():
    pairs = preference.better(torch.tensor([[2, 1, 2, 1]]), torch.tensor([[True, True, True, False]]))
    assert pairs.nonzero().tolist() == [[0, 1, 0], [0, 1, 2]]


def test_empty_inputs_give_zero():
    assert_close(preference.bradley_terry(torch.zeros(0), torch.zeros(0)).loss, 0.0, largest=0.0)
    out = preference.ranking(torch.ones(1, 3), torch.ones(1, 3, dtype=torch.long), mask_of([3], 3))
    assert_close(out.loss, 0.0, largest=0.0)


def test_gradients_by_finite_differences():
    torch.manual_seed(1)
    scores, ranks, mask = torch.randn(2, 4).double(), torch.tensor([[1, 3, 2, 2], [2, 1, 1, 4]]), mask_of([4, 3], 4)
    assert_gradient(lambda x: preference.ranking(x, ranks, mask, label_smoothing=0.1).loss, scores)
    assert_gradient(lambda x: preference.bradley_terry(x[0], x[1], margin_N=torch.ones(4)).loss, scores)


def test_poison_and_precision():
    torch.manual_seed(2)
    scores, ranks, mask = torch.randn(3, 4), torch.randint(1, 5, (3, 4)), mask_of([4, 2, 0], 4)
    right = preference.ranking(scores, ranks, mask)
    for poison in POISONS:
        bad = poisoned(scores, mask, poison)
        out = preference.ranking(bad.requires_grad_(), ranks, mask)
        assert_close(out.loss, right.loss, largest=0.0)
        for name, number in out.metrics.items():
            assert_close(number, right.metrics[name], largest=0.0)
            assert not number.requires_grad
        grad = gradient(lambda x: preference.ranking(x, ranks, mask).loss, bad)
        assert bool(grad.isfinite().all()) and bool((grad[~mask] == 0).all())
    low = preference.bradley_terry(torch.tensor([20.0]).bfloat16(), torch.tensor([0.0703125]).bfloat16())
    assert low.loss.dtype == torch.float32
    assert_close(low.metrics["margin"], 20 - 0.0703125)
