"""The reward card: what is known of a reward model, worked out from its scores on rankings alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from heedful.errors import DataError
from heedful.evaluate.accuracy import Pairs, accuracy_of, flat_scores, is_right, length_accuracy, pairs_of
from heedful.evaluate.calibration import calibration
from heedful.evaluate.intervals import wilson
from heedful.evaluate.length_fit import length_fit
from heedful.records import Accuracy, PassRate, RewardCard

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, slots=True)
class ScoredRanking:
    """The answers to one prompt with their scores: all that a card needs of a ranking."""

    scores: Sequence[float]
    """higher is better"""
    ranks: Sequence[int]
    """1 = best, equal = tie"""
    num_chars: Sequence[int]
    """lengths of the answers' texts"""
    category: str = ""
    source: str = ""
    kinds: Sequence[str] = ()
    """of the answers, as in :class:`~heedful.records.Answer`; () = all sampled"""
    gold: Sequence[tuple[int, int]] = ()
    """places of the (better, worse) answers of a control item; a ranking that has them is nothing else"""

    def places(self, *kinds: str) -> list[int]:
        """Places of the answers of these kinds."""
        return [k for k, kind in enumerate(self.kinds) if kind in kinds]


def build_card(
    rankings: Sequence[ScoredRanking],
    *,
    model: str = "reward_model",
    train_accuracy: float | None = None,
    seed: int = 0,
) -> RewardCard:
    """Accuracy as a whole and in parts, calibration, margins, controls, scale, and what length alone explains.

    Gold controls and baits are counted apart and nowhere else: they are easy, and would flatter the accuracy.

    Args:
        train_accuracy: pair accuracy on the rankings of the training, where it is known.

    Raises:
        DataError: lists of different lengths, a score that is not finite, or no pair of ordinary answers.
    """
    flat_scores([r.scores for r in rankings], [r.ranks for r in rankings])  # refuses what is not finite, in any part
    ordinary = [left for r in rankings if not r.gold and len((left := _ordinary(r)).scores) > 1]
    ranks = [r.ranks for r in ordinary]
    scores_A, pairs = flat_scores([r.scores for r in ordinary], ranks), pairs_of(ranks)
    margin_M = pairs.differences(scores_A)
    right_M = is_right(margin_M)
    overall = accuracy_of(right_M, pairs.prompt_M, seed=seed)
    if overall is None:
        raise DataError(
            "no pair to judge: no ranking has two different answers of which one is preferred, baits and controls apart"
        )

    def part(chosen_M: np.ndarray) -> Accuracy | None:
        return accuracy_of(right_M[chosen_M], pairs.prompt_M[chosen_M], seed=seed)

    num_chars_A = np.asarray([n for r in ordinary for n in r.num_chars], dtype=float)
    longer_M = np.sign(pairs.differences(num_chars_A))
    by_category = _by_name(ordinary, lambda r: r.category, part, pairs)
    return RewardCard(
        model=model,
        accuracy=overall.value,
        accuracy_low=overall.low,
        accuracy_high=overall.high,
        num_prompts=overall.num_prompts,
        num_pairs=overall.num_pairs,
        accuracy_by_category={name: found.value for name, found in by_category.items()},
        length_accuracy=length_accuracy([r.num_chars for r in ordinary], ranks, seed=seed).value,
        score_mean=float(scores_A.mean()),
        score_std=max(float(scores_A.std(ddof=1)), 1e-6),
        train_accuracy=train_accuracy,
        loss=_mean_over_prompts(np.logaddexp(0, -margin_M), pairs),
        over_pairs=overall.over_pairs,
        over_pairs_low=overall.over_pairs_low,
        over_pairs_high=overall.over_pairs_high,
        num_tied_pairs=pairs.num_tied,
        num_equal_scores=int((margin_M == 0).sum()),
        by_category=by_category,
        by_source=_by_name(ordinary, lambda r: r.source, part, pairs),
        longer_wins=part(longer_M > 0),
        shorter_wins=part(longer_M < 0),
        prefers_longer=_mean_over_prompts((1 + longer_M * np.sign(margin_M)) / 2, pairs),
        length_fit=length_fit(num_chars_A, pairs, overall, margin_M, seed=seed),
        margins=_quantiles(margin_M),
        score_quantiles=_quantiles(scores_A),
        calibration=calibration(scores_A, pairs, seed=seed),
        gold_controls=_gold(rankings),
        baits=_baits(rankings, seed=seed),
    )


def _quantiles(values: np.ndarray) -> dict[str, float]:
    return {str(q): float(v) for q, v in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True)}


def _ordinary(ranking: ScoredRanking) -> ScoredRanking:
    """The ranking without its baits and controls."""
    apart = set(ranking.places("bait", "gold"))
    if not apart:
        return ranking
    kept = [k for k in range(len(ranking.scores)) if k not in apart]
    scores, ranks, num_chars = (
        [ranking.scores[k] for k in kept], [ranking.ranks[k] for k in kept], [ranking.num_chars[k] for k in kept]
    )  # fmt: skip
    return replace(ranking, scores=scores, ranks=ranks, num_chars=num_chars, kinds=())


def _by_name(
    rankings: Sequence[ScoredRanking],
    name_of: Callable[[ScoredRanking], str],
    part: Callable[[np.ndarray], Accuracy | None],
    pairs: Pairs,
) -> dict[str, Accuracy]:
    """Accuracy of the pairs of every name, in order of name; rankings without a name are left out."""
    name_M = np.asarray([name_of(r) for r in rankings], dtype=object)[pairs.prompt_M]
    found = {name: part(name_M == name) for name in sorted(set(name_M)) if name}
    return {name: accuracy for name, accuracy in found.items() if accuracy is not None}


def _mean_over_prompts(value_M: np.ndarray, pairs: Pairs) -> float:
    """Mean over prompts of each prompt's mean over its pairs."""
    _, prompt_M = np.unique(pairs.prompt_M, return_inverse=True)
    return float((np.bincount(prompt_M, weights=value_M) / np.bincount(prompt_M)).mean())


def _gold(rankings: Sequence[ScoredRanking]) -> PassRate | None:
    """Control items passed: those of ``gold``, and answers of kind gold, whose known place is their rank."""
    passed = []
    for ranking in rankings:
        known = list(ranking.gold)
        if not known:
            places = set(ranking.places("gold"))
            for i, j in combinations(range(len(ranking.ranks)), 2):
                if {i, j} & places and ranking.ranks[i] != ranking.ranks[j]:
                    known.append((i, j) if ranking.ranks[i] < ranking.ranks[j] else (j, i))
        if known:
            passed.append(all(ranking.scores[better] > ranking.scores[worse] for better, worse in known))
    if not passed:
        return None
    return PassRate(sum(passed) / len(passed), *wilson(sum(passed), len(passed)), sum(passed), len(passed))


def _baits(rankings: Sequence[ScoredRanking], *, seed: int) -> Accuracy | None:
    """Accuracy on pairs of an ordinary answer and a bait; the bait is the worse one whatever its rank."""
    margins, prompts = [], []
    for prompt, ranking in enumerate(rankings):
        apart = set(ranking.places("bait", "gold"))
        found = [
            ranking.scores[k] - ranking.scores[bait]
            for bait in ranking.places("bait")
            for k in range(len(ranking.scores))
            if k not in apart
        ]
        margins += found
        prompts += [prompt] * len(found)
    return accuracy_of(is_right(np.asarray(margins)), np.asarray(prompts), seed=seed)
