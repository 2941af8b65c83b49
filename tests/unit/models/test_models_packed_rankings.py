"""Rankings in packed rows, prompts shared or not, score and teach exactly as answers that are encoded one by one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heedful.data.collate import ranking_batch
from heedful.data.tokenise import RankingSample
from heedful.models.load import load_scalar, load_tokenizer
from heedful.models.packing import attention_tokens
from heedful.models.parts import ScalarModel
from heedful.objectives import preference

CPU = torch.device("cpu")


def sample(name: str, prompt: list[int], answers: list[list[int]], ranks: list[int], **more: Any) -> RankingSample:
    names = [f"a{k}" for k in range(len(ranks))]
    lengths = [len(a) for a in answers]
    return RankingSample(name, "", [prompt + a for a in answers], ranks, names, len(prompt), lengths, **more)


def some_samples() -> list[RankingSample]:
    """K = 1 to 5 with ties and a bait, prompts and answers of 1 to 9 tokens, the pad id (0) among them."""
    rng = random.Random(1)
    found = []
    for name, ranks in enumerate(([1], [1, 2], [2, 1, 2], [1, 1, 2, 3], [5, 1, 3, 2, 4], [1, 1])):
        ids = [[rng.choice([0, 5, 9, 17, 30, 41]) for _ in range(rng.randint(1, 9))] for _ in range(len(ranks) + 1)]
        found.append(sample(f"g{name}", ids[0], ids[1:], ranks))
    return [*found, sample("bait", [7, 8], [[5, 9, 2], [30, 2]], [1, 2], kinds=("", "bait"))]


SAMPLES = some_samples()


def scalar(path: Path, attention: str, dtype: torch.dtype = torch.float32) -> ScalarModel:
    model = load_scalar(path, dtype=torch.float32, device=CPU, head="new", attention=attention)
    return ScalarModel(model, load_tokenizer(path), CPU, dtype)


def learn(model: ScalarModel, samples: list[RankingSample], scores_of: Callable[[ScalarModel], Tensor]) -> Any:
    """The scores [P, K] of real answers, and the gradients of their ranking loss."""
    batch = ranking_batch(samples, model.pad_id)
    model.model.zero_grad()
    scores_PK = scores_of(model)
    preference.ranking(scores_PK, batch.ranks_PK, batch.mask_PK, ties="half").loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.trainable_parameters().values() if p.grad is not None])
    return scores_PK.detach()[batch.mask_PK], gradients


def one_by_one(samples: list[RankingSample]) -> Callable[[ScalarModel], Tensor]:
    """Every answer in a forward of its own, without padding."""

    def scores_of(model: ScalarModel) -> Tensor:
        rows = []
        for s in samples:
            row = [model.values_after(torch.tensor([ids]))[0] for ids in s.sequences]
            rows.append(torch.stack([*row, *[torch.zeros(())] * (5 - len(row))]))
        return torch.stack(rows)

    return scores_of


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2"])
def test_packed_rows_give_the_scores_and_gradients_of_answers_one_by_one(
    folder: Callable[..., Path], kind: str, attention: str
) -> None:
    model = scalar(folder(kind), attention)
    chosen = attention_tokens(model)
    assert chosen is not None and chosen > 1
    expected_scores, expected_gradients = learn(model, SAMPLES, one_by_one(SAMPLES))
    scale = expected_gradients.abs().max()  # the toy weights are large, so gradients are too
    assert scale > 1e-3
    num_rows = []
    for tokens in (None, 1e-3, chosen, 1e9):
        batch = ranking_batch(SAMPLES, model.pad_id, attention_tokens=tokens)
        scores, gradients = learn(model, SAMPLES, lambda m, batch=batch: m.ranking_scores(batch))
        assert (scores - expected_scores).abs().max() < 1e-5
        assert (gradients - expected_gradients).abs().max() < 1e-5 * scale
        num_rows.append(len(batch.ids_RT))
    assert num_rows[0] == sum(len(s.ranks) for s in SAMPLES) and num_rows[0] > num_rows[1] > num_rows[3] >= 1


def test_packed_rows_in_bf16_are_as_close_as_separate_ones(folder: Callable[..., Path]) -> None:
    path = folder("Llama")
    exact, _ = learn(scalar(path, "eager"), SAMPLES, one_by_one(SAMPLES))
    model = scalar(path, "eager", torch.bfloat16)
    gaps = []
    for tokens in (None, 1e9):
        batch = ranking_batch(SAMPLES, model.pad_id, attention_tokens=tokens)
        gaps.append(float((model.ranking_scores(batch)[batch.mask_PK] - exact).detach().abs().max()))
    assert 0 < gaps[1] < 2 * gaps[0] and gaps[1] < 0.05 * exact.abs().max()


@pytest.mark.parametrize("place", [0, 3])
def test_an_answer_does_not_see_the_others_nor_its_neighbours_in_the_row(
    folder: Callable[..., Path], place: int
) -> None:
    model = scalar(folder("Llama"), "eager")
    rankings = SAMPLES[3:5]
    first = rankings[0].num_prompt_tokens
    ids = list(rankings[0].sequences[place])
    ids[first] = 50
    changed = replace(rankings[0], sequences=[ids if k == place else s for k, s in enumerate(rankings[0].sequences)])
    with torch.no_grad():
        before, after = (
            model.ranking_scores(ranking_batch(samples, model.pad_id, attention_tokens=1e9)).flatten()
            for samples in (rankings, [changed, rankings[1]])
        )
    others = torch.arange(10) != place
    others[4] = False  # no answer
    assert before[place] != after[place] and torch.equal(before[others], after[others])


def test_models_that_cannot_pack_say_so(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_tokens(scalar(folder("Gemma2"), "eager")) is None, "attention window"
    model = scalar(folder("Llama"), "eager")
    assert attention_tokens(model) is not None
    monkeypatch.setattr(model.base.config, "_attn_implementation", "flash_attention_2")
    assert attention_tokens(model) is None, "takes no mask"
    monkeypatch.undo()
    monkeypatch.setattr(ScalarModel, "_packed_mask", lambda *_: None)
    monkeypatch.setattr(ScalarModel, "can_be_ragged", lambda *_, **__: False)
    assert attention_tokens(model) is None, "a model that ignores the mask is found out by trying"


def test_attention_weighs_by_the_shape_of_the_model(folder: Callable[..., Path]) -> None:
    """Two layers of known size by hand: weights / (2 · layers · attention width) / 2."""
    model = scalar(folder("Llama"), "eager")
    config = model.base.config
    D, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    width = config.num_attention_heads * config.head_dim
    layer = 2 * D * width + 2 * D * kv + 3 * D * config.intermediate_size + 2 * D
    num_weights = config.num_hidden_layers * layer + D + D  # the last norm and the head
    assert attention_tokens(model) == math.inf, "in pieces, wide rows cost nothing"
    model = scalar(folder("Llama"), "sdpa")
    assert attention_tokens(model) == pytest.approx(num_weights / (2 * config.num_hidden_layers * width) / 2)
