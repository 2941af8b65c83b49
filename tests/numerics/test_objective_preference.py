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


def test_weights_count_a_prompt_so_many_times():
    """Three copies of a prompt and none of another are weights of 3 and 0; the denominator is that of the step."""
    torch.manual_seed(1)
    scores, ranks = torch.randn(3, 4), torch.tensor([[1, 2, 3, 4], [2, 1, 0, 0], [1, 2, 2, 0]])
    mask = mask_of([4, 2, 3], 4)
    rows = [0, 0, 0, 2]
    ids, lengths = torch.randint(9, (3, 4, 5)), torch.tensor([[5, 3, 4, 2], [2, 5, 1, 1], [1, 4, 5, 1]])
    values, weights = torch.randn(3, 4, 5), torch.tensor([3.0, 0.0, 1.0])
    copied = preference.ranking(scores[rows], ranks[rows], mask[rows], denominator=3)
    weighted = preference.ranking(scores, ranks, mask, denominator=3, weights_P=weights)
    assert_close(weighted.loss, copied.loss)
    copied = preference.every_token(values[rows], ids[rows], lengths[rows], ranks[rows], mask[rows], denominator=3)
    weighted = preference.every_token(values, ids, lengths, ranks, mask, denominator=3, weights_P=weights)
    assert_close(weighted.loss, copied.loss)


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


def softplus(x):
    return math.log1p(math.exp(x))


def test_soft_labels_are_cross_entropy_and_nobodys_pair_is_none():
    scores, ranks, mask = torch.tensor([[1.0, 0.0, 3.0]]), torch.tensor([[1, 2, 3]]), mask_of([3], 3)
    targets = torch.full((1, 3, 3), 0.99)
    targets[0, 0, 1], targets[0, 0, 2], targets[0, 1, 2] = 0.7, 0.2, float("nan")
    first, second = 0.7 * softplus(-1) + 0.3 * softplus(1), 0.2 * softplus(2) + 0.8 * softplus(-2)
    out = preference.ranking(scores, ranks, mask, targets_PKK=targets)
    assert_close(out.loss, (first + second) / 2)
    assert_close(out.metrics["accuracy"], 0.5)
    smoothed = preference.ranking(scores[:, :2], ranks[:, :2], mask[:, :2], targets_PKK=targets[:, :2, :2],
                                  label_smoothing=0.1)  # fmt: skip
    q = 0.7 * 0.9 + 0.3 * 0.1
    assert_close(smoothed.loss, q * softplus(-1) + (1 - q) * softplus(1))
    grad = gradient(lambda x: preference.ranking(x, ranks, mask, targets_PKK=targets).loss, scores)
    assert bool(grad.isfinite().all())
    nobody = torch.full((1, 3, 3), float("nan"))
    assert int(preference.num_prompts(ranks, mask, targets_PKK=nobody)) == 0
    assert int(preference.num_prompts(ranks, mask, targets_PKK=targets)) == 1
    assert_close(preference.ranking(scores, ranks, mask, targets_PKK=nobody).loss, 0.0, largest=0.0)


def test_a_tie_is_no_pair_or_half_a_win_for_either():
    scores, ranks, mask = torch.tensor([[2.0, 0.0, 0.5, 9.0]]), torch.tensor([[1, 1, 2, 1]]), mask_of([3], 4)
    decided = [softplus(-1.5), softplus(0.5)]
    tie = (softplus(2) + softplus(-2)) / 2
    assert_close(preference.ranking(scores, ranks, mask).loss, sum(decided) / 2)
    # neither soft labels nor margins, of the other way round or not, say anything about a tie
    given = {"targets_PKK": torch.ones(1, 4, 4), "margins_PKK": torch.zeros(1, 4, 4)}
    given["margins_PKK"][0, 0, 1] = given["margins_PKK"][0, 1, 0] = 7.0
    for options in ({}, given):
        out = preference.ranking(scores, ranks, mask, ties="half", **options)
        assert_close(out.loss, (sum(decided) + tie) / 3)
        assert_close(out.metrics["accuracy"], 0.5)  # of the pairs that people told apart
    pairs = preference.pairs(ranks, mask, ties="half").nonzero().tolist()
    assert pairs == [[0, 0, 1], [0, 0, 2], [0, 1, 2]]
    tied = torch.ones(1, 4, dtype=torch.long)
    assert int(preference.num_prompts(tied, mask)) == 0 and int(preference.num_prompts(tied, mask, ties="half")) == 1
    for smoothing in (0.0, 0.3):
        loss = preference.ranking(scores, tied, mask_of([2], 4), ties="half", label_smoothing=smoothing).loss
        assert_close(loss, tie)


def test_margins_of_a_ranking_are_those_of_its_pairs():
    scores, ranks, mask = torch.tensor([[1.0, 3.0, 2.5]]), torch.tensor([[2, 1, 3]]), mask_of([3], 3)
    margins = torch.zeros(1, 3, 3)
    margins[0, 1, 0], margins[0, 0, 2], margins[0, 1, 2] = 0.5, 1.0, 1.5
    out = preference.ranking(scores, ranks, mask, margins_PKK=margins)
    assert_close(out.loss, (softplus(0.5 - 2.0) + softplus(1.0 + 1.5) + softplus(1.5 - 0.5)) / 3)
    assert_close(out.metrics["margin"], (2.0 - 1.5 + 0.5) / 3)
    assert_close(out.metrics["accuracy"], 2 / 3)


def test_order_counts_the_pairs_it_is_given():
    scores = torch.tensor([[1.0, 0.0, 5.0], [1.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    pairs = torch.zeros(3, 3, 3, dtype=torch.bool)
    pairs[0, 0, 1] = pairs[0, 0, 2] = pairs[1, 0, 1] = True
    found = preference.order(scores.requires_grad_(), pairs)
    assert_close(found["accuracy"], (0.5 + 0.5) / 2)
    assert_close(found["margin"], ((1 - 4) / 2 + 0) / 2)
    assert not found["accuracy"].requires_grad and not found["margin"].requires_grad
    assert_close(preference.order(scores, pairs, denominator=4)["accuracy"], 1 / 4)


def every_token_case():
    """Answers 5 6 7 / 5 8 / 9: they part at 1 and at 0, and end at 3, 2 and 1."""
    ids = torch.tensor([[[5, 6, 7], [5, 8, 0], [9, 0, 0]]])
    values = torch.tensor([[[1.0, 2.0, 4.0], [0.5, 1.0, 77.0], [0.0, 77.0, 77.0]]])
    return values, ids, torch.tensor([[3, 2, 1]]), torch.tensor([[1, 2, 3]]), mask_of([3], 3)


def test_REW_04_every_token_from_the_first_difference_to_the_longer_end():
    values, ids, lengths, ranks, mask = every_token_case()
    first = (softplus(-(2.0 - 1.0)) + softplus(-(4.0 - 1.0))) / 2  # the second answer keeps its score 1
    second = (softplus(-1.0) + softplus(-2.0) + softplus(-4.0)) / 3
    third = (softplus(-0.5) + softplus(-1.0)) / 2
    out = preference.every_token(values, ids, lengths, ranks, mask)
    assert_close(out.loss, (first + second + third) / 3)
    assert_close(out.metrics["margin"], (3.0 + 4.0 + 1.0) / 3)
    assert_close(out.metrics["accuracy"], 1.0)
    for poison in POISONS:  # padding of tokens and of answers
        wide = torch.full((1, 4, 5), poison)
        wide[:, :3, :3] = values
        wide[0, 1, 2:] = wide[0, 2, 1:] = poison
        wide_ids = torch.nn.functional.pad(ids, (0, 2, 0, 1), value=6)
        other = [torch.nn.functional.pad(x, (0, 1)) for x in (lengths, ranks, mask)]
        padded = preference.every_token(wide, wide_ids, *other)
        assert_close(padded.loss, out.loss)
        assert_close(padded.metrics["margin"], out.metrics["margin"])
        grad = gradient(lambda x, i=wide_ids, o=other: preference.every_token(x, i, *o).loss, wide)
        right = gradient(lambda x: preference.every_token(x, ids, lengths, ranks, mask).loss, values)
        assert_close(grad[:, :3, :3], right) and bool((grad[:, 3] == 0).all())
    assert_close(right[0, 0, 0], -1 / 3 / 3 / (1 + math.e))  # only against the third answer
    assert_close(right[0, 1, 2], 0.0, largest=0.0)


def test_every_token_counts_from_where_answers_part():
    """Answers that agree again later have parted all the same; one that is the other's beginning parts at its end."""
    lengths, ranks, mask = torch.tensor([[2, 2]]), torch.tensor([[1, 2]]), mask_of([2], 2)
    values, ids = torch.tensor([[[1.0, 3.0], [0.0, 0.0]]]), torch.tensor([[[1, 3], [2, 3]]])
    again = preference.every_token(values, ids, lengths, ranks, mask)
    assert_close(again.loss, (softplus(-1) + softplus(-3)) / 2)
    ids = torch.tensor([[[1, 3], [1, 3]]])  # the pad id is that of the other's last token
    begins = preference.every_token(values, ids, torch.tensor([[2, 1]]), ranks, mask)
    assert_close(begins.loss, softplus(-3))
    values, ids = torch.tensor([[[1.0], [0.0703125]]]).bfloat16(), torch.tensor([[[1], [2]]])
    low = preference.every_token(values, ids, torch.ones(1, 2, dtype=torch.long), ranks, mask)
    assert low.loss.dtype == torch.float32
    assert_close(low.loss, softplus(0.0703125 - 1))


def test_every_token_takes_the_labels_of_a_ranking():
    """With one token per answer it is the ranking loss, whatever the options; micro-batches add up."""
    torch.manual_seed(3)
    scores, ranks, mask = torch.randn(4, 3), torch.tensor([[1, 2, 3], [2, 1, 1], [1, 1, 1], [2, 1, 0]]), None
    mask = mask_of([3, 3, 3, 2], 3)
    ids, lengths = torch.arange(12).reshape(4, 3, 1), torch.ones(4, 3, dtype=torch.long)
    targets = torch.rand(4, 3, 3)
    targets[0, 0, 2] = float("nan")
    for options in ({}, {"ties": "half"}, {"targets_PKK": targets}, {"margins_PKK": torch.rand(4, 3, 3)},
                    {"label_smoothing": 0.2}, {"denominator": 7}):  # fmt: skip
        right = preference.ranking(scores, ranks, mask, **options)
        out = preference.every_token(scores[..., None], ids, lengths, ranks, mask, **options)
        assert_close(out.loss, right.loss)
        for name, number in right.metrics.items():
            assert_close(out.metrics[name], number)
    values, ids, lengths = torch.randn(4, 3, 5), torch.randint(3, (4, 3, 5)), torch.tensor([[5, 2, 3]] * 4)
    whole = preference.every_token(values, ids, lengths, ranks, mask, denominator=4)
    parts = [preference.every_token(values[[p]], ids[[p]], lengths[[p]], ranks[[p]], mask[[p]], denominator=4).loss
             for p in range(4)]  # fmt: skip
    assert_close(sum(parts), whole.loss)


def test_zero_centre_ties_the_level_and_leaves_the_differences():
    scores, mask = torch.tensor([[1.0, 3.0, 9.0], [-4.0, -1.0, -4.0], [8.0, 8.0, 8.0]]), mask_of([2, 3, 0], 3)
    out = preference.zero_centre(scores.clone().requires_grad_(), mask, coefficient=0.5, denominator=2)
    assert_close(out.loss, 0.5 * (4 + 9) / 2)
    assert_close(out.metrics["level"], 6.5)
    assert not out.metrics["level"].requires_grad
    grad = gradient(lambda x: preference.zero_centre(x, mask, coefficient=0.5, denominator=2).loss, scores)
    assert_close(grad, torch.tensor([[0.5, 0.5, 0], [-0.5, -0.5, -0.5], [0, 0, 0]]))


def test_spread_limit_acts_above_the_limit_alone():
    scores = torch.tensor([[1.0, 5.0, 99.0], [0.0, 0.2, 0.4], [3.0, 3.0, 3.0], [7.0, 0.0, 0.0]])
    mask = mask_of([2, 3, 3, 1], 3)
    out = preference.spread_limit(scores.clone().requires_grad_(), mask, limit=0.5, coefficient=3.0, denominator=4)
    assert_close(out.loss, 3 * 1.5**2 / 4, largest=1e-5)
    assert_close(out.metrics["spread"], (2 + math.sqrt(0.08 / 3)) / 4, largest=1e-5)
    assert not out.metrics["spread"].requires_grad
    grad = gradient(lambda x: preference.spread_limit(x, mask, limit=0.5, denominator=4).loss, scores)
    assert bool(grad.isfinite().all()) and bool((grad[1:] == 0).all())
    assert_close(grad[0], torch.tensor([-0.375, 0.375, 0.0]))


def test_length_correlation_is_pooled_within_prompts():
    """Equal to numpy on hand-centred values; levels of prompts say nothing, nor do pads."""
    import numpy

    scores = torch.tensor([[100.0, 101.0, 0.0], [-50.0, -52.0, -50.5], [5.0, 5.0, 5.0]])
    lengths, mask = torch.tensor([[10, 40, 0], [20, 5, 9], [3, 3, 3]]), mask_of([2, 3, 0], 3)
    found = preference.length_correlation(scores, lengths, mask)
    s = [-0.5, 0.5, *(numpy.array([-50.0, -52.0, -50.5]) - -50.8333333)]
    logs = [numpy.log([10, 40]), numpy.log([20, 5, 9])]
    centred = numpy.concatenate([x - x.mean() for x in logs])
    assert_close(found, numpy.corrcoef(s, centred)[0, 1], largest=1e-4)
    assert float(found) > 0.9
    assert_close(preference.length_correlation(scores * -7, lengths, mask), -found, largest=1e-5)
    for poison in POISONS:
        bad = poisoned(scores, mask, poison)
        assert_close(preference.length_correlation(bad, lengths, mask), found, largest=0.0)
        assert bool(gradient(lambda x: preference.length_correlation(x, lengths, mask), bad).isfinite().all())
    for same, long in ((torch.ones(1, 3), lengths[:1]), (scores[:1], torch.full((1, 3), 6))):
        assert_close(preference.length_correlation(same, long, mask_of([2], 3)), 0.0, largest=0.0)
        grad = gradient(lambda x, y=long: preference.length_correlation(x, y, mask_of([2], 3)), same)
        assert_close(grad, torch.zeros(1, 3), largest=0.0)


def test_length_slope_is_the_logistic_regression_on_log_length():
    """Two batches; for K = 2 against statsmodels, for K = 3 against values nearby; weights, soft labels, separation."""
    import statsmodels.api

    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 90, (40, 2), generator=generator)
    ranks = torch.tensor([[1, 2], [2, 1]])[torch.randint(0, 2, (40,), generator=generator)]
    mask, weights = mask_of([2] * 40, 2), torch.rand(40, generator=generator)
    found = preference.length_slope([
        (lengths[part], ranks[part], mask[part], {"weights_P": weights[part]}) for part in (slice(0, 7), slice(7, 40))
    ])  # fmt: skip
    logs = lengths.double().log()
    model = statsmodels.api.GLM(
        (ranks[:, 0] == 1).numpy(), (logs[:, 0] - logs[:, 1]).numpy(), statsmodels.api.families.Binomial(),
        freq_weights=weights.numpy(),
    )  # fmt: skip
    assert_close(torch.tensor(found), float(model.fit().params[0]), largest=1e-4)

    lengths, ranks = torch.tensor([[9, 4, 1], [2, 8, 30]]), torch.tensor([[1, 2, 3], [2, 1, 3]])
    mask, told = mask_of([3, 3], 3), {"label_smoothing": 0.1, "targets_PKK": torch.full((2, 3, 3), 0.8)}
    best = preference.length_slope([(lengths, ranks, mask, told)])

    def cost(beta):
        return float(preference.ranking(beta * lengths.double().log(), ranks, mask, **told).loss)

    assert cost(best) < min(cost(best - 0.01), cost(best + 0.01))
    for order, expected in (([1, 2, 3], math.inf), ([3, 2, 1], -math.inf)):
        alone = (lengths[:1], torch.tensor([order]), mask[:1], {})
        assert preference.length_slope([alone]) == expected
    assert preference.length_slope([(torch.full((1, 3), 5), ranks[:1], mask[:1], {})]) == 0


def test_deviation_is_within_prompts():
    """Levels of prompts do not count, nor does what is masked; a prompt of one answer says nothing."""
    scores = torch.tensor([[1.0, 3, 5, 99], [100, 104, -7, 99], [8, 99, 99, 99]])
    mask = mask_of([3, 2, 1], 4)
    assert_close(preference.deviation(scores, mask), math.sqrt((4 + 0 + 4 + 4 + 4) / (2 + 1)))
    assert_close(preference.deviation(scores[2:], mask[2:]), 0.0)


def test_disagreement_takes_out_level_and_scale():
    scores = torch.tensor([[1.0, 3, 5, 99], [10, 4, 7, 99], [8, 2, 99, 99]])
    mask = mask_of([3, 3, 2], 4)
    level = torch.tensor([[5.0], [-9], [100]])
    agreeing = torch.stack([scores, 3 * scores + level, 0.1 * scores - level], dim=-1)
    assert_close(preference.disagreement(agreeing, mask), 0.0)
    turned = torch.stack([scores, -scores], dim=-1)  # the sample deviation of x and −x is √2 · |x|
    sizes = sum([2, 0, 2, 3, 3, 0, 3, 3]) / 8
    expected = math.sqrt(2) * sizes / float(preference.deviation(scores, mask))
    assert_close(preference.disagreement(turned, mask), expected)


def test_honesty_terms_by_finite_differences_and_at_masked_places():
    torch.manual_seed(4)
    scores, mask = torch.randn(3, 4).double(), mask_of([4, 3, 2], 4)
    lengths, ids = torch.randint(1, 50, (3, 4)), torch.randint(3, (2, 3, 4))
    terms = {
        "centre": lambda x: preference.zero_centre(x, mask, coefficient=0.3, denominator=3).loss,
        "spread": lambda x: preference.spread_limit(x, mask, limit=0.4, coefficient=2.0, denominator=3).loss,
        "length": lambda x: preference.length_correlation(x, lengths, mask) ** 2,
    }
    for term in terms.values():
        assert_gradient(term, scores)
        for poison in POISONS:
            bad = poisoned(scores, mask, poison)
            assert_close(term(bad), term(scores), largest=0.0)
            grad = gradient(term, bad)
            assert bool(grad.isfinite().all()) and bool((grad[~mask] == 0).all())
    ranks, ends = torch.tensor([[1, 2, 2], [2, 1, 9]]), torch.tensor([[4, 2, 3], [1, 3, 1]])
    labels = {"targets_PKK": torch.rand(2, 3, 3).double(), "margins_PKK": torch.rand(2, 3, 3).double(), "ties": "half"}
    assert_gradient(
        lambda x: preference.every_token(x, ids, ends, ranks, mask_of([3, 2], 3), **labels).loss,
        torch.randn(2, 3, 4).double(),
    )
    assert_gradient(
        lambda x: preference.ranking(x, ranks, mask_of([3, 2], 3), **labels).loss, torch.randn(2, 3).double()
    )
