"""Activation checkpointing: the same gradients to the bit, with less kept between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_tiny import make_tokenizer
from torch import Tensor, nn

from heedful.batches import TokenBatch
from heedful.errors import ModelError
from heedful.models.parts import Part
from heedful.models.recompute import recompute_activations
from heedful.models.roles import build_policy, build_roles, build_scalar

CPU = torch.device("cpu")
LORA = SimpleNamespace(rank=4, alpha=8.0, targets="all-linear", base="float")
KINDS = ["Llama", "GPT2", "Qwen2", "OPT", "Gemma2"]
IDS = torch.arange(3 * 41).reshape(3, 41) % 97 + 5
MASK = torch.ones(3, 40, dtype=torch.int64)
MASK[1, 30:] = 0
BATCH = TokenBatch(IDS[:, :-1], IDS[:, 1:], MASK.bool(), MASK, torch.arange(40).expand(3, 40) * MASK)


@pytest.fixture(params=[LORA, None], ids=["lora", "full"])
def lora(request: pytest.FixtureRequest) -> Any:
    return request.param


def saved_bytes(forward: Callable[[], Tensor], weights: Any) -> tuple[Tensor, int]:
    """The result, and the bytes that its graph keeps for the backward, weights not counted."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in weights}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = forward()
    return result, sum(kept.values())


def gradients(part: Part, batch: TokenBatch = BATCH) -> tuple[list[Tensor], int]:
    """Output and gradients of every trained weight, and the bytes kept in between."""
    part.model.zero_grad()

    def forward() -> Tensor:
        return part.logprobs(batch)[0] if hasattr(part, "logprobs") else part.values(batch)  # type: ignore[attr-defined]

    out_BT, kept = saved_bytes(forward, part.model.parameters())
    (out_BT * torch.linspace(-1, 1, 40)).sum().backward()
    found = [p.grad.clone() for p in part.trainable_parameters().values() if p.grad is not None]
    assert len(found) == len(part.trainable_parameters())
    return [out_BT.detach(), *found], kept


def build(kind: str, task: str, path: Path, lora: Any, dtype: torch.dtype = torch.float32) -> Part:
    torch.manual_seed(4)
    options: dict[str, Any] = {"lora": lora, "device": CPU, "dtype": dtype}
    part: Part = build_policy(path, **options) if task == "policy" else build_scalar(path, new_head=True, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in part.trainable_parameters().values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("task", ["policy", "value"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_equal_to_the_bit_and_less_is_kept(
    kind: str, task: str, dtype: torch.dtype, lora: Any, folder: Callable[..., Path]
) -> None:
    part = build(kind, task, folder(kind), lora, dtype)
    expected, much = gradients(part)
    assert recompute_activations(part) == 2
    found, little = gradients(part)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert little < 0.4 * much, (little, much)


def test_a_forward_of_the_reference_in_between_changes_nothing(folder: Callable[..., Path]) -> None:
    """The backward computes the policy's layers again after the adapters were off and on."""
    part = build("Llama", "policy", folder(), LORA)
    expected, _ = gradients(part)
    recompute_activations(part)
    part.model.zero_grad()
    out_BT = part.logprobs(BATCH)[0]  # type: ignore[attr-defined]
    with torch.no_grad(), part.reference():
        part.hidden(BATCH)
    (out_BT * torch.linspace(-1, 1, 40)).sum().backward()
    found = [p.grad for p in part.trainable_parameters().values()]
    assert all(a is not None and torch.equal(a, b) for a, b in zip(found, expected[1:], strict=True))


def test_layers_run_again_in_the_backward_only(folder: Callable[..., Path]) -> None:
    part = build("Llama", "policy", folder(), None)
    recompute_activations(part)
    calls = {"layer": 0, "inside": 0}

    def count(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            calls[name] += 1

        return hook

    layer = part.base.model.layers[0]
    layer.register_forward_hook(count("layer"))
    layer.self_attn.register_forward_hook(count("inside"))
    with torch.no_grad():
        part.hidden(BATCH)
    assert calls == {"layer": 1, "inside": 1}
    hidden_BTD = part.hidden(BATCH)
    assert calls == {"layer": 2, "inside": 2}
    hidden_BTD.sum().backward()
    assert calls == {"layer": 2, "inside": 3}


@pytest.mark.parametrize("value_from", ["policy", "trunk"])
def test_roles_with_checkpointing(value_from: Any, lora: Any, folder: Callable[..., Path]) -> None:
    path = folder()
    kept = []
    for on in (False, True):
        torch.manual_seed(4)
        roles = build_roles(
            path, None, policy_lora=lora, value_lora=lora, value_from=value_from, device=CPU, dtype=torch.float32,
            activation_checkpointing=on,
        )  # fmt: skip
        weights = [*roles.policy.model.parameters(), *roles.value.part.model.parameters()]
        for forward in (lambda r=roles: r.policy.hidden(BATCH), lambda r=roles: r.value.values(BATCH)):
            kept.append(saved_bytes(forward, weights)[1])
    assert kept[2] < 0.4 * kept[0] and kept[3] < 0.4 * kept[1]


def test_a_second_call_changes_nothing(folder: Callable[..., Path]) -> None:
    part = build("Llama", "policy", folder(), None)
    recompute_activations(part)
    first = [layer.forward for layer in part.base.model.layers]
    assert recompute_activations(part) == 2
    assert [layer.forward for layer in part.base.model.layers] == first


def test_an_architecture_without_marked_layers_is_refused() -> None:
    class Odd(Part):
        def __init__(self) -> None:
            model = nn.Linear(2, 2)
            model.base_model = nn.Identity()
            super().__init__(model, make_tokenizer(), CPU, torch.float32)

    with pytest.raises(ModelError, match="activation_checkpointing: false"):
        recompute_activations(Odd())
