"""Log-probs and the exact KL from hidden states that are at hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_tiny import SHAPES
from torch import Tensor

from heedful.batches import TokenBatch
from heedful.models.load import load_tokenizer
from heedful.models.parts import LanguageModel
from heedful.models.roles import Roles, build_roles

CPU = torch.device("cpu")
LORA = SimpleNamespace(rank=4, alpha=8.0, targets="all-linear", base="float")
IDS = torch.tensor([[7, 30, 41, 8, 99, 12], [5, 6, 7, 8, 9, 10]])
MASK = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]).bool()
BATCH = TokenBatch(IDS[:, :-1], IDS[:, 1:], MASK, torch.ones(2, 5, dtype=torch.int64), torch.arange(5).expand(2, 5))


def roles_of(path: Path, lora: Any, dtype: torch.dtype = torch.float32) -> Roles:
    torch.manual_seed(4)
    return build_roles(
        path, None, policy_lora=lora, value_lora=lora, value_from="frozen_trunk", device=CPU, dtype=dtype
    )


def move(part: LanguageModel) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in part.trainable_parameters().values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def exact(roles: Roles, temperature: float) -> Tensor:
    return roles.policy.exact_kl_of(
        roles.policy.hidden(BATCH), BATCH, roles.reference.hidden(BATCH), roles.reference.head, temperature=temperature
    )


def log_distribution(part: LanguageModel, temperature: float) -> Tensor:
    logits_BTV: Tensor = part.model(BATCH.inputs_BT, position_ids=BATCH.position_ids_BT).logits
    return (logits_BTV.float() / temperature).log_softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Gemma2"])
def test_PPO_17_exact_kl_is_exactly_zero_at_the_start(
    kind: str, lora: Any, dtype: torch.dtype, folder: Callable[..., Path]
) -> None:
    roles = roles_of(folder(kind), lora, dtype)
    assert (exact(roles, 0.7) == 0).all()
    hidden_BTD = roles.reference.hidden(BATCH)
    own, _ = roles.policy.logprobs_of(roles.policy.hidden(BATCH), BATCH, temperature=0.7)
    reference, _ = roles.reference.logprobs_of(hidden_BTD, BATCH, temperature=0.7)
    assert torch.equal(own, reference) and torch.equal(reference, roles.reference.logprobs(BATCH, temperature=0.7)[0])
    assert own.requires_grad and not hidden_BTD.requires_grad and not reference.requires_grad


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("kind", list(SHAPES))
def test_exact_kl_and_its_gradient_equal_those_of_whole_logits(
    kind: str, lora: Any, folder: Callable[..., Path]
) -> None:
    roles = roles_of(folder(kind), lora)
    if kind == "Phi":  # the one with a bias in its output layer
        assert roles.policy.head.bias_V is not None
        with torch.no_grad():
            for part in {roles.policy, roles.reference.part}:
                part.head.bias_V.copy_(torch.linspace(-1, 1, len(part.head.bias_V)))
    move(roles.policy)
    temperature = 0.7
    with torch.no_grad(), roles.reference.part.reference():
        reference_BTV = log_distribution(roles.reference.part, temperature)
    own_BTV = log_distribution(roles.policy, temperature)
    expected_BT = torch.where(MASK, (own_BTV.exp() * (own_BTV - reference_BTV)).sum(-1), 0.0)
    found_BT = exact(roles, temperature)
    assert found_BT.dtype == torch.float32 and expected_BT.max() > 1e-2
    assert torch.allclose(found_BT, expected_BT, atol=1e-4, rtol=1e-3)

    def gradients(loss: Tensor) -> dict[str, Tensor]:
        roles.policy.model.zero_grad()
        loss.backward()
        trained = roles.policy.trainable_parameters()
        return {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}

    weights_BT = torch.tensor([[9.0, 1.0, -2.0, 0.5, 9.0], [9.0, 9.0, 1.5, 1.0, -1.0]])
    expected, found = gradients((expected_BT * weights_BT).sum()), gradients((found_BT * weights_BT).sum())
    assert found.keys() == expected.keys() == roles.policy.trainable_parameters().keys()
    for name in found:
        scale = float(expected[name].abs().max())
        assert (found[name] - expected[name]).abs().max() <= 1e-3 * scale + 1e-5, name
    assert all(p.grad is None for p in roles.reference.part.model.parameters() if not p.requires_grad)


def test_one_forward_gives_logprobs_entropy_and_kl(folder: Callable[..., Path]) -> None:
    path = folder()
    part = roles_of(path, None).policy
    assert load_tokenizer(path).pad_token_id == part.pad_id
    hidden_BTD = part.hidden(BATCH)
    for found, expected in zip(
        part.logprobs_of(hidden_BTD, BATCH, temperature=0.7, with_entropy=True),
        part.logprobs(BATCH, temperature=0.7, with_entropy=True),
        strict=True,
    ):
        assert found is not None and expected is not None and torch.equal(found, expected)
