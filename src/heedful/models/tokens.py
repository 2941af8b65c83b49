"""End and pad tokens: the one that closes a turn, and one that stands for nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from heedful.errors import ModelError

PAD_TOKEN = "<|pad|>"
# In order of preference: made for padding; kept free on purpose; a padding mark of another task; meaningless in a chat.
_FREE_NAMES = (
    r"^\W*(finetune_)?(right_|left_)?pad(_id|_token)?\W*$",
    r"reserved|unused|placeholder|dummy|extra_id",
    r"pad\b|_pad",
    r"empty",
)
_OTHER_MEDIA = re.compile(r"image|vision|video|audio|speech", re.IGNORECASE)


def end_of_turn_id(tokenizer: Any) -> int | None:
    """The id that the chat template writes after an assistant's words; without a template, the end of text."""
    if tokenizer.chat_template:
        from heedful.data.chat import end_token_ids

        return end_token_ids(tokenizer)[0]
    return None if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)


def num_ids(tokenizer: Any) -> int:
    """Embedding rows that the tokenizer needs: its largest id + 1 (vocabularies may have holes)."""
    return int(max(tokenizer.get_vocab().values())) + 1


def end_ids(tokenizer: Any, model: Any = None) -> tuple[int, ...]:
    """Every id that ends an answer, the template's end of turn first, then those of tokenizer, model and generation."""
    found: list[int | None] = [end_of_turn_id(tokenizer), tokenizer.eos_token_id]
    if model is not None:
        for holder in (getattr(model, "generation_config", None), model.config.get_text_config()):
            ids = getattr(holder, "eos_token_id", None)
            found += ids if isinstance(ids, (list, tuple)) else [ids]
    return tuple(dict.fromkeys(int(id) for id in found if id is not None))


def ensure_pad(tokenizer: Any, model: Any = None, *, more_ends: Sequence[int] = ()) -> int:
    """Give tokenizer and model a pad token that is no end token, and let all their configs agree; returns its id.

    A pad that already differs from every end token stays. Else a special token that no chat uses becomes the pad (for
    SmolLM2, whose pad is its end token: ``<empty_output>``). Else ``<|pad|>`` is added, in a spare row of the embedding
    or, when there is none, in a new row with the mean of the others.

    With a model, config and generation config get the pad id and every end id, the template's end of turn included;
    the tokenizer's own end token becomes the end of turn too, unless the template prints ``eos_token`` itself.

    Args:
        more_ends: end ids that a model not at hand has.
    """
    ends = tuple(dict.fromkeys((*end_ids(tokenizer, model), *more_ends)))
    template = str(tokenizer.chat_template or "")
    turn = end_of_turn_id(tokenizer)
    if turn is not None and turn != tokenizer.eos_token_id and "eos_token" not in template:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(turn)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in ends or tokenizer.pad_token in template:
        free = _free_token(tokenizer, ends, template)
        if free is None:
            tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
        else:
            tokenizer.pad_token = free
    if model is not None:
        _grow(tokenizer, model)
        agree(tokenizer, model, ends)
    return int(tokenizer.pad_token_id)


def _free_token(tokenizer: Any, ends: tuple[int, ...], template: str) -> str | None:
    taken = {*ends, tokenizer.bos_token_id, tokenizer.unk_token_id}
    free = [
        str(token.content)
        for id, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special
        and id not in taken
        and token.content not in template
        and not _OTHER_MEDIA.search(token.content)
    ]
    for pattern in _FREE_NAMES:
        for name in free:
            if re.search(pattern, name, re.IGNORECASE):
                return name
    return None


def _grow(tokenizer: Any, model: Any) -> None:
    """Add embedding rows for ids that have none; tied input and output stay tied (resize ties them again)."""
    import torch

    rows = model.get_input_embeddings().weight.shape[0]
    if num_ids(tokenizer) <= rows:
        return
    model.resize_token_embeddings(num_ids(tokenizer), mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            if layer is not None:
                layer.weight[rows:] = layer.weight[:rows].float().mean(0).to(layer.weight.dtype)
                if getattr(layer, "bias", None) is not None:
                    layer.bias[rows:] = layer.bias[:rows].mean()


def agree(tokenizer: Any, model: Any, ends: tuple[int, ...] | None = None) -> None:
    """Write the tokenizer's pad and all end ids into the model's config and generation config.

    Raises:
        ModelError: the tokenizer has ids beyond the embedding.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    if num_ids(tokenizer) > rows:
        raise ModelError(f"the tokenizer has {num_ids(tokenizer)} ids but the model's embedding only {rows} rows")
    ends = ends or end_ids(tokenizer, model)
    value = list(ends) if len(ends) > 1 else (ends[0] if ends else None)
    holders = [model.config, model.config.get_text_config(), getattr(model, "generation_config", None)]
    for holder in holders:
        if holder is not None:
            holder.pad_token_id = tokenizer.pad_token_id
            holder.eos_token_id = value
    # An embedding row marked as padding gets no gradient: with pad = end token that froze the end token's input row.
    embedding = model.get_input_embeddings()
    if getattr(embedding, "padding_idx", None) is not None:
        embedding.padding_idx = tokenizer.pad_token_id
