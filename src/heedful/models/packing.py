"""Whether rankings may be packed on a model, and how wide rows weigh on it."""

from __future__ import annotations

import torch
from torch import nn

from heedful.batches import to_device
from heedful.data.collate import ranking_batch
from heedful.data.tokenise import RankingSample
from heedful.models.parts import ScalarModel

_SLOWER = 2
"""Attention's multiply-adds take this many times longer than others. SmolLM2-135M on a CPU, rows of 128 to 768 tokens:
2.7 (eager, bf16), 1.6 (eager, float32), 1.8 (sdpa, bf16), 1.1 (sdpa, float32); a wrong guess costs little"""


def attention_tokens(model: ScalarModel) -> float | None:
    """Length of a row at which attention takes as long as the rest of the model, for
    :func:`~heedful.data.packing.ranking_rows`; None where rankings cannot be packed on this model.

    In a row of W tokens, attention of width A takes 2 · W · A multiply-adds per token and layer, the rest of the model
    one per weight. It follows from the shape of the model alone, so that the same data give the same rows anywhere.
    """
    if not _can_pack(model):
        return None
    config = model.base.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    embeddings = {id(p) for m in model.base.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    num_weights = sum(p.numel() for p in model.base.parameters() if id(p) not in embeddings)
    return float(num_weights / (2 * config.num_hidden_layers * width) / _SLOWER)


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
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.05
    return bool((alone - packed).abs().max() <= tolerance * alone.abs().max())
