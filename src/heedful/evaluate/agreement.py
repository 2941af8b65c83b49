"""How far simulated rankings agree with each other, with their majority and with the gold score behind them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from heedful.evaluate.accuracy import length_accuracy, pair_accuracy
from heedful.evaluate.gold import Scorer
from heedful.records import Prompt, Ranking


def panel_agreement(rankings: Sequence[Ranking], gold: Scorer) -> dict[str, float]:
    """Pair agreement figures of a file of rankings, every ranking weighted equally.

    ``annotator_vs_gold`` leaves out pairs that the annotator tied; ``annotator_vs_annotator`` counts a tie of the first
    as half; ``majority_vs_gold`` is the share of pairs with a majority that the gold score orders the same way;
    ``longer_wins`` is how often the annotators prefer the answer with more words.

    Raises:
        DataError: no two judgements of one prompt, or only ties.
    """
    gold_rows: list[list[float]] = []
    length_rows: list[list[int]] = []
    label_rows: list[list[int]] = []
    first_rows: list[list[float]] = []
    second_rows: list[list[int]] = []
    majority: list[float] = []
    for ranking in rankings:
        values = answer_scores(ranking, gold)
        judged = [[judgement.ranks[a.id] for a in ranking.answers] for judgement in ranking.rankings]
        for labels in judged:
            gold_rows.append(values)
            length_rows.append([len(a.text.split()) for a in ranking.answers])
            label_rows.append(labels)
        for first, second in itertools.combinations(judged, 2):
            first_rows.append([-float(rank) for rank in first])
            second_rows.append(second)
        for i, j in itertools.combinations(range(len(values)), 2):
            votes_for_i = sum(int(np.sign(labels[j] - labels[i])) for labels in judged)
            if votes_for_i and values[i] != values[j]:
                majority.append(float((votes_for_i > 0) == (values[i] > values[j])))
    return {
        "annotator_vs_gold": pair_accuracy(gold_rows, label_rows).value,
        "annotator_vs_annotator": pair_accuracy(first_rows, second_rows).value,
        "majority_vs_gold": float(np.mean(majority)),
        "longer_wins": length_accuracy(length_rows, label_rows).value,
    }


def answer_scores(ranking: Ranking, gold: Scorer) -> list[float]:
    """The gold score of each answer of a ranking; the flag ``cut`` marks an unfinished one."""
    prompt = Prompt(ranking.group_id, ranking.prompt, ranking.category, ranking.source, ranking.info)
    return [gold(prompt, a.text, finished="cut" not in a.flags) for a in ranking.answers]
