"""Activation checkpointing: layers keep their inputs for the backward pass and compute the rest again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from heedful.errors import ModelError
from heedful.models.hardware import keep_large_tensors_off_the_heap
from heedful.models.lora import Adapters
from heedful.models.parts import Part


def recompute_activations(part: Part) -> int:
    """Let every layer of the part be computed again in the backward pass; returns the number of layers.

    Less memory, about a third more time, the same gradients. Forwards without gradients stay as they are.
    transformers' own switch acts in training mode only, and our models stay in evaluation mode.

    Raises:
        ModelError: the architecture does not say what its layers are.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in part.base.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(part.base).__name__} does not support activation checkpointing; set activation_checkpointing: false"
        )
    if part.device.type == "cpu":
        keep_large_tensors_off_the_heap()
    for layer in layers:
        if "forward" not in vars(layer):  # else it is wrapped already
            # forward, not __call__: hooks on the layer then run once, not again in the backward
            layer.forward = _recomputed(layer.forward, part.adapters)
    return len(layers)


def _recomputed(forward: Callable[..., Any], adapters: Adapters | None) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if adapters is not None:  # the backward may come when those of another part act
            names = tuple(adapters.now)
            kwargs["context_fn"] = lambda: (nullcontext(), adapters.acting(names))
        # nothing in our models is random (dropout is silenced), so no generator state needs to be kept
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
