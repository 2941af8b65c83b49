"""Frozen float32 weights that every forward casts to the compute precision, held as those casts.

Autocast casts the operands of matrix products and nothing else. Of a weight that is never trained the cast is all that
is ever read: to keep it is the same arithmetic to the last bit, in half the memory, without a cast at every forward.
Embeddings, norms, biases and score heads are read in float32 and stay so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heedful.models.frozen import is_frozen_product
from heedful.models.hardware import release_memory
from heedful.models.lora import is_adapted
from heedful.models.parts import LanguageModel, Part


@torch.no_grad()
def keep_casts(part: Part) -> None:
    """Hold the frozen matrix products of a part's trunk, and an untied output layer, in its compute dtype, in place.

    Nothing changes where that is float32, nor under adapters: what they are merged into is saved. The part's model must
    be saved no more, and whatever needs its float32 weights (int8 is made from them) must come before.
    """
    if part.dtype.itemsize >= torch.float32.itemsize or part.adapters is not None or is_adapted(part.model):
        return
    products = _cast_by_forward(part)
    if isinstance(part, LanguageModel) and is_frozen_product(part.base.get_output_embeddings()):
        products.append(part.base.get_output_embeddings())  # log-probs cast it themselves
    others = set(part.base.modules()).difference(products)
    elsewhere = {id(p) for module in others for p in module.parameters(recurse=False)}
    for layer in products:
        if layer.weight.dtype == torch.float32 and id(layer.weight) not in elsewhere:
            layer.weight.data = layer.weight.data.to(part.dtype)
    release_memory()


def _cast_by_forward(part: Part) -> list[Any]:
    """The layers of the trunk that autocast acts on, as a forward shows: some models switch it off for a few."""
    is_cast: dict[nn.Module, bool] = {}

    def note(layer: nn.Module, _: Any, output: Tensor) -> None:
        is_cast[layer] = is_cast.get(layer, True) and output.dtype == part.dtype

    hooks = [m.register_forward_hook(note) for m in part.base.base_model.modules() if is_frozen_product(m)]
    if hooks:
        part.hidden_after(torch.zeros(1, 2, dtype=torch.int64, device=part.device))
    for hook in hooks:
        hook.remove()
    return [layer for layer, cast in is_cast.items() if cast]
