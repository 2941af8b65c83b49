"""Frozen models that wait outside of the device's memory and come back to be read.

A PPO step reads its reward models and its reference in one of three phases, the scoring. With ``ppo.offload_frozen``
the rollout and the updates have their room. What is frozen never changes, so it goes home once, when it is built, and
sending it away again is to forget the copy.

    GPU   home is page-locked main memory. Weights come on a stream of their own, what lies outside of the layers first
          and then layer by layer, and a layer waits for its own alone: the first compute while the last are on the way
    CPU   home is a file without a name. Weights are mapped from it, not copied; what was read of it stays in the
          system's cache of files while nobody needs that memory more
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import IO, Any, Protocol, final

import torch
from torch import Tensor

from heedful.errors import ModelError
from heedful.models.cache import cache_folder
from heedful.models.hardware import release_memory
from heedful.models.parts import Part

BLOCK_BYTES = 2**30
"""Of main memory that is page-locked at once. torch rounds each such piece up to a power of two: a third of the weights
of a Llama, were every tensor one of its own."""


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
        tensors = [_tensors(layer, seen) for layer in layers]
        homes = _homes([*tensors, _tensors(part.model, seen)], part.device)
        *of_layers, self._outside = (_Group(pairs, part.device) for pairs in homes)
        self._groups = [self._outside, *of_layers]
        self._device, self.is_apart = part.device, is_apart(part.device)
        self._stream = torch.cuda.Stream(part.device) if part.device.type == "cuda" else None
        trunk.register_forward_pre_hook(lambda *_: self.arrive())
        for layer, group in zip(layers, of_layers, strict=True):
            layer.register_forward_pre_hook(partial(_wait_for, group))
        self.is_here = True
        self.send_away()

    @property
    def num_bytes(self) -> int:
        """Of all its weights."""
        return sum(home.num_bytes for group in self._groups for _, home in group.tensors)

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


class _Home(Protocol):
    """The values of a tensor while it is away."""

    num_bytes: int

    def room(self, device: torch.device) -> Tensor:
        """A tensor for them on the device."""
        ...

    def copy_to(self, room: Tensor) -> None:
        """Start to copy them, where they are not there already."""
        ...


class _Locked:
    """In page-locked main memory, which a GPU reads on its own."""

    def __init__(self, tensor: Tensor, room: Tensor) -> None:
        self._values, self.num_bytes = room.copy_(tensor.detach()), room.nbytes

    def room(self, device: torch.device) -> Tensor:
        return torch.empty(self._values.shape, dtype=self._values.dtype, device=device)

    def copy_to(self, room: Tensor) -> None:
        room.copy_(self._values, non_blocking=True)


class _Mapped:
    """In a file, at a place of its own."""

    def __init__(self, file: IO[bytes], tensor: Tensor) -> None:
        """Raises ModelError when the file cannot be written."""
        values = tensor.detach().cpu().contiguous()
        self._file, self._shape, self._dtype, self.num_bytes = file, values.shape, values.dtype, values.nbytes
        self._start = -(-file.seek(0, os.SEEK_END) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        file.seek(self._start)
        try:
            file.write(values.reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
        except OSError as error:
            raise ModelError(f"offload_frozen: {cache_folder()}: {error.strerror or error}; free some disk, set "
                             "HEEDFUL_CACHE to another folder, or leave ppo.offload_frozen out") from error  # fmt: skip

    def room(self, device: torch.device) -> Tensor:
        """On a CPU the values themselves: the file's pages, of which a write would make copies."""
        return self._values() if device.type == "cpu" else torch.empty(self._shape, dtype=self._dtype, device=device)

    def copy_to(self, room: Tensor) -> None:
        if room.device.type != "cpu":
            room.copy_(self._values())

    def _values(self) -> Tensor:
        pages = mmap.mmap(self._file.fileno(), self.num_bytes, access=mmap.ACCESS_COPY, offset=self._start)
        return torch.frombuffer(pages, dtype=self._dtype).view(self._shape)  # unmapped with the last tensor on them


def _new_file() -> IO[bytes]:
    """One that ends with the process, where models are kept: temporary folders may be in main memory."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder)
    except OSError as error:
        raise ModelError(f"offload_frozen: {folder}: {error.strerror or error}; set HEEDFUL_CACHE to a folder that can "
                         "be written") from error  # fmt: skip


class _Group:
    """Weights that travel together."""

    def __init__(self, tensors: Sequence[tuple[Tensor, _Home]], device: torch.device) -> None:
        """``tensors`` are those of the model, each with its values at home."""
        self.tensors, self._device = tensors, device
        self._arrived: torch.cuda.Event | None = None

    def make_room(self) -> None:
        for tensor, home in self.tensors:
            tensor.data = home.room(self._device)

    def copy(self) -> None:
        for tensor, home in self.tensors:
            home.copy_to(tensor.data)
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

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._parts: list[Offloaded] = []

    def take(self, part: Part) -> Offloaded | None:
        """Send a frozen part home; None where that is not wanted.

        Raises:
            ModelError: there is no room for it.
        """
        if not self._wanted:
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
        """Let the others have their memory."""
        for part in self._parts:
            part.send_away()

    @property
    def num_bytes(self) -> int:
        """Of them all."""
        return sum(part.num_bytes for part in self._parts)

    def __str__(self) -> str:
        where = "in main memory" if self._parts and self._parts[0].is_apart else "in a file"
        return f"{len(self._parts)} models of {self.num_bytes / 2**30:.2f} GiB wait {where}"


def zeros_at_home(like: Sequence[Tensor]) -> list[Tensor]:
    """Zeros in main memory of the shapes and types given, views of a few blocks, page-locked for a GPU."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in like):
        these = [(i, x) for i, x in enumerate(like) if x.dtype == dtype]
        missing = sum(x.numel() for _, x in these)
        rooms: list[Tensor] = []  # what is left of each block
        for i, x in these:
            n = x.numel()
            place = next((k for k, room in enumerate(rooms) if len(room) >= n), len(rooms))
            if place == len(rooms):
                size = max(n, min(BLOCK_BYTES // x.itemsize, missing))
                rooms.append(torch.zeros(size, dtype=dtype, pin_memory=x.device.type == "cuda"))
            found[i], rooms[place] = rooms[place][:n].view(x.shape), rooms[place][n:]
            missing -= n
    return [found[i] for i in range(len(like))]


def is_apart(device: torch.device) -> bool:
    """Whether the device has a memory of its own."""
    return device.type == "cuda"


def _tensors(module: Any, seen: set[Tensor]) -> list[Tensor]:
    """Parameters and buffers that are not in ``seen`` yet."""
    found = [x for x in [*module.parameters(), *module.buffers()] if x not in seen and x.numel()]
    seen.update(found)
    return found


def _homes(groups: Sequence[list[Tensor]], device: torch.device) -> list[list[tuple[Tensor, _Home]]]:
    """Every tensor with its values where they wait."""
    if is_apart(device):
        rooms = iter(zeros_at_home([x.detach() for tensors in groups for x in tensors]))
        return [[(x, _Locked(x, next(rooms))) for x in tensors] for tensors in groups]
    file = _new_file()
    return [[(x, _Mapped(file, x)) for x in tensors] for tensors in groups]


def _wait_for(group: _Group, *_: Any) -> None:
    group.wait()
