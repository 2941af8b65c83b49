"""How much of a reward model's accuracy length alone can explain."""

from __future__ import annotations

import numpy as np

from heedful.evaluate.accuracy import Pairs, accuracy_of, is_right
from heedful.evaluate.intervals import middle, resampled_sums
from heedful.records import Accuracy, LengthFit

FOLDS = 5
FEWEST_PROMPTS = 10
RIDGE = 1.0
"""In prompts: keeps the fit finite where length separates the labels."""


def length_fit(
    num_chars_A: np.ndarray, pairs: Pairs, accuracy: Accuracy, margin_M: np.ndarray, *, seed: int = 0
) -> LengthFit | None:
    """The accuracy of a logistic model of log length, in and beside that of the scores; None below ten prompts.

    Both log length and its square are fitted, so that "neither too short nor too long" counts as length.

    Args:
        accuracy: of the scores on ``pairs``.
        margin_M: score of the better answer - score of the worse one.
    """
    prompts, prompt_M, count_P = np.unique(pairs.prompt_M, return_inverse=True, return_counts=True)
    if len(prompts) < FEWEST_PROMPTS:
        return None
    weight_M = 1 / count_P[prompt_M]
    length_A = np.log1p(num_chars_A)
    length_A = (length_A - length_A.mean()) / max(length_A.std(), 1e-9)
    difference_M2 = np.stack([pairs.differences(length_A), pairs.differences(length_A**2)], axis=1)
    fold_M = (np.random.default_rng(seed).permutation(len(prompts)) % FOLDS)[prompt_M]
    predicted_M = np.zeros(len(prompt_M))
    for fold in range(FOLDS):
        out = fold_M == fold
        predicted_M[out] = difference_M2[out] @ _fit(difference_M2[~out], weight_M[~out])
    right_M = is_right(predicted_M)
    found = accuracy_of(right_M, prompt_M, seed=seed)
    assert found is not None
    if not accuracy.low > 0.5:
        return LengthFit(found, None, None, None)
    above_P2 = np.stack(
        [np.bincount(prompt_M, weights=weight_M * (right - 0.5)) for right in (right_M, is_right(margin_M))], axis=1
    )
    length_R, model_R = np.maximum(resampled_sums(above_P2, seed=seed), 1e-9).T
    share = max(found.value - 0.5, 0.0) / (accuracy.value - 0.5)
    return LengthFit(found, share, *middle(length_R / model_R))


def _fit(difference_MF: np.ndarray, weight_M: np.ndarray) -> np.ndarray:
    """Coefficients of P(better wins) = sigmoid(difference · coefficients), by Newton's method."""
    coefficients_F = np.zeros(difference_MF.shape[1])
    for _ in range(25):
        wrong_M = 1 / (1 + np.exp(np.clip(difference_MF @ coefficients_F, -30, 30)))
        gradient_F = difference_MF.T @ (weight_M * wrong_M) - RIDGE * coefficients_F
        curvature_M = weight_M * wrong_M * (1 - wrong_M)
        hessian_FF = (difference_MF.T * curvature_M) @ difference_MF + RIDGE * np.eye(len(coefficients_F))
        coefficients_F = coefficients_F + np.clip(np.linalg.solve(hessian_FF, gradient_F), -2, 2)
    return coefficients_F
