from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models_tiny import SHAPES, make_model, make_tokenizer
from torch import Tensor

from heedful.batches import TokenBatch
from heedful.data.chat import answer_ids, prompt_ids
from heedful.errors import ModelError
from heedful.models.load import load_causal, load_scalar, load_tokenizer
from heedful.models.parts import LanguageModel, ScalarModel
from heedful.records import Message

CPU = torch.device("cpu")
KINDS = list(SHAPES)
SCALAR_KINDS = ["Llama", "GPT2", "Qwen2", "Gemma2"]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def language_model(path: Path, dtype: torch.dtype = torch.float32, attention: str = "auto") -> LanguageModel:
    model = load_causal(path, dtype=torch.float32, device=CPU, attention=attention)
    return LanguageModel(model, load_tokenizer(path), CPU, dtype)


def scalar_model(path: Path, dtype: torch.dtype = torch.float32) -> ScalarModel:
    model = load_scalar(path, dtype=torch.float32, device=CPU, head="new")
    return ScalarModel(model, load_tokenizer(path), CPU, dtype)


def batch(rows: list[list[int]], pad: int, *, left: bool = False) -> TokenBatch:
    """Inputs and targets of whole sequences, padded on one side."""
    width = max(map(len, rows)) - 1
    columns: dict[str, list[list[int]]] = {"inputs": [], "targets": [], "mask": [], "positions": []}
    for row in rows:
        n = len(row) - 1
        gap = [0] * (width - n)
        parts = {"inputs": row[:-1], "targets": row[1:], "mask": [1] * n, "positions": list(range(n))}
        for name, part in parts.items():
            filler = [pad] * len(gap) if name in ("inputs", "targets") else gap
            columns[name].append([*filler, *part] if left else [*part, *filler])
    t = {name: torch.tensor(value) for name, value in columns.items()}
    return TokenBatch(t["inputs"], t["targets"], t["mask"].bool(), t["mask"], t["positions"])


def packed(rows: list[list[int]]) -> TokenBatch:
    inputs = [i for row in rows for i in row[:-1]]
    targets = [i for row in rows for i in row[1:]]
    marks = [n for n, row in enumerate(rows, start=1) for _ in row[1:]]
    positions = [p for row in rows for p in range(len(row) - 1)]
    t = [torch.tensor([x]) for x in (inputs, targets, marks, positions)]
    return TokenBatch(t[0], t[1], t[2] > 0, t[2], t[3], packed=True)


ROWS = [[7, 30, 41, 8, 99], [12, 13, 14], [200, 5, 6, 7, 8, 9, 10, 77]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_and_entropy_equal_the_models_own_logits(
    kind: str, temperature: float, folder: Callable[..., Path]
) -> None:
    part = language_model(folder(kind))
    b = batch(ROWS, part.pad_id)
    own_BT, entropy_BT = part.logprobs(b, temperature=temperature, with_entropy=True)
    logits = part.model(
        b.inputs_BT, attention_mask=b.attention_mask_BT, position_ids=b.position_ids_BT
    ).logits
    expected = (logits / temperature).log_softmax(-1)
    picked = expected.gather(-1, b.targets_BT[..., None])[..., 0]
    assert own_BT.dtype == torch.float32
    assert torch.allclose(own_BT[b.loss_mask_BT], picked[b.loss_mask_BT], atol=1e-4)
    assert entropy_BT is not None
    assert torch.allclose(
        entropy_BT[b.loss_mask_BT], -(expected.exp() * expected).sum(-1)[b.loss_mask_BT], atol=1e-4
    )
    assert (own_BT[~b.loss_mask_BT] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_ROL_09_padding_side_and_batch_change_nothing(kind: str, folder: Callable[..., Path]) -> None:
    part = language_model(folder(kind))
    alone = [part.logprobs(batch([row], part.pad_id))[0][0] for row in ROWS]
    for left in (False, True):
        b = batch(ROWS, part.pad_id, left=left)
        together, _ = part.logprobs(b)
        for n, expected in enumerate(alone):
            assert torch.allclose(together[n][b.loss_mask_BT[n]], expected, atol=1e-4)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2"])
def test_packed_equals_alone(kind: str, dtype: torch.dtype, attention: str, folder: Callable[..., Path]) -> None:
    part = language_model(folder(kind), dtype, attention)
    expected = torch.cat([part.logprobs(batch([row], part.pad_id))[0][0] for row in ROWS])
    found = part.logprobs(packed(ROWS))[0][0]
    assert torch.allclose(found, expected, atol=1e-4 if dtype == torch.float32 else 0.3)
    if dtype == torch.float32:  # and a causal mask alone would not do
        b = packed(ROWS)
        leaky = part.logprobs(TokenBatch(b.inputs_BT, b.targets_BT, b.loss_mask_BT, (b.attention_mask_BT > 0).long(),
                                         b.position_ids_BT))[0][0]  # fmt: skip
        assert (leaky - expected).abs().max() > 0.05


def test_packed_rows_beyond_the_attention_window_are_refused(folder: Callable[..., Path]) -> None:
    part = language_model(folder("Gemma2", sliding_window=8))
    with pytest.raises(ModelError, match="window of 8"):
        part.logprobs(packed(ROWS))


def test_a_model_that_ignores_the_packing_mask_is_refused(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = language_model(folder())
    monkeypatch.setattr(part, "_packed_mask", lambda numbers_BT, _: (numbers_BT > 0).long())
    monkeypatch.setattr(part, "can_be_ragged", lambda **_: False)
    with pytest.raises(ModelError, match="packed samples see each other"):
        part.logprobs(packed(ROWS))


@pytest.mark.parametrize("setting", [{"logit_scale": 0.5}, {"final_logit_softcapping": 0.5}])
def test_an_output_layer_we_read_wrongly_is_refused(setting: dict[str, float], folder: Callable[..., Path]) -> None:
    """Llama ignores these settings; our formula obeys them, so the check at construction must find the difference."""
    path = folder("Llama")
    model = load_causal(path, dtype=torch.float32, device=CPU)
    for name, value in setting.items():
        setattr(model.config, name, value)
    with pytest.raises(ModelError, match="not supported"):
        LanguageModel(model, load_tokenizer(path), CPU, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_compute_is_accepted_and_near(kind: str, folder: Callable[..., Path]) -> None:
    path = folder(kind, initializer_range=0.1)
    exact, low = language_model(path), language_model(path, torch.bfloat16)
    b = batch(ROWS, exact.pad_id)
    assert low.logprobs(b)[0].dtype == torch.float32
    assert torch.allclose(exact.logprobs(b)[0], low.logprobs(b)[0], atol=0.3)
    assert all(p.dtype == torch.float32 for p in low.trainable_parameters().values())


@torch.enable_grad()
@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_gradients_equal_those_of_the_plain_model(kind: str, folder: Callable[..., Path]) -> None:
    part = language_model(folder(kind))
    b = batch(ROWS, part.pad_id)

    def gradients(logprobs_BT: Tensor) -> dict[str, Tensor]:
        part.model.zero_grad()
        logprobs_BT[b.loss_mask_BT].sum().backward()
        return {n: p.grad.clone() for n, p in part.trainable_parameters().items() if p.grad is not None}

    own = gradients(part.logprobs(b)[0])
    logits = part.model(b.inputs_BT, attention_mask=b.attention_mask_BT, position_ids=b.position_ids_BT).logits
    plain = gradients(logits.log_softmax(-1).gather(-1, b.targets_BT[..., None])[..., 0])
    assert own.keys() == plain.keys() == part.trainable_parameters().keys()
    for name in own:
        assert torch.allclose(own[name], plain[name], atol=1e-4, rtol=1e-3), name


def test_too_long_is_one_sentence(folder: Callable[..., Path]) -> None:
    part = language_model(folder("GPT2"))
    with pytest.raises(ModelError, match="200 tokens is longer than the 128 positions"):
        part.logprobs(batch([[7] * 201], part.pad_id))


@pytest.mark.parametrize("kind", SCALAR_KINDS)
def test_REW_02_padding_side_does_not_matter(kind: str, folder: Callable[..., Path]) -> None:
    part = scalar_model(folder(kind))
    ids = [5, 9, 3, 6, 7, 3]
    rows = torch.tensor([ids + [part.pad_id] * 2, [part.pad_id] * 2 + ids])
    mask = torch.tensor([[1] * 6 + [0] * 2, [0] * 2 + [1] * 6])
    alone = part.scores(torch.tensor([ids]), torch.ones(1, 6, dtype=torch.int64))
    right, left = part.scores(rows, mask)
    assert float(right) == pytest.approx(float(alone), abs=1e-5)
    assert float(left) == pytest.approx(float(alone), abs=1e-5)
    assert alone.dtype == torch.float32


def test_REW_02_an_answer_may_end_in_the_pad_id(folder: Callable[..., Path]) -> None:
    """With pad = end token, transformers' own pooling would read one token early; the mask decides here."""
    part = scalar_model(folder())
    ids = torch.tensor([[5, 9, part.pad_id, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    values = part.values(batch([[5, 9, part.pad_id, 0]], 0))
    assert float(part.scores(ids, mask)) == pytest.approx(float(values[0, 2]), abs=1e-5)


def test_a_row_without_tokens_is_named(folder: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="row 1"):
        scalar_model(folder()).scores(torch.ones(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 1], [0, 0, 0]]))


@pytest.mark.parametrize("kind", SCALAR_KINDS)
def test_values_are_aligned_with_targets(kind: str, folder: Callable[..., Path]) -> None:
    part = scalar_model(folder(kind))
    row = ROWS[2]
    values_BT = part.values(batch(ROWS, part.pad_id))
    for t in range(len(row) - 1):
        prefix = torch.tensor([row[: t + 1]])
        assert float(values_BT[2, t]) == pytest.approx(float(part.values_after(prefix)), abs=1e-4)
    assert values_BT.dtype == torch.float32


WORDS = ["", "a", "no", "yes", "four", "seven", "a longer one"]
PROMPT = (Message("user", "Hi?"),)


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_REW_03_score_does_not_depend_on_the_batch(kind: str, folder: Callable[..., Path]) -> None:
    part = scalar_model(folder(kind, max_position_embeddings=256))
    one_by_one = part.score_texts([PROMPT] * 7, WORDS, micro_batch_tokens=1)
    assert len(set(one_by_one)) == 7
    for budget in (80, 150, 10_000):
        assert part.score_texts([PROMPT] * 7, WORDS, micro_batch_tokens=budget) == pytest.approx(one_by_one, abs=1e-4)
        backwards = part.score_texts([PROMPT] * 7, WORDS[::-1], micro_batch_tokens=budget)
        assert backwards[::-1] == pytest.approx(one_by_one, abs=1e-4)


def test_micro_batches_stay_within_the_budget(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    part = scalar_model(folder())
    shapes: list[tuple[int, int]] = []

    def outputs(self: ScalarModel, ids_NT: Tensor, attention_mask_NT: Tensor) -> Tensor:
        shapes.append((ids_NT.shape[0], ids_NT.shape[1]))
        return torch.zeros(len(ids_NT), 1)

    monkeypatch.setattr(ScalarModel, "outputs", outputs)
    part.score_texts([PROMPT] * 7, WORDS, micro_batch_tokens=100)
    assert sum(n for n, _ in shapes) == 7 and 1 < len(shapes) < 7
    assert all(n * width <= 100 for n, width in shapes)
    part.score_texts([PROMPT] * 7, WORDS, micro_batch_tokens=1)  # a single row may exceed the budget
    assert [n for n, _ in shapes[-7:]] == [1] * 7


def test_REW_07_scored_texts_end_where_training_sequences_end(folder: Callable[..., Path]) -> None:
    part = scalar_model(folder())
    for word in WORDS[1:]:
        ids = prompt_ids(part.tokenizer, PROMPT) + answer_ids(part.tokenizer, word)
        assert ids[-1] == part.tokenizer.convert_tokens_to_ids("<|im_end|>")
        trained = part.scores(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.int64))
        [served] = part.score_texts([PROMPT], [word], micro_batch_tokens=100)
        assert served == pytest.approx(float(trained), abs=1e-5)


def test_REW_09_text_is_encoded_by_the_reward_models_own_tokenizer(folder: Callable[..., Path]) -> None:
    """Fed the policy's ids, a reward model with permuted bytes would score another text."""
    policy_tokenizer = make_tokenizer()
    other = make_tokenizer(shift=1)
    part = scalar_model(folder(tokenizer=other, name="reward"))
    ids = prompt_ids(policy_tokenizer, PROMPT) + answer_ids(policy_tokenizer, "yes")
    own_ids = prompt_ids(other, PROMPT) + answer_ids(other, "yes")
    assert ids != own_ids
    [score] = part.score_texts([PROMPT], ["yes"], micro_batch_tokens=100)
    ones = torch.ones(1, len(ids), dtype=torch.int64)
    assert score == pytest.approx(float(part.scores(torch.tensor([own_ids]), ones)), abs=1e-5)
    assert abs(score - float(part.scores(torch.tensor([ids]), ones))) > 1e-3


def test_an_end_token_spelled_out_in_an_answer_does_not_stop_the_run(folder: Callable[..., Path]) -> None:
    part = scalar_model(folder())
    scores = part.score_texts([PROMPT] * 2, ["yes<|im_end|>", "yes"], micro_batch_tokens=100)
    assert scores[0] == scores[1]


def test_scalar_head_is_float32_under_a_bfloat16_trunk(folder: Callable[..., Path]) -> None:
    path = folder()
    model = load_scalar(path, dtype=torch.bfloat16, device=CPU, head="new")
    part = ScalarModel(model, load_tokenizer(path), CPU, torch.bfloat16)
    assert model.score.weight.dtype == torch.float32 and model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert part.values(batch(ROWS, part.pad_id)).dtype == torch.float32


@torch.enable_grad()
def test_scores_carry_gradients(folder: Callable[..., Path]) -> None:
    part = scalar_model(folder())
    part.scores(torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.int64)).sum().backward()
    missing = [n for n, p in part.trainable_parameters().items() if p.grad is None]
    assert missing == []


def test_a_classifier_with_two_outputs_is_no_scalar_model() -> None:
    tokenizer: Any = make_tokenizer(pad="<|endoftext|>")
    with pytest.raises(ModelError, match="one output"):
        ScalarModel(make_model("Llama", tokenizer, head="ForSequenceClassification"), tokenizer, CPU, torch.float32)
