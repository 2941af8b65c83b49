"""policy: the clipped PPO loss."""

import math

import torch
from closeness import POISONS, assert_close, assert_gradient, gradient, mask_of, poisoned

from heedful.objectives import policy

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def slow_ppo(logprobs, old, advantages, mask, denominator, low, high, dual=None):
    """The definition, token by token."""
    loss, active = 0.0, 0
    for b, t in mask.nonzero().tolist():
        ratio, a = math.exp(float(logprobs[b, t] - old[b, t])), float(advantages[b, t])
        objective = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
        active += objective < ratio * a
        if dual is not None and a < 0:
            objective = max(objective, dual * a)
        loss -= objective
    return loss / denominator, active / denominator


def one(ratio, advantage, **options):
    return policy.ppo_clip(
        torch.tensor([[ratio]]).log(),
        torch.zeros(1, 1),
        torch.tensor([[advantage]]),
        mask_of([1], 1),
        denominator=1,
        **{**CLIP, **options},
    )


def test_PPO_13_policy_loss_and_active_clips():
    ratios, advantages = (1.5, 0.5, 1.5, 0.5), (1.0, -1.0, -1.0, 1.0)
    for ratio, a, right in zip(ratios, advantages, (-1.2, 0.8, 1.5, -0.5)):
        assert_close(one(ratio, a).loss, right)
    out = policy.ppo_clip(
        torch.tensor([ratios]).log(),
        torch.zeros(1, 4),
        torch.tensor([advantages]),
        mask_of([4], 4),
        denominator=4,
        **CLIP,
    )
    assert_close(out.loss, 0.15)
    assert_close(out.metrics["clip_fraction"], 0.5)
    assert_close(out.metrics["ratio_mean"], 1.0)
    assert_close(out.metrics["ratio_max"], 1.5)
    assert_close(out.metrics["ratio_deviation_max"], 0.5)
    k3 = (0.5 - math.log(1.5) + -0.5 - math.log(0.5)) / 2
    assert_close(out.metrics["approx_kl_nats"], k3)
    assert_close(out.metrics["dual_clip_fraction"], 0.0)


def test_ratio_metrics_see_both_sides():
    out = one(0.2, 1.0)
    assert_close(out.metrics["ratio_max"], 0.2)
    assert_close(out.metrics["ratio_deviation_max"], 0.8)


def test_low_precision_is_subtracted_in_float32():
    bf16 = torch.tensor([[-20.0, -0.0703125]], dtype=torch.bfloat16)
    out = policy.ppo_clip(bf16[:, :1], bf16[:, 1:], torch.ones(1, 1).bfloat16(), mask_of([1], 1), denominator=1, **CLIP)
    assert out.loss.dtype == torch.float32
    assert_close(out.metrics["ratio_mean"] / math.exp(-20 + 0.0703125), 1.0, largest=1e-5)


def test_asymmetric_clip():
    assert_close(one(1.5, 1.0, clip_high=0.3).loss, -1.3)
    assert_close(one(1.5, 1.0, clip_high=0.3, clip_low=0.1).loss, -1.3)
    assert_close(one(0.5, -1.0, clip_low=0.1, clip_high=0.3).loss, 0.9)


def test_dual_clip_bounds_a_bad_advantage():
    assert_close(one(9.0, -2.0).loss, 18.0)
    assert_close(one(9.0, -2.0, dual_clip=3.0).loss, 6.0)
    assert_close(one(9.0, -2.0, dual_clip=3.0).metrics["dual_clip_fraction"], 1.0)
    assert_close(one(2.0, -2.0, dual_clip=3.0).loss, 4.0)
    assert_close(one(9.0, 2.0, dual_clip=3.0).loss, -2.4)


def test_equals_the_slow_loop():
    torch.manual_seed(0)
    mask = torch.rand(4, 9) < 0.6
    logprobs, old, advantages = torch.randn(4, 9) * 0.4 - 1, torch.randn(4, 9) * 0.4 - 1, torch.randn(4, 9)
    for dual in (None, 1.1):
        out = policy.ppo_clip(
            logprobs, old, advantages, mask, denominator=17.0, clip_low=0.1, clip_high=0.3, dual_clip=dual
        )
        loss, active = slow_ppo(logprobs, old, advantages, mask, 17.0, 0.1, 0.3, dual)
        assert_close(out.loss, loss)
        assert_close(out.metrics["clip_fraction"], active)
        assert 0 < active < 1


def test_PPO_15_sequence_advantage_ignores_masked_values():
    mask = mask_of([2], 4)
    for filler in (0.0, 10.0, *POISONS):
        advantages = poisoned(torch.ones(1, 4), mask, filler)

        def loss(logprobs, advantages=advantages):
            return policy.ppo_clip(logprobs, torch.zeros(1, 4), advantages, mask, denominator=2, **CLIP).loss

        assert_close(loss(torch.zeros(1, 4)), -1.0)
        assert_close(gradient(loss, torch.zeros(1, 4)), torch.tensor([[-0.5, -0.5, 0, 0]]))


def test_PPO_10_and_SFT_07_micro_batches_add_up():
    torch.manual_seed(4)
    lengths, width = [3, 1, 2, 4], 4
    mask = mask_of(lengths, width)
    logprobs, old, advantages = torch.randn(4, width) * 0.3, torch.randn(4, width) * 0.3, torch.randn(4, width)

    def run(rows, x):
        return policy.ppo_clip(x[rows], old[rows], advantages[rows], mask[rows], denominator=10, **CLIP)

    whole = run([0, 1, 2, 3], logprobs)
    parts = [run([b], logprobs) for b in range(4)]
    assert_close(sum(p.loss for p in parts), whole.loss)
    for name in ("clip_fraction", "ratio_mean", "approx_kl_nats"):
        assert_close(sum(p.metrics[name] for p in parts), whole.metrics[name])
    assert_close(max(p.metrics["ratio_max"] for p in parts), whole.metrics["ratio_max"])
    summed = gradient(lambda x: sum(run([b], x).loss for b in range(4)), logprobs)
    assert_close(summed, gradient(lambda x: run([0, 1, 2, 3], x).loss, logprobs))


def test_PPO_10_values():
    """Loss sums 6, 3, 3, 1 over 3, 1, 2, 4 tokens give 1.3."""
    sums, tokens = [6.0, 3.0, 3.0, 1.0], [3, 1, 2, 4]
    advantages = torch.tensor([[-s / n] * 4 for s, n in zip(sums, tokens)])
    losses = [
        policy.ppo_clip(
            torch.zeros(1, 4), torch.zeros(1, 4), advantages[b : b + 1], mask_of([n], 4), denominator=10, **CLIP
        ).loss
        for b, n in enumerate(tokens)
    ]
    assert_close(sum(losses), 1.3)


def test_PPO_08_ratio_one_on_the_first_minibatch():
    torch.manual_seed(5)
    logprobs, mask = -torch.rand(3, 5), mask_of([5, 2, 3], 5)
    out = policy.ppo_clip(logprobs, logprobs.clone(), torch.randn(3, 5), mask, denominator=10, **CLIP)
    assert_close(out.metrics["ratio_mean"], 1.0)
    for name in ("clip_fraction", "approx_kl_nats", "ratio_deviation_max"):
        assert_close(out.metrics[name], 0.0, largest=0.0)


def test_gradient_by_finite_differences():
    torch.manual_seed(6)
    mask = mask_of([4, 2], 4)
    logprobs, old = torch.randn(2, 4).double() * 0.4, torch.randn(2, 4).double() * 0.4
    advantages = torch.randn(2, 4).double()

    def loss(x):
        return policy.ppo_clip(x, old, advantages, mask, denominator=6, dual_clip=1.5, **CLIP).loss

    assert_gradient(loss, logprobs)
    assert bool((gradient(loss, logprobs) != 0).any())


def test_no_gradient_into_old_logprobs_and_advantages():
    streams = [torch.zeros(1, 2, requires_grad=True) for _ in range(3)]
    policy.ppo_clip(*streams, mask_of([2], 2), denominator=2, **CLIP).loss.backward()
    assert streams[0].grad is not None and streams[1].grad is None and streams[2].grad is None


def test_poison_empty_and_extreme_inputs_stay_finite():
    torch.manual_seed(7)
    mask = mask_of([3, 0, 1], 3)
    streams = [torch.randn(3, 3) for _ in range(3)]
    right = policy.ppo_clip(*streams, mask, denominator=4, **CLIP)
    for poison in POISONS:
        bad = [poisoned(x, mask, poison) for x in streams]
        out = policy.ppo_clip(bad[0].requires_grad_(), *bad[1:], mask, denominator=4, **CLIP)
        assert_close(out.loss, right.loss, largest=0.0)
        for name, value in out.metrics.items():
            assert_close(value, right.metrics[name], largest=0.0)
            assert not value.requires_grad and value.dtype == torch.float32
        grad = gradient(lambda x, b=bad: policy.ppo_clip(x, *b[1:], mask, denominator=4, **CLIP).loss, bad[0])
        assert bool(grad.isfinite().all()) and bool((grad[~mask] == 0).all())
    none = policy.ppo_clip(*streams, mask_of([0, 0, 0], 3), denominator=0, **CLIP)
    assert_close(none.loss, 0.0, largest=0.0)

    def exploded(x):
        return policy.ppo_clip(x, torch.full((1, 1), -200.0), -torch.ones(1, 1), mask_of([1], 1), denominator=1, **CLIP)

    assert bool(exploded(torch.zeros(1, 1)).loss.isfinite())
    assert bool(gradient(lambda x: exploded(x).loss, torch.zeros(1, 1)).isfinite().all())


def test_a_denominator_per_sequence_weighs_sequences_alike():
    """Answers of 1 and 3 tokens with losses 3 and 1, 2, 6: by tokens (3 + 9) / 4, by sequences (3 + 9 / 3) / 2."""
    advantages, mask = -torch.tensor([[3.0, 0, 0], [1.0, 2.0, 6.0]]), mask_of([1, 3], 3)
    old = torch.zeros(2, 3)
    half = torch.tensor([[0.5, 1, 1], [1, 1, 1]]).log()  # one clipped token, in the short answer
    for denominator, loss, clipped in ((4, 3.0, 0.25), (torch.tensor([[2], [6]]), 3.0, 0.5)):
        assert_close(policy.ppo_clip(old, old, advantages, mask, denominator=denominator, **CLIP).loss, loss)
        out = policy.ppo_clip(half, old, advantages, mask, denominator=denominator, **CLIP)
        assert_close(out.metrics["clip_fraction"], clipped)
    out = policy.ppo_clip(old, old, advantages * torch.tensor([[2.0], [1.0]]), mask, denominator=4, **CLIP)
    assert_close(out.loss, 3.75)
    by_sequence = torch.tensor([[2], [6]])
    out = policy.ppo_clip(old, old, advantages * torch.tensor([[2.0], [1.0]]), mask, denominator=by_sequence, **CLIP)
    assert_close(out.loss, 4.5)


def test_entropy_bonus():
    entropy, mask = torch.tensor([[2.0, 4.0, 9.0], [6.0, 9.0, 9.0]]), mask_of([2, 1], 3)

    def bonus(x, denominator=3):
        return policy.entropy_bonus(x, mask, coefficient=0.5, denominator=denominator)

    out = bonus(entropy.clone().requires_grad_())
    assert_close(out.loss, -2.0)
    assert_close(out.metrics["entropy_bonus_nats"], 4.0)
    assert not out.metrics["entropy_bonus_nats"].requires_grad
    right = torch.tensor([[-1 / 6, -1 / 6, 0], [-1 / 6, 0, 0]])
    assert_close(gradient(lambda x: bonus(x).loss, entropy), right)
    by_sequence = bonus(entropy, torch.tensor([[4], [2]]))
    assert_close(by_sequence.loss, -2.25)
    assert_close(by_sequence.metrics["entropy_bonus_nats"], 4.5)
    for poison in POISONS:
        bad = poisoned(entropy, mask, poison)
        assert_close(bonus(bad).loss, -2.0)
        assert_close(gradient(lambda x: bonus(x).loss, bad), right)
