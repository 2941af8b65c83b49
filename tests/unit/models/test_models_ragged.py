"""Padding that is left out: the same hidden states and gradients, nothing seen of the neighbours, fewer tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_tiny import SHAPES, make_model, make_tokenizer
from torch import Tensor, nn

from heedful.batches import RankingBatch, TokenBatch
from heedful.data.collate import packed_batch, ranking_batch
from heedful.data.tokenise import RankingSample
from heedful.errors import ModelError
from heedful.models import ragged
from heedful.models.attention import ROW
from heedful.models.packing import attention_tokens
from heedful.models.parts import LanguageModel, Part
from heedful.models.ragged import ROW_STEP, WIDTH_STEP
from heedful.models.recompute import recompute_activations
from heedful.models.roles import build_policy, build_roles, build_scalar
from heedful.records import TokenSample

CPU = torch.device("cpu")
LORA = SimpleNamespace(rank=4, alpha=8.0, targets="all-linear", base="float")
LENGTHS = (40, 7, 1, 23, 16)
WIDTH = max(LENGTHS)
NUM_TOKENS = -(-sum(LENGTHS) // ROW_STEP) * ROW_STEP
NUM_PADDED = len(LENGTHS) * -(-WIDTH // WIDTH_STEP) * WIDTH_STEP
"""Tokens that the products see without and with padding"""


def batch_of(lengths: tuple[int, ...] = LENGTHS, *, left: bool = False) -> TokenBatch:
    width = max(lengths)
    mask_BT = torch.arange(width) < torch.tensor(lengths)[:, None]
    if left:
        mask_BT = mask_BT.flip(1)
    ids_BT = torch.randint(5, 200, (len(lengths), width + 1), generator=torch.Generator().manual_seed(0))
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    return TokenBatch(ids_BT[:, :-1], ids_BT[:, 1:], mask_BT, mask_BT.long(), positions_BT)


def seen_by_a_product(part: Part) -> list[int]:
    """Filled by every forward: how many tokens an output projection of the trunk computes."""
    wanted = ("down_proj", "mlp.c_proj", "fc2", "dense_4h_to_h")
    layer = next(m for name, m in part.base.base_model.named_modules() if name.endswith(wanted))
    found: list[int] = []
    layer.register_forward_hook(lambda _, args, __: found.append(args[0].shape[:-1].numel()))
    return found


def padded(part: Part, monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """The result with padding."""
    with monkeypatch.context() as patch:
        patch.setattr("heedful.models.parts.is_worth_it", lambda *_, **__: False)
        return run()


def result_and_gradients(part: Part, run: Callable[[], Tensor]) -> list[Tensor]:
    part.model.zero_grad()
    result = run()
    (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum().backward()
    return [result.detach()] + [p.grad.clone() for p in part.trainable_parameters().values() if p.grad is not None]


def require_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 1
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * max(1.0, float(theirs.abs().max())))


def some_part(folder: Callable[..., Path], kind: str = "Llama", **options: Any) -> LanguageModel:
    return build_policy(folder(kind, **options), lora=None, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2", "Gemma2"])
def test_log_probs_and_gradients_are_those_with_padding(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, kind: str, lora: Any, recompute: bool
) -> None:
    torch.manual_seed(3)
    part = build_policy(folder(kind), lora=lora, device=CPU, dtype=torch.float32)
    if lora is not None:
        for parameter in part.trainable_parameters().values():
            nn.init.normal_(parameter, std=0.1)
    if recompute:
        recompute_activations(part)
    batch, seen = batch_of(), seen_by_a_product(part)
    keep = batch.attention_mask_BT > 0

    def run() -> Tensor:
        hidden_BTD = part.hidden(batch)
        return torch.cat([part.logprobs_of(hidden_BTD, batch)[0][keep], hidden_BTD[keep].flatten()])

    found = result_and_gradients(part, run)
    assert NUM_TOKENS in seen and NUM_PADDED not in seen
    require_equal(found, padded(part, monkeypatch, lambda: result_and_gradients(part, run)))
    assert seen[-1] == NUM_PADDED


@pytest.mark.parametrize("kind", sorted(SHAPES))
def test_every_architecture_gives_what_it_gives_with_padding(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    part = some_part(folder, kind)
    for left in (False, True):
        batch = batch_of(left=left)
        keep = batch.attention_mask_BT > 0
        with torch.no_grad():
            expected = padded(part, monkeypatch, partial(part.hidden, batch))[keep]
            torch.testing.assert_close(part.hidden(batch)[keep], expected, rtol=1e-5, atol=1e-4)


def test_neighbours_are_not_seen(folder: Callable[..., Path]) -> None:
    part, batch = some_part(folder), batch_of()
    others = batch.inputs_BT.clone()
    others[[0, 1, 2, 4]] = 9
    changed = TokenBatch(others, batch.targets_BT, batch.loss_mask_BT, batch.attention_mask_BT, batch.position_ids_BT)
    seen = seen_by_a_product(part)
    with torch.no_grad():
        assert torch.equal(part.hidden(batch)[3, :23], part.hidden(changed)[3, :23])
    assert seen[-1] == NUM_TOKENS


def test_rows_without_tokens_and_holes_in_the_mask(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    part, full = some_part(folder), batch_of()
    mask_BT = full.attention_mask_BT.clone()
    mask_BT[1], mask_BT[3, 5:9] = 0, 0
    batch = TokenBatch(full.inputs_BT, full.targets_BT, mask_BT > 0, mask_BT, full.position_ids_BT)
    with torch.no_grad():
        found = part.hidden(batch)
        expected = padded(part, monkeypatch, lambda: part.hidden(batch))
    torch.testing.assert_close(found[mask_BT > 0], expected[mask_BT > 0], rtol=1e-5, atol=1e-5)
    assert float(found[mask_BT == 0].abs().max()) == 0


def test_scores_of_either_side_of_padding(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    part = build_scalar(folder(), lora=None, device=CPU, dtype=torch.float32, new_head=True)
    seen = seen_by_a_product(part)
    alone = [part.scores(row[None, :n], torch.ones(1, n)) for row, n in zip(batch_of().inputs_BT, LENGTHS, strict=True)]
    for left in (False, True):
        batch = batch_of(left=left)
        with torch.no_grad():
            found = part.scores(batch.inputs_BT, batch.attention_mask_BT)
            assert seen[-1] == NUM_TOKENS
            expected = padded(part, monkeypatch, partial(part.scores, batch.inputs_BT, batch.attention_mask_BT))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        if not left:
            torch.testing.assert_close(found, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_the_only_token_of_a_row_is_scored_wherever_it_stands(folder: Callable[..., Path]) -> None:
    part = build_scalar(folder(), lora=None, device=CPU, dtype=torch.float32, new_head=True)
    alone = part.scores(torch.tensor([[7]]), torch.ones(1, 1))
    rows = torch.tensor([[7, 9, 9], [9, 7, 9], [9, 9, 7]])
    torch.testing.assert_close(part.scores(rows, torch.eye(3).long()), alone.expand(3))


def test_rankings_of_separate_rows(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    part = build_scalar(folder(), lora=None, device=CPU, dtype=torch.float32, new_head=True)
    tokens, seen = batch_of(), seen_by_a_product(part)
    rows_15 = torch.arange(5)[None]
    columns_15 = torch.tensor(LENGTHS)[None] - 1
    ones_15 = torch.ones(1, 5, dtype=torch.bool)
    batch = RankingBatch(
        tokens.inputs_BT, tokens.attention_mask_BT, tokens.position_ids_BT, rows_15, columns_15, rows_15 + 1, ones_15,
        ~ones_15, columns_15 + 1, torch.ones(1, 5, 5),
    )  # fmt: skip
    found = result_and_gradients(part, lambda: part.ranking_scores(batch))
    assert seen[-1] == NUM_TOKENS
    require_equal(
        found, padded(part, monkeypatch, lambda: result_and_gradients(part, lambda: part.ranking_scores(batch)))
    )


def test_parts_on_one_base_leave_padding_out_too(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed in a backward that comes when another part's adapters act."""
    roles = build_roles(
        folder(seed=5),
        None,
        sharing="shared",
        value_from="policy",
        policy_lora=LORA,
        value_lora=LORA,
        device=CPU,
        dtype=torch.float32,
    )
    for parameter in (*roles.policy.trainable_parameters().values(), *roles.value.trainable_parameters().values()):
        nn.init.normal_(parameter, std=0.1)
    recompute_activations(roles.policy)
    batch, seen = batch_of(), seen_by_a_product(roles.policy)
    keep = batch.attention_mask_BT > 0

    def run() -> Tensor:
        return torch.cat([roles.policy.logprobs(batch)[0][keep], roles.value.values(batch)[keep]])

    found = result_and_gradients(roles.policy, run)
    assert NUM_TOKENS in seen and NUM_PADDED not in seen
    require_equal(found, padded(roles.policy, monkeypatch, lambda: result_and_gradients(roles.policy, run)))


def test_bfloat16_has_all_gradients_after_the_trial(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = build_policy(folder(), lora=None, device=CPU, dtype=torch.bfloat16, trained=True)
    batch = batch_of()
    keep = batch.attention_mask_BT > 0
    found = result_and_gradients(part, lambda: part.hidden(batch)[keep].float())
    expected = padded(part, monkeypatch, lambda: result_and_gradients(part, lambda: part.hidden(batch)[keep].float()))
    assert len(found) == len(expected) > 20  # no weight has lost its gradient in the casts of the trial
    assert all((a - b).norm() <= 0.02 * b.norm() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("lengths", [(40, 40, 40), (40, 33, 36)], ids=["none", "little"])
def test_a_batch_of_hardly_any_padding_takes_no_detour(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]
) -> None:
    """Where the padded way keeps no more: the model's own attention has its probabilities kept either way."""
    llama, gpt2 = some_part(folder), some_part(folder, "GPT2", name="other")
    seen = seen_by_a_product(llama)
    llama.hidden(batch_of(lengths))
    assert seen[-1] == 128
    monkeypatch.setattr("heedful.models.parts.last_hidden_states", lambda *_, **__: pytest.fail("a detour"))
    gpt2.hidden(batch_of(lengths))


@pytest.mark.parametrize(
    ("config", "worth_it"),
    [
        ({}, True),
        ({"sliding_window": 39}, False),
        ({"sliding_window": 40}, True),
        ({"attention_chunk_size": 16}, False),
        ({"_attn_implementation": "sdpa"}, False),
    ],
)
def test_windows_and_other_kernels_keep_their_padding(config: dict[str, Any], worth_it: bool) -> None:
    known = SimpleNamespace(**{"_attn_implementation": "eager", "sliding_window": None, **config})
    trunk = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: known))
    assert ragged.is_worth_it(trunk, batch_of().attention_mask_BT) == worth_it


def test_a_batch_of_padding_alone_keeps_its_padding(folder: Callable[..., Path]) -> None:
    part, full = some_part(folder), batch_of()
    nothing = torch.zeros_like(full.attention_mask_BT)
    batch = TokenBatch(full.inputs_BT, full.targets_BT, nothing > 0, nothing, full.position_ids_BT)
    assert part.hidden(batch).shape[:2] == full.inputs_BT.shape


def test_positions_end_where_the_model_says(folder: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="longer than the 128 positions"):
        some_part(folder).hidden(batch_of((129, 3)))
    wide = batch_of((120, 3, 100))  # 223 tokens in one row of 256, none at a position that the model has not
    seen = seen_by_a_product(part := some_part(folder, name="other"))
    part.hidden(wide)
    assert seen[-1] == 256


def test_models_whose_tokens_run_on_keep_their_padding() -> None:
    trunk = make_model("Llama", make_tokenizer()).base_model
    trunk.set_attn_implementation("eager")
    known: dict[str, Any] = {"vocabulary": 100, "tolerance": 1e-3}
    for with_prompts in (False, True):
        assert ragged.can_be_ragged(trunk, torch.float32, with_prompts=with_prompts, **known)
    mixer = trunk.layers[0].mlp
    mixer.register_forward_hook(lambda _, __, out: out + out.roll(1, dims=1))  # as a convolution over tokens does
    for with_prompts in (False, True):
        assert not ragged.can_be_ragged(trunk, torch.float32, with_prompts=with_prompts, **known)


def test_models_that_cannot_be_told_lengths_keep_their_padding(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = some_part(folder)
    expected = padded(part, monkeypatch, lambda: part.hidden(batch_of()))
    forward = type(part.base.base_model).forward

    def without_keywords(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        if ROW in kwargs:
            raise TypeError("an unexpected keyword")
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(type(part.base.base_model), "forward", without_keywords)
    part = some_part(folder, name="again")
    seen = seen_by_a_product(part)
    assert torch.equal(part.hidden(batch_of()), expected)
    assert seen[-1] == NUM_PADDED and NUM_TOKENS not in seen


@pytest.mark.parametrize(("in_pieces", "num_packed"), [(True, 128), (False, 3 * 32)])
def test_packed_rows_and_batches_without_padding_come_in_rounded_shapes(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, in_pieces: bool, num_packed: int
) -> None:
    part = some_part(folder)
    if not in_pieces:
        monkeypatch.setattr(part, "can_be_ragged", lambda **_: False)
    seen = seen_by_a_product(part)
    ids = [[5 + (7 * n) % 190 for n in range(length)] for length in (12, 9, 30)]
    first, second, alone = (TokenSample(x, [True] * len(x), "") for x in ids)
    packed = packed_batch([[first, second], [alone], [alone]], 0)  # 77 real tokens in 3 rows of 29
    hidden_RTD = part.hidden(packed)
    assert hidden_RTD.shape[:2] == packed.inputs_BT.shape == (3, 29)
    assert seen[-1] == num_packed
    apart = part.hidden(packed_batch([[second]], 0))[0]
    assert torch.allclose(hidden_RTD[0, 11:19], apart, atol=1e-5)
    assert part.hidden(batch_of((21, 21, 21))).shape[:2] == (3, 21)
    assert seen[-1] == (64 if in_pieces else 3 * 32)


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2"])
def test_rankings_are_computed_token_by_token_with_every_prompt_once(folder: Callable[..., Path], kind: str) -> None:
    """Scores and gradients are those of separate rows; no more tokens are multiplied than there are."""
    model = build_scalar(folder(kind), lora=None, device=CPU, dtype=torch.float32, new_head=True)
    samples = []
    for n, (prompt, answers) in enumerate(((9, (4, 30, 11)), (21, (1, 2, 17, 5)), (3, (40, 40)))):
        asked = [(5 + 3 * n + k) % 200 for k in range(prompt)]
        sequences = [asked + [(50 + a + k) % 200 for k in range(a)] for a in answers]
        places = list(range(len(answers)))
        samples.append(RankingSample(str(n), "", sequences, places, [str(k) for k in places], prompt, places))
    assert attention_tokens(model) == math.inf
    seen = seen_by_a_product(model)
    found = []
    for tokens in (math.inf, None):
        batch = ranking_batch(samples, model.pad_id, attention_tokens=tokens)
        model.model.zero_grad()
        scores_PK = model.ranking_scores(batch)[batch.mask_PK]
        (scores_PK * torch.arange(1, len(scores_PK) + 1)).sum().backward()
        found.append(([p.grad.clone() for p in model.model.parameters() if p.grad is not None], scores_PK.detach()))
    num_tokens = sum(s.num_prompt_tokens + sum(len(x) - s.num_prompt_tokens for x in s.sequences) for s in samples)
    assert num_tokens == 183 and seen[0] == 192
    assert torch.allclose(found[0][1], found[1][1], atol=1e-5)
    largest = max(float(g.abs().max()) for g in found[1][0])
    assert all(torch.allclose(a, b, atol=1e-5 * largest) for a, b in zip(found[0][0], found[1][0], strict=True))
