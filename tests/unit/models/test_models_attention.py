"""Attention in groups of pieces against the model's own function on one row with a mask of pieces."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from heedful.models import attention
from heedful.models.attention import ROW, Piece, Row, keeps_no_probabilities, let_attention_read_rows
from heedful.models.llamas import are_llamas

F32, BF16 = torch.float32, torch.bfloat16
ALONE = [5, 1, 40, 33, 300, 2, 40, 17, 129, 128]
SCALING = 0.3
eager = inspect.unwrap(modeling_llama.eager_attention_forward)


def pieces_of(lengths, prompts=()):
    """One after the other; ``prompts``: the number of the piece that is the prompt of a piece."""
    found = []
    for i, length in enumerate(lengths):
        start = found[-1].start + found[-1].length if found else 0
        found.append(Piece(start, length, found[prompts[i]] if i in prompts else None))
    return found


def row_of(lengths, prompts=(), dtype=F32, num_more=7):
    return Row(pieces_of(lengths, dict(prompts)), sum(lengths) + num_more, dtype)


def states_of(row, key_heads=2, repeats=3, width=16, value_width=16):
    torch.manual_seed(0)
    widths = (key_heads * repeats, width), (key_heads, width), (key_heads, value_width)
    return [torch.randn(1, row.num_tokens, heads, w, dtype=row.dtype).transpose(1, 2).requires_grad_()
            for heads, w in widths]  # fmt: skip


def mask_of_pieces(row):
    """[1, 1, N, N] for the model's function: what no piece sees is hidden, others see themselves."""
    sees = torch.eye(row.num_tokens, dtype=torch.bool)
    for piece in row.pieces:
        own = slice(piece.start, piece.start + piece.length)
        sees[own, own] = torch.ones(piece.length, piece.length, dtype=torch.bool).tril()
        if piece.prompt:
            sees[own, piece.prompt.start : piece.prompt.start + piece.prompt.length] = True
    return torch.zeros(sees.shape, dtype=row.dtype).masked_fill(~sees, torch.finfo(row.dtype).min)[None, None]


def in_groups(row, states):
    return attention._InGroups.apply(*states, row, SCALING)


def whole(row, states):
    module = SimpleNamespace(num_key_value_groups=states[0].shape[1] // states[1].shape[1], training=False)
    return eager(module, *states, mask_of_pieces(row), SCALING)[0]


def result_and_gradients(function, row, states):
    result = function(row, states)[:, : row.num_real]
    weights = torch.linspace(-1, 1, result.numel(), dtype=F32).view_as(result).to(row.dtype)
    return [result.detach(), *torch.autograd.grad((result * weights).sum(), states)]


CASES = {
    "alone": (ALONE, {}),
    "one token": ([1], {}),
    "answers of a prompt": ([50, 3, 40, 300, 40, 7, 20, 31], {1: 0, 2: 0, 3: 0, 4: 0, 6: 5, 7: 5}),
    "an answer of its own": ([50, 3], {1: 0}),
}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("heads", [(1, 1, 8, 8), (2, 3, 16, 16), (3, 1, 16, 24)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_result_and_gradients_are_the_models_own(case, heads, dtype):
    row = row_of(*CASES[case], dtype=dtype)
    states = states_of(row, *heads)
    found, expected = (result_and_gradients(f, row, states) for f in (in_groups, whole))
    exact = found
    if dtype == BF16:  # which of two roundings is nearer to the truth is not asked
        wide = Row(row.pieces, row.num_tokens, F32)
        exact = result_and_gradients(whole, wide, [x.detach().float().requires_grad_() for x in states])
    for ours, theirs, truth in zip(found, expected, exact, strict=True):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        if dtype == F32:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
        else:
            error, known = ((x.float() - truth).norm() for x in (ours, theirs))
            assert error <= 1.2 * known + 1e-3 * truth.norm()


def test_no_other_piece_and_nothing_that_fills_is_seen():
    row = row_of(ALONE)
    states = states_of(row)
    expected = result_and_gradients(in_groups, row, states)
    piece = row.pieces[3]
    own = slice(piece.start, piece.start + piece.length)
    with torch.no_grad():
        for x in states:
            x[:, :, : own.start] += 3.0
            x[:, :, own.stop :] *= -2.0
    found = result_and_gradients(in_groups, row, states)
    assert torch.equal(found[0][:, own], expected[0][:, own])
    assert all(torch.equal(a[:, :, own], b[:, :, own]) for a, b in zip(found[1:], expected[1:], strict=True))
    assert not torch.equal(found[0], expected[0])


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_no_piece_have_and_give_no_gradient(case):
    row = row_of(*CASES[case])
    result = in_groups(row, states := states_of(row))
    assert not result[:, row.num_real :].any()
    result.sum().backward()
    assert all(x.grad.abs().sum(-1)[:, :, : row.num_real].all() or x is not states[2] for x in states)
    assert not any(x.grad[:, :, row.num_real :].any() for x in states)


def test_nothing_of_tokens_times_tokens_is_kept():
    row = row_of([700, 500])
    states = states_of(row)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        in_groups(row, states)
    assert sum(x.numel() for x in kept) == sum(x.numel() for x in states)
    largest = max(x.queries_PQ.shape[1] * x.keys_PK.numel() for x in row.groups)
    assert largest <= max(attention._GROUP_PAIRS, attention._BLOCK * 704)


def test_pieces_of_about_one_length_are_taken_together():
    row = row_of([33, 60, 50, 64, 20, 5, 400])
    shapes = [(tuple(x.queries_PQ.shape), x.keys_PK.shape[1]) for x in row.groups]
    assert shapes == [((2, 32), 32), ((1, 32), 416), ((4, 64), 64), ((1, 128), 128), ((1, 128), 256), ((1, 128), 384)]


def test_a_backward_under_autocast_keeps_the_precision_of_the_forward():
    row = row_of(ALONE)
    states = states_of(row)
    expected = result_and_gradients(in_groups, row, states)[1:]
    result = in_groups(row, states)[:, : row.num_real]
    weights = torch.linspace(-1, 1, result.numel()).view_as(result)
    with torch.autocast("cpu", dtype=BF16):
        found = torch.autograd.grad((result * weights).sum(), states)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_kernel_from_a_hub_in_place_of_the_function_is_not_llamas():
    home = SimpleNamespace(eager_attention_forward=torch.nn.Identity())
    assert not are_llamas(home, "eager_attention_forward") and are_llamas(modeling_llama, "eager_attention_forward")


def built(kind, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=90, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, bos_token_id=None, eos_token_id=1, pad_token_id=0, **options,
    )  # fmt: skip
    return transformers.AutoModel.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "Granite", "Cohere", "Phi3", "Gemma", "Gemma2"])
def test_architectures_whose_attention_is_llamas(monkeypatch, kind):
    """Groups are taken where the function is Llama's, before it was wrapped and after; elsewhere it is asked itself."""
    model = built(kind)
    known = keeps_no_probabilities(model)
    let_attention_read_rows(model)
    assert keeps_no_probabilities(model) == known == (kind != "Gemma2")
    calls = []
    apply = attention._InGroups.apply
    monkeypatch.setattr(attention._InGroups, "apply", lambda *given: calls.append(1) or apply(*given))
    row = row_of([5, 9, 3])
    ids = torch.arange(1, row.num_tokens + 1)[None]
    positions = torch.cat([torch.arange(n) for n in (5, 9, 3, 7)])[None]
    with torch.no_grad():
        found = model(ids, attention_mask=row.mask, position_ids=positions, use_cache=False, **{ROW: row})
        alone = model(ids[:, 5:14], use_cache=False).last_hidden_state
    torch.testing.assert_close(found.last_hidden_state[:, 5:14], alone, rtol=1e-4, atol=1e-4)
    assert len(calls) == (2 if known else 0)


def test_a_mask_that_the_model_has_changed_and_dropout_ask_the_models_own_function(monkeypatch):
    model = built("Llama")
    let_attention_read_rows(model)
    monkeypatch.setattr(attention._InGroups, "apply", lambda *_: pytest.fail("in groups"))
    row = row_of([5, 9, 3])
    function = modeling_llama.eager_attention_forward
    module = SimpleNamespace(num_key_value_groups=3, training=False)
    states = states_of(row)
    expected = whole(row, states)[:, : row.num_real]
    for mask, dropout in ((row.mask.clone(), 0.0), (row.mask, 0.1)):
        found = function(module, *states, mask, scaling=SCALING, dropout=dropout, **{ROW: row})[0]
        torch.testing.assert_close(found[:, : row.num_real], expected, rtol=1e-5, atol=1e-5)
    assert row.num_real == 17
