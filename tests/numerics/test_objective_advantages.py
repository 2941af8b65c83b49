"""advantages: GAE against hand-worked values and a slow loop."""

import torch
from closeness import POISONS, assert_close, mask_of, poisoned

from heedful.objectives import advantages


def slow_gae(rewards, values, mask, gamma, lam, bootstrap):
    """One sequence at a time on the list of its counted tokens, from the definition A_t = Σ_k (γλ)^k δ_{t+k}."""
    out_advantages, out_returns = torch.zeros_like(values), torch.zeros_like(values)
    for b in range(len(mask)):
        places = [t for t in range(mask.shape[1]) if mask[b, t]]
        chain = [float(values[b, t]) for t in places] + [float(bootstrap[b])]
        deltas = [float(rewards[b, t]) + gamma * chain[i + 1] - chain[i] for i, t in enumerate(places)]
        for i, t in enumerate(places):
            total = sum((gamma * lam) ** (k - i) * deltas[k] for k in range(i, len(deltas)))
            out_advantages[b, t], out_returns[b, t] = total, total + chain[i]
    return out_advantages, out_returns


def test_PPO_01_score_on_the_last_token():
    rewards = torch.tensor([[-0.02, 0.05, 1.0, 0.0, 0.0]])
    values = torch.tensor([[0.5, 0.4, 0.3, 9.0, 9.0]])
    adv, ret = advantages.gae(rewards, values, mask_of([3], 5), gamma=1.0, lam=0.95)
    assert_close(adv, torch.tensor([[0.46425, 0.615, 0.7, 0, 0]]))
    assert_close(ret, torch.tensor([[0.96425, 1.015, 1.0, 0, 0]]))


def test_PPO_03_terminal_and_bootstrapped():
    rewards, values = torch.zeros(2, 3), torch.tensor([[0.5, 0.6, 0.0], [0.5, 0.6, 0.0]])
    mask = mask_of([2, 2], 3)
    terminal, _ = advantages.gae(rewards, values, mask, gamma=1.0, lam=0.95)
    assert_close(terminal[:, :2], torch.tensor([[-0.47, -0.6], [-0.47, -0.6]]))
    mixed, _ = advantages.gae(rewards, values, mask, gamma=1.0, lam=0.95, bootstrap_B=torch.tensor([0.0, 0.7]))
    assert_close(mixed[:, :2], torch.tensor([[-0.47, -0.6], [0.195, 0.1]]))


def test_PPO_04_nothing_after_the_end():
    mask = mask_of([1, 3, 5], 5)
    adv, ret = advantages.gae(torch.full((3, 5), 2.0), torch.full((3, 5), 0.3), mask, gamma=0.9, lam=0.9)
    for out in (adv, ret):
        assert (out != 0).sum(dim=1).tolist() == [1, 3, 5]
        assert torch.equal(out != 0, mask)


def test_PPO_07_masked_tokens_carry_nothing_and_cost_no_decay():
    mask = torch.tensor([[True, True, False, False], [True, False, False, True]])
    rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    adv, _ = advantages.gae(rewards, torch.zeros(2, 4), mask, gamma=1.0, lam=0.5)
    assert_close(adv, torch.tensor([[0.5, 1.0, 0, 0], [0.5, 0, 0, 1.0]]))


def test_equals_the_slow_loop():
    torch.manual_seed(1)
    rewards, values = torch.randn(7, 12), torch.randn(7, 12)
    mask = torch.rand(7, 12) < 0.6
    mask[3] = False
    bootstrap = torch.randn(7)
    for gamma, lam in ((1.0, 0.95), (0.97, 0.8), (0.9, 0.0), (0.99, 1.0)):
        fast = advantages.gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap_B=bootstrap)
        for actual, expected in zip(fast, slow_gae(rewards, values, mask, gamma, lam, bootstrap)):
            assert_close(actual, expected, largest=5e-6, mean=5e-7)


def test_lambda_one_returns_are_discounted_sums():
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    _, ret = advantages.gae(rewards, torch.randn(1, 3), mask_of([3], 3), gamma=0.5, lam=1.0)
    assert_close(ret, torch.tensor([[3.0, 4.0, 4.0]]))


def test_poison_and_gradient():
    torch.manual_seed(2)
    rewards, values = torch.randn(4, 6), torch.randn(4, 6)
    mask = torch.rand(4, 6) < 0.5
    right = advantages.gae(rewards, values, mask, gamma=0.9, lam=0.9)
    for poison in POISONS:
        bad = [poisoned(x, mask, poison).requires_grad_() for x in (rewards, values)]
        for actual, expected in zip(advantages.gae(*bad, mask, gamma=0.9, lam=0.9), right):
            assert not actual.requires_grad and actual.dtype == torch.float32
            assert_close(actual, expected, largest=0.0)


def test_low_precision_values_are_summed_in_float32():
    mask = mask_of([64], 64)
    rewards = torch.full((1, 64), 0.01)
    adv, ret = advantages.gae(rewards, torch.zeros(1, 64, dtype=torch.bfloat16), mask, gamma=1.0, lam=1.0)
    assert adv.dtype == ret.dtype == torch.float32
    assert_close(ret[0, 0], 0.64, largest=1e-6)


def test_returns_have_their_own_lambda():
    torch.manual_seed(3)
    mask = torch.rand(5, 8) < 0.7
    rewards, values, bootstrap = torch.randn(5, 8), torch.randn(5, 8), torch.randn(5)
    adv, ret = advantages.gae(rewards, values, mask, gamma=0.9, lam=0.3, value_lam=1.0, bootstrap_B=bootstrap)
    assert_close(adv, slow_gae(rewards, values, mask, 0.9, 0.3, bootstrap)[0], largest=5e-6)
    assert_close(ret, slow_gae(rewards, values, mask, 0.9, 1.0, bootstrap)[1], largest=5e-6)
    one_step = advantages.gae(rewards, values, mask, gamma=0.9, lam=0.3, value_lam=0.0, bootstrap_B=bootstrap)[1]
    assert_close(one_step, slow_gae(rewards, values, mask, 0.9, 0.0, bootstrap)[1], largest=5e-6)
    same = advantages.gae(rewards, values, mask, gamma=0.9, lam=0.3, value_lam=0.3)
    for actual, expected in zip(same, advantages.gae(rewards, values, mask, gamma=0.9, lam=0.3)):
        assert_close(actual, expected, largest=0.0)
