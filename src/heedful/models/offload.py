"""Frozen models that wait in main memory and come to the GPU to be read.

A PPO step reads its reward models and its reference in one of three phases, the scoring. With ``ppo.offload_frozen``
the rollout and the updates have their room. What is frozen never changes, so it goes home once, when it is built, and
sending it away again is to forget the copy. It comes back on a stream of its own, what lies outside of the layers first
and then layer by layer, and a layer waits for its own weights alone: the first compute while the last are on their way.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from heedful.models.hardware import release_memory
from heedful.models.parts import Part


@final
class Offloaded:
    """One frozen part, away until it is read.

    A forward brings it by itself; what reads weights without one (an output layer) calls :meth:`arrive` before. It
    stays until :meth:`send_away`.
    """

    def __init__(self, part: Part) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        trunk, seen = part.base.base_model, set[Tensor]()
        layers = [module for module in trunk.modules() if isinstance(module, GradientCheckpointingLayer)]
        of_layers = [_Group(_tensors(layer, seen), part.device) for layer in layers]
        self._outside = _Group(_tensors(part.model, seen), part.device)
        self._groups = [self._outside, *of_layers]
        self._device = part.device
        self._stream = torch.cuda.Stream(part.device) if part.device.type == "cuda" else None
        trunk.register_forward_pre_hook(lambda *_: self.arrive())
        for layer, group in zip(layers, of_layers, strict=True):
            layer.register_forward_pre_hook(partial(_wait_for, group))
        self.is_here = True
        self.send_away()

    @property
    def num_bytes(self) -> int:
        """Of all its weights."""
        return sum(home.nbytes for group in self._groups for _, home in group.tensors)

    @torch.inference_mode(False)
    def fetch(self) -> None:
        """Start to bring the weights, in the order in which a forward reads them; nothing waits for them yet."""
        if self.is_here:
            return
        self.is_here = True
        for group in self._groups:  # room is given by the stream that computes and will give it to others again
            group.make_room()
        with self._aside():
            for group in self._groups:
                group.copy()

    def arrive(self, *, whole: bool = False) -> None:
        """What lies outside of the layers can be read when this returns, or the ``whole``."""
        self.fetch()
        for group in self._groups if whole else [self._outside]:
            group.wait()

    @torch.inference_mode(False)
    def send_away(self) -> None:
        """Forget the copies on the device."""
        if not self.is_here:
            return
        for group in self._groups:
            group.wait()  # room under a copy that is still on its way must not go to anybody else
            group.forget()
        self.is_here = False

    def _aside(self) -> AbstractContextManager[Any]:
        """The stream that copies; what the computing stream has been given so far may still use the room."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


class _Group:
    """Weights that travel together."""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        self.tensors = [(tensor, _home(tensor)) for tensor in tensors]
        """Those of the model, each with its values in main memory"""
        self._device = device
        self._arrived: torch.cuda.Event | None = None

    def make_room(self) -> None:
        for tensor, home in self.tensors:
            tensor.data = torch.empty_like(home, device=self._device, pin_memory=False)

    def copy(self) -> None:
        for tensor, home in self.tensors:
            tensor.data.copy_(home, non_blocking=True)
        if self._device.type == "cuda":
            self._arrived = torch.cuda.current_stream(self._device).record_event()

    def wait(self) -> None:
        """The stream that computes goes on when the weights are there."""
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
            self._arrived = None

    def forget(self) -> None:
        for tensor, _ in self.tensors:
            tensor.data = tensor.data.new_empty(0)


@final
class Offload:
    """All frozen models of a run that wait in main memory."""

    def __init__(self, device: torch.device, *, wanted: bool) -> None:
        """Nothing is moved where the device's memory is main memory, whatever is ``wanted``."""
        self.acts = wanted and is_apart(device)
        self._parts: list[Offloaded] = []

    def take(self, part: Part) -> Offloaded | None:
        """Send a frozen part home; None where nothing is moved."""
        if not self.acts:
            return None
        self._parts.append(Offloaded(part))
        release_memory()
        return self._parts[-1]

    def fetch(self) -> None:
        """Start to bring them all: reward models first, which a step reads first; the reference was built before."""
        for part in reversed(self._parts):
            part.fetch()

    def restore(self) -> None:
        """All are here when this returns, for whoever looks at weights without a forward."""
        for part in self._parts:
            part.arrive(whole=True)

    def send_away(self) -> None:
        """Let the device have their memory."""
        for part in self._parts:
            part.send_away()

    @property
    def num_bytes(self) -> int:
        """Of main memory that they hold."""
        return sum(part.num_bytes for part in self._parts)

    def __str__(self) -> str:
        if not self.acts:
            return "nothing is moved, since this device computes in main memory"
        return f"{len(self._parts)} models of {self.num_bytes / 2**30:.2f} GiB wait in main memory"


def is_apart(device: torch.device) -> bool:
    """Whether the device has a memory of its own."""
    return device.type == "cuda"


def _tensors(module: Any, seen: set[Tensor]) -> list[Tensor]:
    """Parameters and buffers that are not in ``seen`` yet."""
    found = [tensor for tensor in [*module.parameters(), *module.buffers()] if tensor not in seen]
    seen.update(found)
    return found


def _home(tensor: Tensor) -> Tensor:
    """A copy in main memory, from and to which a GPU copies on its own (page-locked)."""
    home = tensor.detach().to("cpu", copy=True)
    return home.pin_memory() if tensor.device.type == "cuda" else home


def _wait_for(group: _Group, *_: Any) -> None:
    group.wait()
