"""shaping: a score and a KL penalty become one reward per token."""

import torch
from closeness import POISONS, assert_close, mask_of, poisoned

from heedful.objectives import shaping


def test_PPO_01_token_rewards():
    logp, ref = torch.tensor([[-1.0, -2.0, -0.5, 0, 0]]), torch.tensor([[-1.2, -1.5, -0.5, 0, 0]])
    rewards = shaping.token_rewards(torch.tensor([1.0]), logp - ref, mask_of([3], 5), kl_coefficient=0.1)
    assert_close(rewards, torch.tensor([[-0.02, 0.05, 1.0, 0, 0]]))
    assert not rewards.requires_grad


def test_PPO_07_score_on_the_last_counted_token():
    mask = torch.tensor([[True, True, False, False], [True, False, False, True], [False, False, False, False]])
    kl = torch.full((3, 4), 2.0)
    rewards = shaping.token_rewards(torch.tensor([1.0, 1.0, 5.0]), kl, mask, kl_coefficient=0.25)
    assert_close(rewards, torch.tensor([[-0.5, 0.5, 0, 0], [-0.5, 0, 0, 0.5], [0, 0, 0, 0]]))


def test_ROL_05_reward_of_an_empty_answer_lands_on_its_end_token():
    rewards = shaping.token_rewards(torch.tensor([-3.0]), torch.zeros(1, 3), mask_of([1], 3), kl_coefficient=0.1)
    assert_close(rewards, torch.tensor([[-3.0, 0, 0]]))


def test_the_sum_is_score_minus_beta_times_kl():
    torch.manual_seed(0)
    mask = torch.rand(6, 9) < 0.7
    mask[:, 0] = True
    scores, kl = torch.randn(6), torch.randn(6, 9)
    rewards = shaping.token_rewards(scores, kl, mask, kl_coefficient=0.3)
    assert_close(rewards.sum(1), scores - 0.3 * (kl * mask).sum(1), largest=3e-6)


def test_clip_then_penalty_of_unfinished_answers():
    finished = torch.tensor([True, False, True, False])
    rewards = shaping.token_rewards(
        torch.tensor([7.0, 7.0, -7.0, 1.0]),
        torch.zeros(4, 2),
        mask_of([2, 2, 1, 1], 2),
        kl_coefficient=0.1,
        score_clip=5.0,
        missing_end_penalty=2.0,
        finished_B=finished,
    )
    assert_close(rewards, torch.tensor([[0, 5.0], [0, 3.0], [-5.0, 0], [-1.0, 0]]))


def test_coefficient_per_sequence():
    coefficient = torch.tensor([[0.1], [0.5]])
    rewards = shaping.token_rewards(torch.zeros(2), torch.ones(2, 2), mask_of([2, 1], 2), kl_coefficient=coefficient)
    assert_close(rewards, torch.tensor([[-0.1, -0.1], [-0.5, 0]]))


def test_poison_at_masked_places_changes_nothing():
    torch.manual_seed(3)
    mask, scores, kl = mask_of([4, 2, 0], 4), torch.randn(3), torch.randn(3, 4)
    right = shaping.token_rewards(scores, kl, mask, kl_coefficient=0.1)
    for poison in POISONS:
        bad_scores = scores.clone()
        bad_scores[2] = poison  # no counted token: this score has no place
        actual = shaping.token_rewards(bad_scores, poisoned(kl, mask, poison), mask, kl_coefficient=0.1)
        assert_close(actual, right, largest=0.0)


def test_low_precision_is_multiplied_in_float32():
    kl = torch.full((1, 2), 0.1, dtype=torch.bfloat16)
    coefficient = torch.tensor([[0.3]], dtype=torch.bfloat16)
    rewards = shaping.token_rewards(torch.tensor([20.0]).bfloat16(), kl, mask_of([2], 2), kl_coefficient=coefficient)
    assert rewards.dtype == torch.float32
    product = float(kl[0, 0]) * float(coefficient[0, 0])
    assert_close(rewards, torch.tensor([[-product, 20 - product]]), largest=1e-6)


def test_penalty_without_finished_is_refused():
    try:
        shaping.token_rewards(
            torch.zeros(1), torch.zeros(1, 1), mask_of([1], 1), kl_coefficient=0.1, missing_end_penalty=1.0
        )
    except ValueError as error:
        assert "finished_B" in str(error)
    else:
        raise AssertionError("accepted")
