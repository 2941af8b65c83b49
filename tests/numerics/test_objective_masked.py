"""masked: mean, variance and whitening over the tokens that count."""

import math

import torch
from closeness import POISONS, assert_close, gradient, mask_of, poisoned

from heedful.objectives import masked

X_BT = torch.tensor([[2.0, 4.0, 0.0, 0.0], [6.0, 0.0, 0.0, 0.0]])
MASK_BT = mask_of([2, 1], 4)


def test_mean_and_variance_by_hand():
    assert_close(masked.mean(X_BT, MASK_BT), 4.0)
    assert_close(masked.mean(X_BT, MASK_BT, denominator=6), 2.0)
    assert_close(masked.mean(X_BT, MASK_BT, denominator=torch.tensor(0.5)), 24.0)
    assert_close(masked.var(X_BT, MASK_BT), 8 / 3)
    assert_close(masked.var(X_BT, MASK_BT, unbiased=True), 4.0)
    assert_close(masked.maximum(X_BT, ~MASK_BT), 0.0)
    assert_close(masked.maximum(X_BT, MASK_BT), 6.0)


def test_a_denominator_per_sequence_weighs_sequences_alike():
    """Two answers of 2 and 1 tokens with mean 3 and 6; a third without tokens counts in neither."""
    x_BT, mask_BT = torch.cat([X_BT, X_BT[:1]]), mask_of([2, 1, 0], 4)
    lengths_B1 = mask_BT.sum(dim=1, keepdim=True)
    assert_close(masked.mean(x_BT, mask_BT, denominator=lengths_B1 * 2), 4.5)
    assert_close(masked.mean(x_BT, mask_BT, denominator=lengths_B1.double() * 4), 2.25)
    parts = [masked.mean(x_BT[b : b + 1], mask_BT[b : b + 1], denominator=lengths_B1[b : b + 1] * 2) for b in range(3)]
    assert_close(sum(parts), 4.5)
    grad = gradient(lambda x: masked.mean(x, mask_BT, denominator=lengths_B1 * 2), x_BT)
    assert_close(grad, torch.tensor([[0.25, 0.25, 0, 0], [0.5, 0, 0, 0], [0, 0, 0, 0]]), largest=0.0)
    assert masked.mean(x_BT, mask_BT, denominator=lengths_B1.double()).dtype == torch.float32
    for poison in POISONS:
        bad_BT = poisoned(x_BT, mask_BT, poison)
        assert_close(masked.mean(bad_BT, mask_BT, denominator=lengths_B1 * 2), 4.5, largest=0.0)
        assert_close(gradient(lambda x: masked.mean(x, mask_BT, denominator=lengths_B1 * 2), bad_BT), grad, largest=0.0)


def test_what_is_divided_by_zero_counts_as_zero():
    for denominator, right in ((0, 0.0), (torch.tensor([[0], [2]]), 3.0), (torch.zeros(2, 1), 0.0)):
        assert_close(masked.mean(X_BT, MASK_BT, denominator=denominator), right, largest=0.0)
        grad = gradient(lambda x, d=denominator: masked.mean(x, MASK_BT, denominator=d), X_BT)
        assert bool(grad.isfinite().all()) and bool((grad[0] == 0).all())


def test_a_denominator_of_another_shape_is_refused():
    for denominator in (torch.ones(2), torch.ones(1, 1), torch.ones(2, 4), torch.ones(1, 2)):
        try:
            masked.mean(X_BT, MASK_BT, denominator=denominator)
        except ValueError as error:
            assert "[2, 1]" in str(error)
        else:
            raise AssertionError(f"{tuple(denominator.shape)} was accepted")


def test_PPO_05_whitening_ignores_padding():
    right = torch.tensor([[-1.224745, 0, 0, 0], [1.224745, 0, 0, 0]])
    assert_close(masked.whiten(X_BT, MASK_BT), right)
    wider_BT = torch.nn.functional.pad(X_BT, (0, 7))
    assert_close(masked.whiten(wider_BT, torch.nn.functional.pad(MASK_BT, (0, 7)))[:, :4], right)
    assert_close(masked.mean(masked.whiten(X_BT, MASK_BT), MASK_BT), 0.0)
    assert_close(masked.var(masked.whiten(X_BT, MASK_BT), MASK_BT), 1.0)


def test_PPO_06_one_none_or_equal_values_stay_finite():
    one = mask_of([1], 3)
    x = torch.full((1, 3), 0.7)
    assert_close(masked.whiten(x, one), torch.zeros(1, 3), largest=1e-6)
    assert_close(masked.whiten(x, mask_of([0], 3)), torch.zeros(1, 3), largest=0.0)
    for value in (0.7, 1e4 + 0.1, -3e-5):
        equal = torch.full((3, 333), value)
        assert_close(masked.whiten(equal, torch.ones_like(equal, dtype=torch.bool)), torch.zeros(3, 333), largest=1e-5)
    for unbiased in (False, True):
        assert_close(masked.var(x, one, unbiased=unbiased), 0.0, largest=1e-12)
        assert_close(masked.var(x, mask_of([0], 3), unbiased=unbiased), 0.0, largest=0.0)


def test_empty_mask_gives_zero_with_zero_gradient():
    for denominator in (None, 0, 5):
        none = mask_of([0, 0], 4)
        assert_close(masked.mean(X_BT, none, denominator=denominator), 0.0, largest=0.0)
        grad = gradient(lambda x, n=none, d=denominator: masked.mean(x, n, denominator=d), X_BT)
        assert_close(grad, torch.zeros_like(X_BT), largest=0.0)


def test_large_mean_keeps_precision():
    x = torch.tensor([[1e4 + 1, 1e4 + 2, 1e4 + 3]])
    all_ = torch.ones_like(x, dtype=torch.bool)
    assert_close(masked.var(x, all_), 2 / 3, largest=1e-5)
    assert_close(masked.whiten(x, all_), torch.tensor([[-1.224745, 0, 1.224745]]), largest=1e-5)


def test_shift_mean_false_keeps_the_mean():
    white = masked.whiten(X_BT, MASK_BT, shift_mean=False)
    assert_close(masked.mean(white, MASK_BT), 4.0)
    assert_close(masked.var(white, MASK_BT), 1.0, largest=1e-5)
    assert_close(white[~MASK_BT], torch.zeros(5), largest=0.0)
    assert_close(
        masked.whiten(X_BT, MASK_BT, shift_mean=False, mean=torch.tensor(1.0), var=torch.tensor(4.0))[0, 0], 1.5
    )


def test_eps_is_added_to_the_variance():
    assert_close(masked.whiten(X_BT, MASK_BT, eps=4 - 8 / 3)[1, 0], 1.0)


def test_poison_at_masked_places_changes_nothing():
    torch.manual_seed(0)
    x_BT, mask_BT = torch.randn(3, 5), mask_of([5, 2, 0], 5)
    for poison in POISONS:
        bad_BT = poisoned(x_BT, mask_BT, poison)
        for function in (masked.mean, masked.var, masked.whiten, masked.counted, masked.maximum):
            assert_close(function(bad_BT, mask_BT), function(x_BT, mask_BT), largest=0.0)
        given = masked.whiten(bad_BT, mask_BT, mean=torch.tensor(0.1), var=torch.tensor(2.0))
        assert_close(given, masked.whiten(x_BT, mask_BT, mean=torch.tensor(0.1), var=torch.tensor(2.0)), largest=0.0)
        grad = gradient(lambda x: masked.whiten(x, mask_BT)[0, 0], bad_BT)
        assert_close(grad, gradient(lambda x: masked.whiten(x, mask_BT)[0, 0], x_BT), largest=0.0)
        assert_close(grad[~mask_BT], torch.zeros(8), largest=0.0)
        grad = gradient(lambda x: masked.whiten(x, mask_BT, mean=torch.tensor(0.1))[0, 0], bad_BT)
        assert bool(grad.isfinite().all())


def test_RES_10_whitening_over_all_ranks():
    shards = [torch.tensor([[1.0, 3.0]]), torch.tensor([[10.0, 20.0, 30.0]]), torch.tensor([[7.0, 7.0]])]
    masks = [mask_of([2], 2), mask_of([3], 3), mask_of([0], 2)]  # the third rank has nothing that counts
    num_all = sum(int(m.sum()) for m in masks)
    mean = sum(masked.mean(x, m, denominator=num_all) for x, m in zip(shards, masks))
    var = sum(masked.mean((x - mean) ** 2, m, denominator=num_all) for x, m in zip(shards, masks))
    white = [masked.whiten(x, m, mean=mean, var=var) for x, m in zip(shards, masks)]
    right = torch.tensor([-1.085542, -0.901552, -0.257586, 0.662365, 1.582316])
    assert_close(torch.cat([white[0][0], white[1][0]]), right)
    assert_close(white[2], torch.zeros(1, 2), largest=0.0)
    together = masked.whiten(torch.cat(shards[:2], dim=1), torch.ones(1, 5, dtype=torch.bool))
    assert_close(together[0], right)


def test_low_precision_is_summed_in_float32():
    x_BT = torch.full((1, 1000), 0.1, dtype=torch.bfloat16)
    mean = masked.mean(x_BT, torch.ones(1, 1000, dtype=torch.bool))
    assert mean.dtype == torch.float32
    assert_close(mean, x_BT[0, 0].double(), largest=1e-7)


def test_a_mask_of_another_shape_is_refused():
    for mask_BT in (MASK_BT[:, :1], MASK_BT[:1]):
        try:
            masked.mean(X_BT, mask_BT)
        except ValueError as error:
            assert "(2, 4)" in str(error)
        else:
            raise AssertionError("a broadcast mask was accepted")
    assert math.isclose(float(masked.mean(X_BT.double(), MASK_BT)), 4.0)
