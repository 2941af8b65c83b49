"""Low-rank adapters: adding them, telling adapted models apart, and merging them without touching the live model."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from heedful.errors import ModelError
from heedful.models.frozen import FrozenLinear

_NO_ADAPTER = "no adapter"


@final
@dataclass(frozen=True)
class Adapters:
    """Which adapters one part computes with, on a model that it shares with other parts.

    Every layer of the model reads what acts from one and the same list, so that a switch is one assignment. PEFT visits
    all layers for it (a tenth of a second where there are 210), makes trainable what it activates and freezes the rest.
    """

    names: tuple[str, ...]
    """No name for the base alone"""
    now: list[str]
    """What acts at the moment, of all parts of the model (see :func:`one_list`)"""

    @contextmanager
    def acting(self, names: Sequence[str] | None = None) -> Iterator[None]:
        """Inside, these adapters (or ``names``) act and no others."""
        before = self.now[:]
        # a name that no layer knows, since a kept head takes none for the first one
        self.now[:] = (self.names if names is None else names) or (_NO_ADAPTER,)
        try:
            yield
        finally:
            self.now[:] = before

    def own(self, parameter: str) -> bool:
        """Whether the parameter of this name is in one of them, or in no adapter, as a head is."""
        adapter = adapter_of(parameter)
        return adapter is None or adapter in self.names


def adapter_of(parameter: str) -> str | None:
    """The adapter that a parameter is part of, by its name (….lora_A.NAME.weight)."""
    words = parameter.split(".")
    return next((words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("lora_")), None)


def one_list(model: Any) -> list[str]:
    """Let every layer with adapters read what acts from one list, which is returned; at rest all is as it was.

    PEFT's own set_adapter and disable_adapter give every layer a list of its own again: they must not be called then.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    layers = [m for m in model.modules() if isinstance(m, (LoraLayer, AuxiliaryTrainingWrapper))]
    found = layers[0]._active_adapter
    if isinstance(found, list) and all(layer._active_adapter is found for layer in layers):
        return found  # another part has done it
    now = [str(model.active_adapter)]
    for layer in layers:
        layer._active_adapter = now
    return now


def is_adapted(model: Any) -> bool:
    """A PEFT model? Asked without importing peft, which takes a second."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def base_of(model: Any) -> Any:
    """The transformers model inside, whose layers carry the adapters if there are any."""
    return model.base_model.model if is_adapted(model) else model


def add_lora(
    model: Any,
    *,
    rank: int,
    alpha: float,
    targets: str | Sequence[str] = "all-linear",
    task: Literal["causal", "scalar"],
) -> Any:
    """Freeze the model and put float32 adapters on it; the update of a weight is (alpha / rank) · B · A.

    The scalar head is trained fully (and saved with the adapter), since it is new or is what the values hang on.

    Args:
        targets: "all-linear" (all but the head), or module names, as a list or comma-separated.

    Raises:
        ModelError: no module of that name, or the output layer of a language model.
    """
    import peft
    from peft.tuners.lora import LoraLayer
    from transformers.pytorch_utils import Conv1D

    from heedful.models.load import HEAD_NAMES

    if isinstance(targets, str) and targets != "all-linear":
        targets = [name.strip() for name in targets.split(",")]
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # declared int, used as a number
        target_modules=targets if isinstance(targets, str) else list(targets),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2 keeps weights transposed
        task_type="CAUSAL_LM" if task == "causal" else "SEQ_CLS",
        # PEFT adds the head by itself for SEQ_CLS, but a dropped head would only show after reloading
        modules_to_save=None if task == "causal" else [n for n in HEAD_NAMES if n in dict(model.named_children())],
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name that is to go
            adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=True)
    except ValueError as error:
        raise ModelError(f"LoRA targets {targets!r} do not fit {type(model).__name__} ({error})") from error
    if task == "causal" and isinstance(model.get_output_embeddings(), LoraLayer):
        raise ModelError(
            f"LoRA targets {targets!r} name the output layer, whose weights log-probs are computed from without "
            f"adapters; leave it out"
        )
    return adapted.eval()


def _adapted_layers(model: Any) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in base_of(model).named_modules() if isinstance(module, LoraLayer)}


def num_merged(model: Any) -> int:
    """How many weights of the model carry an active adapter; 0 for a model without adapters."""
    if not is_adapted(model):
        return 0
    return sum(any(a in layer.scaling for a in layer.active_adapters) for layer in _adapted_layers(model).values())


@torch.no_grad()
def merged_state(
    model: Any, *, dtype: torch.dtype | None = None, originals: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every weight under the name it has in the plain model, W + (alpha / rank) · B · A where there is an adapter.

    The sum is made in float32 and rounded once, to ``dtype`` (None: the base weight's own). The live model is not
    touched; one merged weight exists at a time. A model without adapters gives its state as it is.

    Args:
        originals: the weights that layers in few bits were made from, by their names in the plain model; None takes the
            weights that such layers compute with, in float32 where ``dtype`` is None.

    Raises:
        ModelError: an adapted model none of whose weights would be changed (wrong adapter, wrong names), or originals
            of which some layer in few bits was not made.
    """
    if not is_adapted(model):
        for name, tensor in model.state_dict().items():
            yield name, _cast(tensor, dtype)
        return
    if num_merged(model) == 0:
        raise ModelError("the adapter changes no weight of this model: 0 tensors would be merged")
    layers = _adapted_layers(model)
    rounded = {name: m for name, m in base_of(model).named_modules() if isinstance(m, FrozenLinear)}
    for name, tensor in base_of(model).state_dict().items():
        plain = _plain_name(name, model)
        module, _, last = name.rpartition(".")
        if plain is None or (module in rounded and last == "scale"):
            continue
        if module in rounded and last == "weight":
            tensor = _float_weight(rounded[module], plain, originals)
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        if layer is not None and name.endswith(".base_layer.weight"):
            merged = tensor.float()
            for adapter in layer.active_adapters:
                if adapter in layer.scaling:
                    merged = merged + layer.get_delta_weight(adapter).float()
            tensor = merged.to(dtype or tensor.dtype)
        yield plain, _cast(tensor, dtype)


def _float_weight(layer: FrozenLinear, name: str, originals: Mapping[str, Tensor] | None) -> Tensor:
    if originals is None:
        return layer.dequantised()
    if name not in originals or not layer.is_made_of(originals[name]):
        raise ModelError(f"{name} is not what the rounded weights were made of; is the base in another folder?")
    return originals[name].to(layer.weight.device)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _plain_name(name: str, model: Any) -> str | None:
    """The name in the plain model, None for tensors that only the adapted model has."""
    adapter = model.active_adapter
    if ".lora_" in name or ".original_module." in name:
        return None
    if ".modules_to_save." in name:
        before, _, after = name.partition(".modules_to_save.")
        return f"{before}.{after.removeprefix(adapter + '.')}" if after.startswith(adapter + ".") else None
    return name.replace(".base_layer.", ".")
