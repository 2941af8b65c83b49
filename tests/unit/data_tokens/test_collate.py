from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from heedful.batches import TokenBatch
from heedful.data.collate import block_attention_mask, completion_batch, packed_batch, ranking_batch, token_batch
from heedful.data.tokenise import RankingSample
from heedful.errors import DataError
from heedful.records import TokenSample


def all_count(ids: list[int], name: str = "") -> TokenSample:
    return TokenSample(ids, [True] * len(ids), name)


def test_SFT_01_end_token_counts_once_per_row_although_it_is_the_pad_token():
    batch = token_batch([all_count([1, 5, 6, 7, 2], "a"), all_count([1, 5, 2], "b")], pad_id=2)
    assert batch.inputs_BT.tolist() == [[1, 5, 6, 7], [1, 5, 2, 2]]
    assert batch.targets_BT.tolist() == [[5, 6, 7, 2], [5, 2, 2, 2]]
    assert batch.loss_mask_BT.tolist() == [[True] * 4, [True, True, False, False]]
    assert batch.attention_mask_BT.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert ((batch.targets_BT == 2) & batch.loss_mask_BT).sum(1).tolist() == [1, 1]
    assert (batch.ids, batch.packed, batch.num_counted_tokens) == (("a", "b"), False, 6)
    assert batch.loss_mask_BT.dtype == torch.bool and batch.inputs_BT.dtype == torch.int64


def test_loss_mask_is_of_the_target():
    batch = token_batch([TokenSample([1, 5, 6, 2], [False, False, True, True])], pad_id=0)
    assert batch.targets_BT[batch.loss_mask_BT].tolist() == [6, 2]


def test_packed_rows_by_hand():
    rows = [[all_count([1, 5, 6, 2]), all_count([1, 9, 8, 7, 2])], [TokenSample([1, 4, 2], [False, False, True])]]
    batch = packed_batch(rows, pad_id=2)
    assert batch.inputs_BT.tolist() == [[1, 5, 6, 1, 9, 8, 7], [1, 4, 2, 2, 2, 2, 2]]
    assert batch.targets_BT.tolist() == [[5, 6, 2, 9, 8, 7, 2], [4, 2, 2, 2, 2, 2, 2]]
    assert batch.attention_mask_BT.tolist() == [[1, 1, 1, 2, 2, 2, 2], [1, 1, 0, 0, 0, 0, 0]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 0, 1, 2, 3], [0] + [1] + [0] * 5]
    assert batch.loss_mask_BT.tolist() == [[True] * 7, [False, True] + [False] * 5]
    assert batch.packed


def test_block_attention_mask_by_hand():
    mask = block_attention_mask(torch.tensor([[1, 1, 2, 0]]))
    assert mask.shape == (1, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    added = block_attention_mask(torch.tensor([[1, 1, 2, 0]]), torch.float32)
    assert torch.equal(added == 0, mask) and added.min() == torch.finfo(torch.float32).min


def tiny_model(kind: str, attention: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        )
        config._attn_implementation = attention
        return LlamaForCausalLM(config).eval()
    config = GPT2Config(vocab_size=16, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    config._attn_implementation = attention
    return GPT2LMHeadModel(config).eval()


def nll(model: torch.nn.Module, batch: TokenBatch, attention: str) -> torch.Tensor:
    """Per-token loss, 0 where it does not count."""
    mask = batch.attention_mask_BT
    if batch.packed:
        mask = block_attention_mask(mask, torch.float32 if attention == "eager" else torch.bool)
    with torch.no_grad():
        logits = model(input_ids=batch.inputs_BT, attention_mask=mask, position_ids=batch.position_ids_BT).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten(), reduction="none")
    return loss.view_as(batch.targets_BT) * batch.loss_mask_BT


A, OTHER_A, B = all_count([1, 5, 6, 2]), all_count([1, 11, 6, 2]), all_count([1, 9, 8, 7, 2])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_SFT_06_packed_samples_do_not_see_each_other(kind, attention):
    model = tiny_model(kind, attention)
    apart = [nll(model, token_batch([sample], pad_id=2), attention)[0] for sample in (A, B)]
    C = all_count([1, 3, 2])
    packed = nll(model, packed_batch([[A, B], [C]], pad_id=2), attention)
    torch.testing.assert_close(packed[0], torch.cat(apart), atol=1e-5, rtol=0)
    padded = nll(model, token_batch([A, B, C], pad_id=2), attention)
    torch.testing.assert_close(packed.sum(), padded.sum(), atol=1e-5, rtol=0)
    swapped = nll(model, packed_batch([[B, A]], pad_id=2), attention)[0]
    torch.testing.assert_close(swapped, torch.cat(apart[::-1]), atol=1e-5, rtol=0)
    changed = nll(model, packed_batch([[OTHER_A, B], [C]], pad_id=2), attention)
    assert (changed[0, :3] - packed[0, :3]).abs().max() > 1e-4, "the change is seen where it should be"
    torch.testing.assert_close(changed[0, 3:], packed[0, 3:], atol=1e-6, rtol=0)
    assert packed.isfinite().all()


def test_SFT_06_a_plain_causal_mask_would_fail_the_test_above():
    model = tiny_model("llama", "sdpa")
    batch = packed_batch([[A, B]], pad_id=2)
    with torch.no_grad():
        seen = model(input_ids=batch.inputs_BT, attention_mask=torch.ones_like(batch.inputs_BT)).logits
        blocked = model(
            input_ids=batch.inputs_BT,
            attention_mask=block_attention_mask(batch.attention_mask_BT),
            position_ids=batch.position_ids_BT,
        ).logits
    assert (seen - blocked)[0, 3:].abs().max() > 1e-3


def test_ROL_05_empty_answer_is_one_trained_token():
    batch = completion_batch([[1, 5], [1, 5, 6]], [[2], [7, 8, 2]], pad_id=2)
    assert batch.loss_mask_BT.tolist() == [[False, True, False, False, False], [False, False, True, True, True]]
    assert batch.targets_BT[0, 1] == 2
    only = completion_batch([[1, 5], [1, 6]], [[2], [2]], pad_id=2)
    assert only.num_counted_tokens == 2 and only.targets_BT[only.loss_mask_BT].tolist() == [2, 2]


def test_ROL_06_fill_after_the_end_is_no_answer():
    batch = completion_batch([[1, 5], [1, 5]], [[7, 8, 2], [7, 2]], pad_id=2)
    assert batch.loss_mask_BT[:, 1:].tolist() == [[True, True, True], [True, True, False]]
    assert batch.loss_mask_BT.sum(1).float().mean() == 2.5
    wide = completion_batch([[1, 5], [1, 5], [1] * 9], [[7, 8, 2], [7, 2], [2]], pad_id=2)
    assert wide.loss_mask_BT[:2].sum(1).tolist() == [3, 2]


def test_ROL_03_answer_cut_by_the_limit_keeps_its_sampled_tokens():
    batch = completion_batch([[1, 5]], [[7, 8, 9, 4]], pad_id=2)
    assert batch.targets_BT[batch.loss_mask_BT].tolist() == [7, 8, 9, 4]


def test_PPO_14_first_answer_token_is_predicted_from_the_last_prompt_token():
    batch = completion_batch([[1, 5, 6], [1] * 5], [[7, 8, 9, 2], [3, 3, 3, 2]], pad_id=0, ids=["p1", "p2"])
    row = batch.loss_mask_BT[0].nonzero().flatten()
    assert row.tolist() == [2, 3, 4, 5]
    assert batch.inputs_BT[0, row].tolist() == [6, 7, 8, 9]
    assert batch.targets_BT[0, row].tolist() == [7, 8, 9, 2]
    assert batch.inputs_BT.shape[1] == 8 and batch.ids == ("p1", "p2")
    values_BT = torch.zeros(2, 8, requires_grad=True)
    (values_BT[batch.loss_mask_BT] ** 2 + values_BT[batch.loss_mask_BT]).sum().backward()
    assert values_BT.grad is not None and values_BT.grad[0].nonzero().numel() == 4


def ranking_sample(name: str, sequences: list[list[int]], ranks: list[int]) -> RankingSample:
    names = [f"a{k}" for k in range(len(ranks))]
    return RankingSample(name, "", sequences, ranks, names, 1, [1] * len(ranks))


RANKINGS = [
    ranking_sample("g1", [[1, 5, 2], [1, 6, 7, 2], [1, 4, 2]], [1, 2, 1]),
    ranking_sample("g2", [[1, 5, 2], [1, 8, 2]], [2, 1]),
]


def test_ranking_batch_with_every_answer_on_its_own():
    batch = ranking_batch(RANKINGS, pad_id=2)
    assert batch.ids_RT.tolist() == [[1, 5, 2, 2], [1, 6, 7, 2], [1, 4, 2, 2], [1, 5, 2, 2], [1, 8, 2, 2]]
    assert batch.attention_mask_RT.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], *[[1, 1, 1, 0]] * 3]
    assert batch.rows_PK.tolist() == [[0, 1, 2], [3, 4, 0]]
    assert batch.columns_PK.tolist() == [[2, 3, 2], [2, 2, 0]]
    assert batch.ranks_PK.tolist() == [[1, 2, 1], [2, 1, 0]]
    assert batch.mask_PK.tolist() == [[True] * 3, [True, True, False]]
    assert batch.ids == ("g1", "g2") and batch.prompts_RT is None


def test_ranking_batch_with_packed_rows():
    batch = ranking_batch(RANKINGS, pad_id=2, attention_tokens=20)
    assert batch.ids_RT.tolist() == [[1, 5, 2, 4, 2], [1, 5, 2, 8, 2], [1, 6, 7, 2, 2]]
    assert batch.attention_mask_RT.tolist() == [[1, 2, 2, 3, 3], [1, 2, 2, 3, 3], [1, 2, 2, 2, 0]]
    assert batch.prompts_RT is not None and batch.prompts_RT.tolist() == [[1] * 5, [1] * 5, [1, 1, 1, 1, 0]]
    assert batch.position_ids_RT.tolist() == [[0, 1, 2, 1, 2], [0, 1, 2, 1, 2], [0, 1, 2, 3, 0]]
    assert batch.rows_PK.tolist() == [[0, 2, 0], [1, 1, 0]]
    assert batch.columns_PK.tolist() == [[2, 3, 4], [2, 4, 0]]
    assert batch.lengths_PK.tolist() == [[2, 3, 2], [2, 2, 0]]
    apart = ranking_batch(RANKINGS, pad_id=2)
    assert torch.equal(batch.ranks_PK, apart.ranks_PK) and torch.equal(batch.mask_PK, apart.mask_PK)


def test_short_rankings_share_a_row():
    short = [ranking_sample("g3", [[1, 9]], [1]), ranking_sample("g4", [[1, 8]], [1])]
    batch = ranking_batch([RANKINGS[0], *short], pad_id=2, attention_tokens=1e-3)
    assert batch.ids_RT.tolist() == [[1, 6, 7, 2], [1, 5, 2, 2], [1, 4, 2, 2], [1, 9, 1, 8]]
    assert batch.attention_mask_RT[3].tolist() == [1, 2, 3, 4]
    assert batch.prompts_RT is not None and batch.prompts_RT[3].tolist() == [1, 1, 3, 3]
    assert batch.position_ids_RT[3].tolist() == [0, 1, 0, 1]
    assert batch.rows_PK[:, 0].tolist() == [1, 3, 3] and batch.columns_PK[:, 0].tolist() == [2, 1, 3]


def test_answers_of_a_shared_prompt_see_it_and_themselves_only():
    pieces = torch.tensor([[1, 2, 2, 3, 4, 5, 0]])  # prompt, answers of 2 and 1 tokens; prompt, answer; padding
    prompts = torch.tensor([[1, 1, 1, 1, 4, 4, 0]])
    seen = block_attention_mask(pieces, prompts_BT=prompts)[0, 0].int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]


def test_batches_of_nothing_are_errors():
    with pytest.raises(DataError, match="at least one sample"):
        token_batch([], pad_id=0)
    with pytest.raises(DataError, match="at least one sample"):
        packed_batch([[A], []], pad_id=0)
    with pytest.raises(DataError, match="sample 'd1' has fewer than two tokens"):
        token_batch([all_count([1], "d1")], pad_id=0)
    with pytest.raises(DataError, match="sample 'd1': 3 ids but a mask of 2"):
        token_batch([TokenSample([1, 2, 3], [True, True], "d1")], pad_id=0)
    with pytest.raises(DataError, match="at least one ranking"):
        ranking_batch([], pad_id=0)
    with pytest.raises(DataError, match="completion '1' has an empty answer"):
        completion_batch([[1], [1]], [[2], []], pad_id=0)
    with pytest.raises(DataError, match="completion '0' has an empty prompt"):
        completion_batch([[]], [[2]], pad_id=0)
    with pytest.raises(DataError, match="2 prompts came with 1 answers"):
        completion_batch([[1], [1]], [[2]], pad_id=0)
