"""How hidden states become logits, read from a transformers model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from heedful.errors import ModelError

_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@dataclass(frozen=True)
class Head:
    """softcap · tanh(logit_scale · (W h + b) / softcap)."""

    weight_VD: Tensor
    bias_V: Tensor | None
    logit_scale: float
    softcap: float | None


def read_head(base: Any) -> Head:
    """The output layer of a language model as it is now.

    Raises:
        ModelError: it has none.
    """
    layer = base.get_output_embeddings()
    if layer is None:
        raise ModelError(f"{type(base).__name__} has no output embedding; this architecture is not supported")
    config = base.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere multiplies, Granite divides
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = next((c for name in _SOFTCAPS if (c := getattr(config, name, None)) is not None), None)
    return Head(layer.weight, getattr(layer, "bias", None), scale, softcap)
