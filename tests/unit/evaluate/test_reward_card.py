"""The reward card (accuracy in parts, calibration, margins, controls, length) against worlds whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from heedful.errors import DataError
from heedful.evaluate.accuracy import flat_scores, pair_accuracy, pairs_of
from heedful.evaluate.calibration import calibration
from heedful.evaluate.intervals import NUM_RESAMPLES, bootstrap_interval, resampled_sums, wilson
from heedful.evaluate.reward_card import ScoredRanking, build_card
from heedful.records import RewardCard


def world(num, seed, *, sharpness=1.0, length=0.0, best_length=None):
    """Rankings drawn from Plackett-Luce over a true quality; the scores are that quality times ``sharpness``.

    ``length`` is what a unit of log length adds to the quality; ``best_length`` makes it fall off around a length.
    """
    rng, rankings = np.random.default_rng(seed), []
    for _ in range(num):
        k = int(rng.integers(2, 6))
        log_length = rng.normal(5, 0.7, size=k)
        quality = rng.normal(size=k)
        if best_length is not None:
            quality = -4 * (log_length - math.log(best_length)) ** 2
        quality = quality + length * (log_length - 5)
        order = (-(quality + rng.gumbel(size=k))).argsort().argsort() + 1
        chars = np.exp(log_length).astype(int).tolist()
        rankings.append(ScoredRanking((sharpness * quality).tolist(), order.tolist(), chars))
    return rankings


def calibration_of(rankings, seed=0):
    ranks = [r.ranks for r in rankings]
    return calibration(flat_scores([r.scores for r in rankings], ranks), pairs_of(ranks), seed=seed)


def accuracy_on(rankings):
    return pair_accuracy([r.scores for r in rankings], [r.ranks for r in rankings])


def test_accuracy_over_prompts_and_over_pairs_by_hand():
    rankings = [
        ScoredRanking([3.0, 2.0, 1.0], [1, 2, 2], [9, 5, 1], category="chat", source="a"),  # 2 right, 1 tied
        ScoredRanking([1.0, 2.0], [1, 2], [4, 8], category="qa", source="a"),  # wrong, and the shorter one is better
        ScoredRanking([5.0, 5.0], [2, 1], [3, 3], category="qa"),  # equal scores
    ]
    card = build_card(rankings)
    assert card.accuracy == pytest.approx(1.5 / 3) and card.over_pairs == pytest.approx(2.5 / 4)
    assert (card.num_prompts, card.num_pairs, card.num_tied_pairs, card.num_equal_scores) == (3, 4, 1, 1)
    assert card.accuracy_by_category == {"chat": 1.0, "qa": 0.25}
    assert {name: (a.value, a.num_pairs) for name, a in card.by_category.items()} == {"chat": (1.0, 2), "qa": (0.25, 2)}
    assert {name: (a.value, a.over_pairs) for name, a in card.by_source.items()} == {"a": (0.5, pytest.approx(2 / 3))}
    assert (card.longer_wins.value, card.longer_wins.num_pairs) == (1.0, 2)
    assert (card.shorter_wins.value, card.shorter_wins.num_pairs) == (0.0, 1)
    assert card.length_accuracy == pytest.approx((1 + 0 + 0.5) / 3)
    assert card.prefers_longer == pytest.approx((1 + 1 + 0.5) / 3)  # both clear prompts: the longer one scores higher
    losses = [(math.log1p(math.exp(-1)) + math.log1p(math.exp(-2))) / 2, math.log1p(math.e), math.log(2)]
    assert card.loss == pytest.approx(sum(losses) / 3)
    assert card.margins["0.5"] == 0.5 and card.length_fit is None
    assert RewardCard.from_json(card.to_json()) == card


def test_the_headline_is_that_of_pair_accuracy():
    rankings = world(40, seed=0)
    card, found = build_card(rankings, seed=3), pair_accuracy([r.scores for r in rankings],
                                                              [r.ranks for r in rankings], seed=3)  # fmt: skip
    assert (card.accuracy, card.accuracy_low, card.accuracy_high) == (found.value, found.low, found.high)
    assert (card.over_pairs, card.over_pairs_low) == (found.over_pairs, found.over_pairs_low)
    assert card.accuracy != card.over_pairs


def test_REW_08_turned_labels_turn_every_accuracy():
    rankings = world(60, seed=1)
    turned = [ScoredRanking(r.scores, [-rank for rank in r.ranks], r.num_chars) for r in rankings]
    there, back = build_card(rankings), build_card(turned)
    assert back.accuracy == pytest.approx(1 - there.accuracy) and back.over_pairs == pytest.approx(1 - there.over_pairs)
    assert back.accuracy_low == pytest.approx(1 - there.accuracy_high)
    assert back.longer_wins.value == pytest.approx(1 - there.shorter_wins.value, abs=0.02)
    assert back.prefers_longer == pytest.approx(there.prefers_longer)  # says nothing of the labels
    assert back.margins["0.25"] == pytest.approx(-there.margins["0.75"]) and back.loss > there.loss


def test_intervals_over_pairs_cover_the_truth_although_pairs_of_a_prompt_hang_together():
    truth = accuracy_on(world(4000, seed=99)).over_pairs
    cards = [accuracy_on(world(60, seed)) for seed in range(120)]
    covered = np.mean([c.over_pairs_low <= truth <= c.over_pairs_high for c in cards])
    assert 0.88 <= covered <= 0.99


def test_where_all_prompts_are_right_the_interval_does_not_claim_certainty():
    found = pair_accuracy([[2, 1]] * 8, [[1, 2]] * 8)
    assert found.value == found.high == 1.0 and found.low == pytest.approx(8 / (8 + 1.959964**2))
    none = pair_accuracy([[1, 2]] * 8, [[1, 2]] * 8)
    assert (none.low, none.high) == pytest.approx((0.0, 1 - found.low))


def test_wilson_against_published_values():
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, table I, method 3
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=1e-4)


def test_resampling_in_parts_gives_the_draws_of_one_go(monkeypatch):
    values = np.random.default_rng(0).normal(size=(17, 2))
    whole = resampled_sums(values, seed=5)
    monkeypatch.setattr("heedful.evaluate.intervals.DRAWS_AT_ONCE", 100)
    assert whole.shape == (NUM_RESAMPLES, 2) and np.allclose(resampled_sums(values, seed=5), whole)
    draws = np.random.default_rng(5).integers(0, 17, size=(NUM_RESAMPLES, 17))
    assert np.allclose(whole, values[draws].sum(axis=1))
    assert bootstrap_interval(values[:, 0], seed=5) == pytest.approx(
        tuple(np.quantile(values[draws, 0].mean(axis=1), [0.025, 0.975]))
    )


def test_a_calibrated_model_passes_and_a_sharpened_or_flattened_one_does_not():
    right, sharp, flat = (build_card(world(500, 7, sharpness=s)).calibration for s in (1.0, 3.0, 0.3))
    assert right.error < right.by_chance < 0.06 and right.overconfidence_low < 0 < right.overconfidence_high
    assert sharp.error > 2 * sharp.by_chance and sharp.low > 0.1 and sharp.overconfidence_low > 0.05
    assert flat.error > 2 * flat.by_chance and flat.low > 0.05 and flat.overconfidence_high < -0.05
    for found in (right, sharp, flat):
        assert found.low <= found.error <= found.high and len(found.bins) == 10
        confidences = [b.confidence for b in found.bins]
        assert confidences == sorted(confidences) and confidences[0] >= 0.5 and confidences[-1] <= 1
        sizes = [b.num_pairs for b in found.bins]
        assert max(sizes) - min(sizes) <= 2


def test_calibration_raises_few_false_alarms_and_its_interval_covers():
    """100 calibrated models on 80 prompts: about 5 above what chance makes of 95, overconfidence covers 0 in 95."""
    found = [calibration_of(world(80, seed), seed) for seed in range(100)]
    assert sum(c.error > c.by_chance for c in found) <= 11
    assert 88 <= sum(c.overconfidence_low <= 0 <= c.overconfidence_high for c in found) <= 100
    assert sum(c.low == 0 for c in found) >= 89


def test_the_interval_of_the_calibration_error_covers_the_true_one():
    """Noise alone makes an absolute value larger: the plain error and a plain bootstrap would both lie above."""
    truth = calibration_of(world(3000, seed=77, sharpness=1.5)).error
    found = [calibration_of(world(100, seed, sharpness=1.5), seed) for seed in range(80)]
    assert np.mean([c.error for c in found]) > 1.2 * truth
    assert np.mean([c.low <= truth <= c.high for c in found]) >= 0.87


def test_calibration_by_hand_and_at_its_limits():
    """Ten prompts at log odds log 4 (confidence 0.8), six right: one bin, error 0.2, all of it overconfidence."""
    scores = [[math.log(4), 0.0]] * 6 + [[0.0, math.log(4)]] * 4
    found = build_card([ScoredRanking(s, [1, 2], [5, 5]) for s in scores]).calibration
    assert len(found.bins) == 1 and found.error == pytest.approx(0.2) == found.overconfidence
    assert (found.bins[0].confidence, found.bins[0].accuracy) == pytest.approx((0.8, 0.6))
    huge = build_card([ScoredRanking([1e9, -1e9], [1, 2], [5, 5])] * 9)
    assert huge.calibration.error == 0 and huge.loss == 0 and huge.score_std > 0
    same = build_card([ScoredRanking([0.5, 0.5], [1, 2], [5, 5])] * 9)  # knows nothing and says so
    assert same.accuracy == 0.5 and same.calibration.error == same.calibration.by_chance == 0
    assert same.num_equal_scores == 9
    assert same.score_std == 1e-6


def test_what_chance_makes_is_that_of_coins_with_the_models_own_odds():
    """400 pairs at confidence 0.8 in one bin: the error of a calibrated model is |binomial(400, 0.8) / 400 - 0.8|."""
    found = calibration_of([ScoredRanking([math.log(4), 0.0], [1, 2], [5, 5])] * 400)
    coins = np.abs(np.random.default_rng(1).binomial(400, 0.8, size=20_000) / 400 - 0.8)
    assert found.by_chance == pytest.approx(np.quantile(coins, 0.95), abs=0.006)


def test_length_fit_is_read_on_prompts_that_it_was_not_fitted_to():
    """On few prompts a fit read on its own would see length in pure noise."""
    found = [build_card(world(24, seed)).length_fit.accuracy.value for seed in range(40)]
    assert np.mean(found) < 0.51


def test_length_fit_sees_length_where_it_decides_and_nothing_where_it_does_not():
    none, some = build_card(world(500, 5)), build_card(world(500, 5, length=3.0))
    assert none.length_fit.accuracy.value < 0.55 and none.length_fit.share < 0.15
    assert some.length_fit.accuracy.value == pytest.approx(some.length_accuracy, abs=0.02)
    assert some.length_fit.share > 0.8 and some.length_fit.share_low > 0.7
    assert some.longer_wins.value > some.shorter_wins.value + 0.2 and some.prefers_longer > 0.8
    assert none.longer_wins.value == pytest.approx(none.shorter_wins.value, abs=0.06)
    middling = build_card(world(500, 5, best_length=150))  # neither short nor long: no line could see it
    assert middling.length_accuracy == pytest.approx(0.5, abs=0.05) and middling.length_fit.accuracy.value > 0.7
    assert build_card(world(200, 5, sharpness=-1.0)).length_fit.share is None  # worse than chance: nothing to share


def test_baits_and_controls_count_apart_and_nowhere_else():
    plain = [ScoredRanking([2.0, 1.0], [1, 2], [5, 6]), ScoredRanking([1.0, 2.0], [1, 2], [7, 8])]
    bait = ScoredRanking([2.0, 1.0, 1.5], [1, 2, 3], [5, 6, 99], kinds=("sampled", "sampled", "bait"))
    control = ScoredRanking([9.0, 1.0, 5.0], [1, 2, 3], [1, 1, 1], gold=((0, 1), (2, 1)))
    missed = ScoredRanking([9.0, 1.0, 9.0], [1, 2, 3], [1, 1, 1], gold=((0, 1), (0, 2)))  # equal is not better
    placed = ScoredRanking([2.0, 1.0, -7.0], [1, 2, 3], [5, 6, 7], kinds=("sampled", "sampled", "gold"))
    card = build_card([*plain, bait, control, missed, placed])
    without = build_card([*plain, ScoredRanking([2.0, 1.0], [1, 2], [5, 6]), ScoredRanking([2.0, 1.0], [1, 2], [5, 6])])
    assert (card.accuracy, card.num_pairs, card.num_prompts) == (0.75, 4, 4)
    assert (card.score_mean, card.score_std, card.loss) == (without.score_mean, without.score_std, without.loss)
    assert (card.baits.value, card.baits.num_pairs, card.baits.num_prompts) == (0.5, 2, 1)
    assert (card.gold_controls.num_passed, card.gold_controls.num_items) == (2, 3)
    assert (card.gold_controls.low, card.gold_controls.high) == wilson(2, 3)
    assert without.baits is None and without.gold_controls is None
    with pytest.raises(DataError, match="no pair to judge"):
        build_card([control, ScoredRanking([2.0, 1.0], [1, 2], [5, 6], kinds=("sampled", "bait"))])


def test_what_is_not_finite_is_refused_in_a_control_too():
    with pytest.raises(DataError, match="prompt 1: a score is not finite"):
        build_card([ScoredRanking([2.0, 1.0], [1, 2], [5, 6]), ScoredRanking([math.nan, 1.0], [1, 2], [5, 6],
                                                                             gold=((1, 0),))])  # fmt: skip
