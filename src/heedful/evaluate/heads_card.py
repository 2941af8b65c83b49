"""What the heads of a reward model add to its card.

Both functions take one list per prompt with what every head says of each ordinary answer: no baits, no controls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from heedful.evaluate.accuracy import accuracy_of, is_right, pairs_of
from heedful.records import RewardCard

Outputs = Sequence[Sequence[Sequence[float]]]
"""[prompt][answer][head]"""


def with_accuracies(
    card: RewardCard, outputs: Outputs, ranks: Mapping[str, Sequence[Sequence[int]]], *, seed: int = 0
) -> RewardCard:
    """The card with the accuracy of each attribute's own head.

    Args:
        ranks: by attribute, in the order of the heads; 1 = best, 0 = not rated. One without a pair is left out.
    """
    found = {}
    for h, (name, rows) in enumerate(ranks.items()):
        rated = [[k for k, rank in enumerate(row) if rank] for row in rows]
        pairs = pairs_of([[row[k] for k in places] for row, places in zip(rows, rated, strict=True)])
        scores_A = np.asarray([said[k][h] for said, places in zip(outputs, rated, strict=True) for k in places])
        accuracy = accuracy_of(is_right(pairs.differences(scores_A)), pairs.prompt_M, seed=seed)
        if accuracy is not None:
            found[name] = accuracy
    return replace(card, attributes=found)


def with_disagreement(
    card: RewardCard, outputs: Outputs, ranks: Sequence[Sequence[int]], *, seed: int = 0
) -> RewardCard:
    """The card with what the heads of an ensemble say of each other; their mean is the score."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from heedful.objectives import preference

    pairs = pairs_of(ranks)
    outputs_AH = np.asarray([row for rows in outputs for row in rows])
    right_MH = is_right(pairs.differences(outputs_AH))
    right_M = is_right(pairs.differences(outputs_AH.mean(axis=1)))
    agree_M = (right_MH == right_MH[:, :1]).all(axis=1)
    agree, disagree = (
        accuracy_of(right_M[chosen_M], pairs.prompt_M[chosen_M], seed=seed) for chosen_M in (agree_M, ~agree_M)
    )
    said = [torch.tensor(rows, dtype=torch.float64) for rows in outputs if rows]
    scores_PKH = pad_sequence(said, batch_first=True)
    mask_PK = pad_sequence([torch.ones(len(rows), dtype=torch.bool) for rows in said], batch_first=True)
    spread = float(preference.disagreement(scores_PKH, mask_PK))
    return replace(card, disagreement=spread, heads_agree=agree, heads_disagree=disagree)
