"""Whether rankings may be packed on a model, and how wide rows weigh on it."""

from __future__ import annotations

import math

import torch
from torch import nn

from heedful.batches import to_device
from heedful.data.collate import ranking_batch
from heedful.data.packing import attention_tokens_of
from heedful.data.tokenise import RankingSample
from heedful.models.parts import ScalarModel


def attention_tokens(model: ScalarModel) -> float | None:
    """As :func:`~heedful.data.packing.attention_tokens_of`, for :func:`~heedful.data.packing.ranking_rows`; None where
    rankings cannot be packed on this model, infinite where wide rows cost nothing, being computed in pieces."""
    if not _can_pack(model):
        return None
    if model.can_be_ragged(with_prompts=True):
        return math.inf
    config = model.base.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    embeddings = {id(p) for m in model.base.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    num_weights = sum(p.numel() for p in model.base.parameters() if id(p) not in embeddings)
    return attention_tokens_of(num_weights, config.num_hidden_layers, width)


@torch.no_grad()
def _can_pack(model: ScalarModel) -> bool:
    """Whether answers come out of packed rows, prompts shared, as they do alone: tried on three small rankings."""
    config = model.base.config.get_text_config()
    if config._attn_implementation.startswith("flash") or getattr(config, "sliding_window", None) is not None:
        return False  # those kernels take no mask of this shape; a window would count the other answers
    size = config.vocab_size
    samples = []
    # two rows: the second ranking, and the first next to the third
    for prompt, answers in (([3], ([1], [5, 9])), ([2, 6], ([5, 3, 5, 8, 9],)), ([7], ([9], [3]))):
        sequences = [[id % size for id in prompt + answer] for answer in answers]
        places = list(range(len(sequences)))
        samples.append(RankingSample("", "", sequences, places, [str(k) for k in places], len(prompt), places))
    batches = [to_device(ranking_batch(samples, model.pad_id, attention_tokens=n), model.device) for n in (None, 1e3)]
    alone, packed = (model.ranking_scores(batch)[batch.mask_PK] for batch in batches)
    return bool((alone - packed).abs().max() <= model.rounding * alone.abs().max())
