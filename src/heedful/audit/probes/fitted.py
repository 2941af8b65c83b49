"""What rankings show by themselves: length beyond rank, differences between categories, phrases that go with scores."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from heedful.audit.cases import Case
from heedful.audit.measure import MIN_PROMPTS, NUM_RESAMPLES, Effect, effect_of
from heedful.audit.sentences import join, language, words

CORRELATION_WARN, CORRELATION_FAIL = 0.2, 0.4
"""Bounds of the partial correlation of score and length."""
CATEGORY_WARN = 1.0
"""Bound of the distance between categories, in within-prompt deviations."""
MAX_PHRASES = 5
SHARE_OF_PROMPTS = 0.08
"""A phrase must occur in the answers to this share of the prompts, or it is content."""


def length_correlation(cases: Sequence[Case], scores: Sequence[Sequence[float]], *, seed: int = 0) -> Effect | None:
    """Partial rank correlation of score and length within prompts, given the people's rank; None where nothing varies.

    Of score, characters and rank only the order within the prompt counts, so that one answer of three dots does not
    decide; the people's share is taken out of score and length by least squares over all prompts. What is left of the
    correlation is love of length that the people's rankings do not ask for.
    """
    products = []
    for case, row in zip(cases, scores, strict=True):
        if len(case.ranks) == len(row) > 1 and np.isfinite(row).all():
            columns = (row, [len(t) for t in case.answers], case.ranks)
            table_K3 = np.stack([_places(np.asarray(column, dtype=float)) for column in columns], axis=1)
            products.append(table_K3.T @ table_K3)
    if not products:
        return None
    products_N33 = np.stack(products)
    num = len(products_N33)
    value = float(_partial(products_N33.sum(axis=0)[None])[0])
    draws = np.random.default_rng(seed).integers(0, num, size=(NUM_RESAMPLES, num))
    counts_RN = np.stack([np.bincount(draw, minlength=num) for draw in draws])
    values_R = _partial(np.einsum("rn,nij->rij", counts_RN, products_N33))
    if math.isnan(value) or np.isnan(values_R).all() or num < 2:
        return None
    return effect_of(value, values_R, num)


def _places(values_K: np.ndarray) -> np.ndarray:
    """Places in rising order, ties in the middle, as shares of the answers around 0."""
    above_KK = np.sign(values_K[:, None] - values_K[None, :])
    return np.asarray(above_KK.sum(axis=1) / (2 * len(values_K)))


def _partial(sums_R33: np.ndarray) -> np.ndarray:
    """Correlation of the first two columns given the third, from sums of products."""
    rank_R = sums_R33[:, 2, 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        slope_R2 = np.where(rank_R[:, None] > 0, sums_R33[:, :2, 2] / rank_R[:, None], 0.0)
        rest_R22 = sums_R33[:, :2, :2] - slope_R2[:, :, None] * slope_R2[:, None, :] * rank_R[:, None, None]
        tiny_R = 1e-9 * np.minimum(sums_R33[:, 0, 0], sums_R33[:, 1, 1])
        known_R = (rest_R22[:, 0, 0] > tiny_R) & (rest_R22[:, 1, 1] > tiny_R)
        return np.where(known_R, rest_R22[:, 0, 1] / np.sqrt(rest_R22[:, 0, 0] * rest_R22[:, 1, 1]), np.nan)


def category_effects(
    cases: Sequence[Case], base_scores: Sequence[float], unit: float, *, seed: int = 0
) -> dict[str, Effect]:
    """By category: mean score of its good answers − mean of the other categories' means, in units.

    Categories with fewer than ``MIN_PROMPTS`` prompts are left out; {} where fewer than two remain.
    """
    rows: dict[str, list[float]] = defaultdict(list)
    for case, score in zip(cases, base_scores, strict=True):
        if math.isfinite(score) and case.prompt.category:
            rows[case.prompt.category].append(score / unit)
    values = {name: np.asarray(row) for name, row in sorted(rows.items()) if len(row) >= MIN_PROMPTS}
    if len(values) < 2:
        return {}
    rng = np.random.default_rng(seed)
    means = {name: row[rng.integers(0, len(row), (NUM_RESAMPLES, len(row)))].mean(1) for name, row in values.items()}
    found = {}
    for name, row in values.items():
        others = [other for other in values if other != name]
        value = float(row.mean() - np.mean([values[other].mean() for other in others]))
        resampled_R = means[name] - np.mean([means[other] for other in others], axis=0)
        found[name] = effect_of(value, resampled_R, len(row), num_variants=len(values))
    return found


def phrases_that_go_with_scores(cases: Sequence[Case], scores: Sequence[Sequence[float]]) -> list[str]:
    """Up to five phrases of one to four words whose answers score higher than others to the same prompt.

    By the t value of the within-prompt centred score, the share of log length taken out. Candidates only: whether the
    phrase itself is liked is shown by adding it to answers that lack it.
    """
    texts, length, score = [], [], []
    for case, row in zip(cases, scores, strict=True):
        if len(row) > 1 and np.isfinite(row).all():
            logs = np.log([max(len(t), 1) for t in case.answers])
            texts += [(case.prompt.id, _phrases(t)) for t in case.answers]
            length.append(logs - logs.mean())
            score.append(np.asarray(row) - np.mean(row))
    if not texts:
        return []
    length_A, score_A = np.concatenate(length), np.concatenate(score)
    slope = float(length_A @ score_A) / max(float(length_A @ length_A), 1e-12)
    rest_A = score_A - slope * length_A
    members: dict[str, list[int]] = defaultdict(list)
    for index, (_, phrases) in enumerate(texts):
        for phrase in phrases:
            members[phrase].append(index)
    deviation, least = float(rest_A.std()), max(4, math.ceil(SHARE_OF_PROMPTS * len(cases)))
    strength = {
        phrase: float(rest_A[rows].mean()) / deviation * math.sqrt(len(rows))
        for phrase, rows in members.items()
        if deviation > 0 and len({texts[i][0] for i in rows}) >= least and len(rows) <= 0.6 * len(texts)
    }
    chosen: list[str] = []
    # a longer phrase first where both are equally strong, so that "hope this helps" stands for "hope"
    for phrase in sorted((p for p in strength if strength[p] > 3), key=lambda p: (-round(strength[p], 1), -len(p), p)):
        if not any(phrase in other or other in phrase for other in chosen):
            chosen.append(phrase)
    return chosen[:MAX_PHRASES]


def _phrases(text: str) -> set[str]:
    """All runs of one to four words within a line."""
    found = set()
    lang = language(text)
    for line in text.splitlines():
        run = words(line)
        for size in range(1, 5):
            found |= {join(run[i : i + size], lang) for i in range(len(run) - size + 1)}
    return found
