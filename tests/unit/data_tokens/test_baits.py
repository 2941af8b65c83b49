"""Baits: fluent answers to other prompts, last in a ranking, within the length limit."""

from __future__ import annotations

import math

import pytest

from heedful.data.baits import with_baits
from heedful.data.collate import ranking_batch
from heedful.data.tokenise import RankingSample
from heedful.errors import DataError


def sample(n, *answers, ranks=None, **options):
    prompt = [1, 100 + n]
    ranks = ranks or list(range(1, len(answers) + 1))
    names = [f"a{k}" for k in range(len(answers))]
    return RankingSample(f"g{n}", "", [prompt + list(a) for a in answers], ranks, names, 2,
                         [10 * len(a) for a in answers], **options)  # fmt: skip


SAMPLES = [
    sample(0, (5,), (6, 7), targets=[[0.5, 0.7], [0.3, 0.5]], strengths=[[0.0, 0.2], [0.2, 0.0]]),
    sample(1, (8, 9, 10), (11,), (12,), ranks=[2, 1, 2]),
    sample(2, (5,), (13, 14, 15, 16, 17, 18)),
]


def test_baits_are_answers_to_other_prompts_and_last():
    found = with_baits(SAMPLES, 2, max_tokens=6, seed=0)
    assert found == with_baits(SAMPLES, 2, max_tokens=6, seed=0) != with_baits(SAMPLES, 2, max_tokens=6, seed=1)
    for before, after in zip(SAMPLES, found, strict=True):
        num = len(before.ranks)
        assert after.sequences[:num] == before.sequences and after.ranks[:num] == before.ranks
        others = [s.sequences[k][2:] for s in SAMPLES if s is not before for k in range(len(s.sequences))]
        for sequence in after.sequences[num:]:
            assert sequence[:2] == before.sequences[0][:2] and sequence[2:] in others and len(sequence) <= 6
        assert after.ranks[num:] == [max(before.ranks) + 1] * 2
        assert after.kinds == ("sampled",) * num + ("bait",) * 2
        texts = [tuple(s) for s in after.sequences]
        assert len(set(texts)) == len(texts) == len(after.num_answer_chars) == len(after.answer_ids)
    assert found[0].targets == [[0.5, 0.7, 1, 1], [0.3, 0.5, 1, 1], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]]
    assert found[0].strengths == [[0, 0.2, 2, 2], [0.2, 0, 1, 1], [2, 1, 0.5, 0.5], [2, 1, 0.5, 0.5]]


def test_no_baits_are_no_change_and_none_to_be_found_is_said():
    assert with_baits(SAMPLES, 0, max_tokens=6, seed=0) == SAMPLES
    with pytest.raises(DataError, match="baits_per_ranking.*more prompts"):
        with_baits(SAMPLES[:1], 1, max_tokens=6, seed=0)


def test_fewer_baits_than_asked_for_are_said(capsys):
    with_baits(SAMPLES, 2, max_tokens=6, seed=0)
    assert "baits" not in capsys.readouterr().err
    with_baits(SAMPLES, 100, max_tokens=8, seed=0)
    assert "baits_per_ranking: 3 of 3 rankings got fewer than 100 baits (3 to 4)" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize("share", [False, True])
def test_the_batch_tells_labels_lengths_and_baits(share):
    samples = with_baits(SAMPLES[:2], 1, max_tokens=9, seed=0)
    batch = ranking_batch(samples, 0, attention_tokens=1e9 if share else None)
    assert batch.lengths_PK[1, :3].tolist() == [3, 1, 1] and batch.lengths_PK[0, 3] == 0
    assert batch.baits_PK.tolist() == [[False, False, True, False], [False, False, False, True]]
    for p, s in enumerate(samples):
        for k, sequence in enumerate(s.sequences):
            end, length = batch.columns_PK[p, k], batch.lengths_PK[p, k]
            row = batch.ids_RT[batch.rows_PK[p, k]]
            assert row[end - length + 1 : end + 1].tolist() == sequence[2:]
    assert batch.targets_PKK[0, :2, :2].flatten().tolist() == pytest.approx([0.5, 0.7, 0.3, 0.5])
    assert batch.strengths_PKK[1, :3, :3].tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    assert ranking_batch(SAMPLES[1:], 0).targets_PKK is None
    unknown = sample(3, (5,), (6,), targets=[[0.5, math.nan], [math.nan, 0.5]])
    assert bool(ranking_batch([unknown], 0).targets_PKK[0, 0, 1].isnan())
