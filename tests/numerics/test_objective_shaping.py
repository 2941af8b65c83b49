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


def worth(scores, finished=True, lengths=1, **options):
    """answer_scores of a few answers."""
    scores = torch.tensor(scores)
    finished, lengths = torch.tensor(finished).expand(len(scores)), torch.tensor(lengths).expand(len(scores))
    return shaping.answer_scores(scores, finished_B=finished, lengths_B=lengths, **options)


def test_without_options_an_answer_is_worth_its_score():
    assert_close(worth([70.0, -3.0], finished=[True, False], lengths=[9, 900]), torch.tensor([70.0, -3.0]))


def test_clip_then_penalty_of_unfinished_answers():
    scores = worth([7.0, 7.0, -7.0, 1.0], finished=[True, False, True, False], score_clip=5.0, missing_end_penalty=2.0)
    assert_close(scores, torch.tensor([5.0, 3.0, -5.0, -1.0]))


def test_a_fixed_score_for_unfinished_answers_takes_the_place_of_the_penalty():
    scores = worth(
        [7.0, 7.0, float("nan")], finished=[True, False, False],
        score_clip=5.0, missing_end_penalty=2.0, missing_end_score=-1.0,
    )  # fmt: skip
    assert_close(scores, torch.tensor([5.0, -1.0, -1.0]))
    assert_close(worth([7.0], finished=[False], missing_end_penalty=2.0, missing_end_score=0.0), [0.0])
    assert_close(worth([1.0], finished=[False], score_clip=5.0, missing_end_score=-9.0), [-9.0])


def test_overlong_answers_pay_linearly_up_to_the_full_length():
    bounds = {"overlong_from_tokens": 10, "overlong_full_tokens": 14}
    lengths = [1, 10, 11, 13, 14, 99]
    paid = torch.tensor([0.0, 0.0, 0.25, 0.75, 1.0, 1.0])
    ones = [1.0] * 6
    assert_close(worth(ones, lengths=lengths, overlong_penalty=2.0, **bounds), 1 - 2 * paid)
    assert_close(worth(ones, lengths=lengths, overlong_penalty=-2.0, **bounds), 1 + 2 * paid)  # a bonus for length
    assert_close(worth(ones, lengths=lengths, **bounds), torch.ones(6))
    assert_close(worth(ones, lengths=lengths, overlong_penalty=2.0, overlong_full_tokens=14), torch.ones(6))
    cut = worth([1.0], finished=[False], lengths=[14], missing_end_score=-1.0, overlong_penalty=2.0, **bounds)
    assert_close(cut, [-3.0])  # after the end, and not limited by the clip
    clipped = worth([-9.0], lengths=[14], score_clip=5.0, overlong_penalty=2.0, **bounds)
    assert_close(clipped, [-7.0])


def test_overlong_bounds_that_leave_no_room_are_refused():
    for full in (None, 9, 10):
        try:
            worth([1.0], overlong_from_tokens=10, overlong_full_tokens=full, overlong_penalty=1.0)
        except ValueError as error:
            assert "overlong_full_tokens" in str(error)
        else:
            raise AssertionError(f"{full} was accepted")
    worth([1.0], overlong_from_tokens=10, overlong_full_tokens=11)


def test_answer_scores_are_float32_without_gradient():
    scores = torch.tensor([1.0], dtype=torch.bfloat16, requires_grad=True)
    options = {"finished_B": torch.tensor([False]), "lengths_B": torch.tensor([3])}
    out = shaping.answer_scores(scores, missing_end_penalty=0.001, **options)
    assert out.dtype == torch.float32 and not out.requires_grad
    assert_close(out, [0.999], largest=1e-7)


def test_kl_of_later_tokens_is_that_of_the_next_counted_one():
    kl = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 9.0, 9.0, 9.0], [1.0, 2.0, 3.0, 4.0]])
    mask = torch.tensor([
        [True, True, True, False], [True, False, True, True], [False, False, False, False], [False, True, False, False],
    ])  # fmt: skip
    right = torch.tensor([[2.0, 3.0, 0.0, 0.0], [7.0, 0.0, 8.0, 0.0], [0.0] * 4, [0.0] * 4])
    assert_close(shaping.of_later_tokens(kl, mask), right, largest=0.0)
    for poison in POISONS:
        assert_close(shaping.of_later_tokens(poisoned(kl, mask, poison), mask), right, largest=0.0)
    assert_close(shaping.of_later_tokens(kl[:, :1], mask[:, :1]), torch.zeros(4, 1), largest=0.0)
    assert not shaping.token_rewards(kl[:, 0].clone().requires_grad_(), kl, mask, kl_coefficient=0.1).requires_grad
    low = shaping.of_later_tokens(kl.bfloat16().requires_grad_(), mask)
    assert low.dtype == torch.float32 and not low.requires_grad


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
