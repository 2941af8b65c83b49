"""Answers that share one encoded prompt score, and teach, exactly as they do when each has its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heedful.data.collate import ranking_batch
from heedful.data.tokenise import RankingSample
from heedful.models.load import load_scalar, load_tokenizer
from heedful.models.parts import ScalarModel
from heedful.objectives import preference

CPU = torch.device("cpu")


def sample(name: str, prompt: list[int], answers: list[list[int]], ranks: list[int]) -> RankingSample:
    names = [f"a{k}" for k in range(len(ranks))]
    return RankingSample(name, "", [prompt + a for a in answers], ranks, names, len(prompt), [len(a) for a in answers])


SAMPLES = [
    sample("g1", [5, 9, 11], [[7, 8, 2], [30, 2], [12, 13, 14, 15, 2], [6, 2]], [2, 1, 3, 3]),
    sample("g2", [40, 41, 42, 43, 44], [[7, 2], [30, 31, 32, 2]], [1, 2]),
]


def scalar(path: Path, attention: str) -> ScalarModel:
    model = load_scalar(path, dtype=torch.float32, device=CPU, head="new", attention=attention)
    return ScalarModel(model, load_tokenizer(path), CPU, torch.float32)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2"])
def test_shared_and_separate_prompts_give_equal_scores_and_gradients(
    folder: Callable[..., Path], kind: str, attention: str
) -> None:
    model = scalar(folder(kind), attention)
    assert model.can_share_prompts()
    found = []
    for share in (False, True):
        batch = ranking_batch(SAMPLES, model.pad_id, share_prompts=share)
        scores_PK = model.ranking_scores(batch)
        model.model.zero_grad()
        preference.ranking(scores_PK, batch.ranks_PK, batch.mask_PK).loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.trainable_parameters().values() if p.grad is not None])
        found.append((scores_PK.detach()[batch.mask_PK], gradients))
    (scores, gradients), (shared_scores, shared_gradients) = found
    assert (scores - shared_scores).abs().max() < 1e-5 and (scores - shared_scores).abs().mean() < 1e-6
    scale = gradients.abs().max()  # the toy weights are large, so gradients are too
    assert (gradients - shared_gradients).abs().max() < 1e-5 * scale and scale > 1e-3


def test_an_answer_does_not_see_the_others(folder: Callable[..., Path]) -> None:
    model = scalar(folder("Llama"), "eager")
    other = replace(SAMPLES[0], sequences=[[5, 9, 11, 50, 51, 2], *SAMPLES[0].sequences[1:]])
    with torch.no_grad():
        before, after = (
            model.ranking_scores(ranking_batch([s], model.pad_id, share_prompts=True))[0] for s in (SAMPLES[0], other)
        )
    assert before[0] != after[0] and torch.equal(before[1:], after[1:])


def test_a_model_with_an_attention_window_does_not_share(folder: Callable[..., Path]) -> None:
    assert not scalar(folder("Gemma2"), "eager").can_share_prompts()
