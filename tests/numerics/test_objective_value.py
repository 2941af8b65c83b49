"""value: the clipped value loss and explained variance."""

import torch
from closeness import POISONS, assert_close, assert_gradient, gradient, mask_of, poisoned

from heedful.objectives import value


def test_PPO_13_value_loss():
    new, old, ret = torch.tensor([[1.2, 0.6]]), torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 1.0]])
    first = value.clipped_mse(new, old, ret, torch.tensor([[True, False]]), denominator=1, clip=0.2)
    second = value.clipped_mse(new, old, ret, torch.tensor([[False, True]]), denominator=1, clip=0.2)
    both = value.clipped_mse(new, old, ret, mask_of([2], 2), denominator=2, clip=0.2)
    assert_close(first.loss, 0.045)
    assert_close(second.loss, 0.08)
    assert_close(both.loss, 0.0625)
    assert_close(both.metrics["value_clip_fraction"], 0.5)
    assert_close(both.metrics["value_mean"], 0.9)
    away = value.clipped_mse(-new, old, ret, mask_of([2], 2), denominator=2, clip=0.2)  # clipped error is the smaller
    assert_close(away.loss, (2.2**2 + 1.6**2) / 4)
    assert_close(away.metrics["value_clip_fraction"], 0.0)
    below = value.clipped_mse(-new, -old, -ret, mask_of([2], 2), denominator=2, clip=0.2)
    assert_close(below.loss, 0.0625)


def test_without_clip_it_is_half_the_squared_error():
    new, old, ret = torch.tensor([[1.2, 0.6]]), torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 1.0]])
    out = value.clipped_mse(new, old, ret, mask_of([2], 2), denominator=2, clip=None)
    assert_close(out.loss, (0.04 + 0.16) / 4)
    assert_close(out.metrics["value_clip_fraction"], 0.0, largest=0.0)


def test_PPO_14_exactly_the_answer_predictions_matter():
    """Prompt 3, answer 4, pad 2: targets 2 to 5 of the 8 are the answer (the shift is done in collate)."""
    mask = torch.zeros(1, 8, dtype=torch.bool)
    mask[0, 2:6] = True
    values = torch.zeros(1, 8)

    def loss(x):
        return value.clipped_mse(x, values, torch.ones(1, 8), mask, denominator=int(mask.sum()), clip=None).loss

    grad = gradient(loss, values)
    assert torch.equal(grad != 0, mask)
    assert_close(grad[mask], torch.full((4,), -0.25))


def test_micro_batches_add_up():
    torch.manual_seed(0)
    mask, streams = mask_of([3, 1, 2], 3), [torch.randn(3, 3) for _ in range(3)]
    whole = value.clipped_mse(*streams, mask, denominator=6, clip=0.2)
    parts = [value.clipped_mse(*(x[[b]] for x in streams), mask[[b]], denominator=6, clip=0.2) for b in range(3)]
    assert_close(sum(p.loss for p in parts), whole.loss)
    for name, total in whole.metrics.items():
        assert_close(sum(p.metrics[name] for p in parts), total)


def test_gradient_by_finite_differences():
    torch.manual_seed(1)
    mask = mask_of([4, 3], 4)
    values, old, ret = (torch.randn(2, 4).double() for _ in range(3))
    for clip in (None, 0.5):
        assert_gradient(lambda x, c=clip: value.clipped_mse(x, old, ret, mask, denominator=7, clip=c).loss, values)


def test_poison_and_empty_mask():
    torch.manual_seed(2)
    mask, streams = mask_of([3, 0, 1], 3), [torch.randn(3, 3) for _ in range(3)]
    right = value.clipped_mse(*streams, mask, denominator=4, clip=0.2)
    right_explained = value.explained_variance(streams[0], streams[2], mask)
    for poison in POISONS:
        bad = [poisoned(x, mask, poison) for x in streams]
        out = value.clipped_mse(bad[0].requires_grad_(), *bad[1:], mask, denominator=4, clip=0.2)
        assert_close(out.loss, right.loss, largest=0.0)
        for name, number in out.metrics.items():
            assert_close(number, right.metrics[name], largest=0.0)
            assert not number.requires_grad
        grad = gradient(lambda x, b=bad: value.clipped_mse(x, *b[1:], mask, denominator=4, clip=0.2).loss, bad[0])
        assert bool(grad.isfinite().all()) and bool((grad[~mask] == 0).all())
        assert_close(value.explained_variance(bad[0], bad[2], mask), right_explained, largest=0.0)
    assert_close(value.clipped_mse(*streams, mask_of([0] * 3, 3), denominator=0, clip=0.2).loss, 0.0, largest=0.0)


def test_explained_variance():
    ret, mask = torch.tensor([[1.0, 2.0, 3.0, 99.0]]), mask_of([3], 4)
    assert_close(value.explained_variance(ret, ret, mask), 1.0)
    assert_close(value.explained_variance(ret + 5, ret, mask), 1.0)  # a constant offset is not spread
    assert_close(value.explained_variance(torch.zeros(1, 4), ret, mask), 0.0)
    assert_close(value.explained_variance(-ret, ret, mask), -3.0)
    assert_close(value.explained_variance(ret / 2, ret, mask), 0.75)
    equal = torch.full((1, 4), 0.7)
    assert_close(value.explained_variance(ret, equal, mask), 0.0, largest=0.0)
    assert_close(value.explained_variance(ret, ret, mask_of([1], 4)), 0.0, largest=0.0)
