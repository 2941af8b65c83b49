"""Frozen weights held as autocast casts them: what is held so, and that not one bit of what they compute changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_tiny import SHAPES, make_model
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from heedful.batches import TokenBatch
from heedful.models.casts import keep_casts
from heedful.models.int8 import Int8Linear, to_int8
from heedful.models.load import load_causal
from heedful.models.parts import LanguageModel, Part, ScalarModel
from heedful.models.quantise import Rounding
from heedful.models.roles import build_policy, build_roles, build_scalar
from toy_parts import BATCH, IDS, disturb

CPU, F32, BF16, F16 = torch.device("cpu"), torch.float32, torch.bfloat16, torch.float16
LORA = SimpleNamespace(rank=4, alpha=8.0, targets="all-linear", base="float")
PACKED = TokenBatch(
    IDS[:, :-1], IDS[:, 1:], torch.ones(2, 5, dtype=torch.bool), torch.tensor([[1, 1, 1, 2, 2], [1, 1, 2, 2, 2]]),
    torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]), packed=True,
)  # fmt: skip


@pytest.fixture
def rewards(folder: Callable[..., Path], tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """rewards(kind) → folders of a policy and of a reward model of its own weights."""

    def make(kind: str = "Llama") -> tuple[Path, Path]:
        base = folder(kind)
        tokenizer = build_policy(base, lora=None, device=CPU, dtype=F32).tokenizer
        path = tmp_path / f"{kind}-reward"
        options = {"num_labels": 1, "problem_type": "regression"}
        make_model(kind, tokenizer, head="ForSequenceClassification", seed=3, **options).save_pretrained(path)
        tokenizer.save_pretrained(path)
        return base, path

    return make


def products(model: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if type(m) in (nn.Linear, Conv1D)}


def computed(part: LanguageModel, batch: TokenBatch = BATCH) -> list[torch.Tensor]:
    logprobs_BT, entropy_BT = part.logprobs(batch, temperature=0.7, with_entropy=True)
    assert entropy_BT is not None
    return [x.detach() for x in (part.hidden(batch), logprobs_BT, entropy_BT)]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("kind", SHAPES)
def test_PPO_08_a_frozen_twin_computes_as_the_policy_to_the_bit(kind: str, dtype: torch.dtype, folder: Any) -> None:
    path, hardware = folder(kind), {"lora": None, "device": CPU, "dtype": dtype}
    policy = build_policy(path, **hardware)  # with gradients: autocast keeps its casts there
    in_float32 = build_policy(path, trained=False, weights=F32, **hardware)
    twin = build_policy(path, trained=False, **hardware)
    assert all(p.dtype == F32 for part in (policy, in_float32) for p in part.model.parameters())
    trunk = products(twin.base.base_model)
    assert trunk and all(layer.weight.dtype == dtype for layer in trunk.values())
    found = computed(twin)
    assert torch.isfinite(found[0]).all() and same(found, computed(in_float32)) and same(found, computed(policy))
    hidden_BTD = policy.hidden(BATCH)
    assert not policy.exact_kl_of(hidden_BTD, BATCH, twin.hidden(BATCH), twin.head).any()
    disturb(policy)
    assert not same(computed(policy), computed(twin))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_rows_too(attention: str, folder: Any) -> None:
    options: dict[str, Any] = {"lora": None, "device": CPU, "dtype": BF16, "attention": attention, "trained": False}
    path = folder("Qwen2")
    twin, in_float32 = build_policy(path, **options), build_policy(path, weights=F32, **options)
    assert same(computed(twin, PACKED), computed(in_float32, PACKED))


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "OPT", "Phi", "Qwen2"])
def test_scores_do_not_change_by_a_bit(kind: str, rewards: Any) -> None:
    base, path = rewards(kind)
    options: dict[str, Any] = {"lora": None, "device": CPU, "dtype": BF16, "trained": False}
    twin, in_float32 = build_scalar(path, **options), build_scalar(path, weights=F32, **options)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    assert torch.equal(twin.scores(IDS, mask), in_float32.scores(IDS, mask))
    assert torch.equal(twin.values(BATCH), in_float32.values(BATCH))
    own = products(twin.base)
    head = {name for name in own if "." not in name}
    assert len(head) == 1 and all((own[name].weight.dtype == F32) == (name in head) for name in own)
    twin, in_float32 = (build_scalar(base, new_head=True, weights=dtype, **options) for dtype in (None, F32))
    assert torch.equal(twin.scores(IDS, mask), in_float32.scores(IDS, mask))  # of a stand-in


@pytest.mark.parametrize("kind", SHAPES)
def test_what_is_read_in_float32_stays_so(kind: str, folder: Any) -> None:
    part = build_policy(folder(kind), lora=None, device=CPU, dtype=BF16, trained=False)
    embedding, output = part.base.get_input_embeddings(), part.base.get_output_embeddings()
    is_tied = embedding.weight is output.weight
    assert is_tied == part.base.config.tie_word_embeddings
    cast = {f"{name}.weight" for name, m in products(part.base).items() if m is not output or not is_tied}
    for name, parameter in part.base.named_parameters():
        assert parameter.dtype == (BF16 if name in cast else F32), name
    assert part.head.weight_VD.dtype == (F32 if is_tied else BF16)


def test_nothing_is_cast_where_all_is_computed_in_float32(folder: Any, rewards: Any) -> None:
    for kind in ("Llama", "GPT2"):
        part = build_policy(folder(kind), lora=None, device=CPU, dtype=F32, trained=False)
        plain = load_causal(folder(kind), dtype=F32, device=CPU).state_dict()
        assert all(torch.equal(p, plain[name]) and p.dtype == F32 for name, p in part.base.state_dict().items())
    base, path = rewards("Llama")
    roles = build_roles(base, path, policy_lora=None, value_lora=None, device=CPU, dtype=F32)
    assert roles.reward is not None
    for model in (roles.reference.part.model, roles.reward.part.model):
        assert {p.dtype for p in model.parameters()} == {F32}


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2"])
def test_the_roles_of_ppo_hold_frozen_parts_so(kind: str, rewards: Any) -> None:
    roles = build_roles(*rewards(kind), policy_lora=None, value_lora=None, device=CPU, dtype=BF16)
    assert roles.reward is not None and isinstance(roles.value.part, ScalarModel)
    for part in (roles.policy, roles.value.part):
        assert {p.dtype for p in part.trainable_parameters().values()} == {F32}
        assert len(part.trainable_parameters()) == len(list(part.model.parameters()))
    for frozen in (roles.reference.part, roles.reward.part):
        assert {m.weight.dtype for m in products(frozen.base.base_model).values()} == {BF16}
        assert not any(p.requires_grad for p in frozen.model.parameters())
    assert same(computed(roles.policy), computed(roles.reference.part)) and roles.reference.is_exact
    ones = torch.ones_like(IDS)
    assert torch.equal(roles.reward.scores(IDS, ones), roles.value.part.scores(IDS, ones).detach())
    assert torch.equal(roles.reward.part.values(BATCH), roles.value.values(BATCH).detach())


@pytest.mark.parametrize("sharing", [None, "separate", "shared"])
def test_what_adapters_are_merged_into_is_left_alone(sharing: Any, folder: Any) -> None:
    path = folder("Qwen2")
    roles = build_roles(
        path, None, policy_lora=LORA, value_lora=LORA, value_from="policy", sharing=sharing, device=CPU, dtype=BF16
    )
    plain = load_causal(path, dtype=BF16, device=CPU).state_dict()
    held = {name.replace(".base_layer", ""): p for name, p in roles.policy.base.state_dict().items()}
    assert all(torch.equal(held[name], p) and held[name].dtype == p.dtype for name, p in plain.items())
    assert {p.dtype for p in roles.policy.trainable_parameters().values()} == {F32}
    in_float32 = build_policy(path, lora=LORA, device=CPU, dtype=BF16, weights=F32)
    keep_casts(in_float32)
    assert {p.dtype for p in in_float32.model.parameters()} == {F32}


@pytest.mark.parametrize("kind", ["Qwen2", "GPT2"])
def test_int8_is_made_of_the_float32_weights(kind: str, rewards: Any) -> None:
    base, path = rewards(kind)
    frozen = Rounding(frozen="int8")
    roles = build_roles(base, path, policy_lora=None, value_lora=None, device=CPU, dtype=BF16, rounding=frozen)
    assert roles.reward is not None
    for part, folder in ((roles.reference.part, base), (roles.reward.part, path)):
        plain = build_policy(folder, lora=None, device=CPU, dtype=F32) if folder == base else build_scalar(
            folder, lora=None, device=CPU, dtype=F32)  # fmt: skip
        weights = dict(plain.base.base_model.named_parameters())
        layers = {name: m for name, m in part.base.base_model.named_modules() if isinstance(m, Int8Linear)}
        assert layers and not products(part.base.base_model)
        for name, layer in layers.items():
            weight = weights[f"{name}.weight"].detach()
            whole_OI, scale_O = to_int8(weight.T if layer.is_transposed else weight)
            assert torch.equal(layer.weight, whole_OI) and torch.equal(layer.scale, scale_O)
    embedding, output = (roles.reference.part.base.get_input_embeddings(), roles.reference.head)
    assert embedding.weight.dtype == F32
    assert output.weight_VD.dtype == (BF16 if kind == "Qwen2" else F32)  # GPT-2's is the embedding


def test_weights_that_come_in_bfloat16_are_held_as_they_came(folder: Any) -> None:
    path = folder("Qwen2")
    make_model("Qwen2", build_policy(path, lora=None, device=CPU, dtype=F32).tokenizer).bfloat16().save_pretrained(path)
    saved = load_causal(path, dtype=BF16, device=CPU).state_dict()
    twin = build_policy(path, lora=None, device=CPU, dtype=BF16, trained=False)
    assert all(torch.equal(p.bfloat16(), saved[name]) for name, p in twin.base.state_dict().items())
    assert same(computed(twin), computed(build_policy(path, lora=None, device=CPU, dtype=BF16)))


def test_a_layer_that_is_kept_out_of_autocast_stays_in_float32(folder: Any) -> None:
    """Routers are such; casting their weights would move them, or fail."""
    path, found = folder("Llama"), []
    for do in (False, True):
        part = build_policy(path, lora=None, device=CPU, dtype=BF16, trained=False, weights=F32)
        layer = part.base.base_model.layers[1].mlp.down_proj

        def forward(x: torch.Tensor, weight: torch.Tensor = layer.weight) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return functional.linear(x.float(), weight)

        layer.forward = forward
        if do:
            keep_casts(part)
            own = {name for name, m in products(part.base.base_model).items() if m.weight.dtype == F32}
            assert own == {"layers.1.mlp.down_proj"}
        found.append(computed(part))
    assert same(*found)


def test_a_weight_that_an_embedding_shares_stays_in_float32(folder: Any) -> None:
    part = build_policy(folder("Llama"), lora=None, device=CPU, dtype=BF16, trained=False, weights=F32)
    trunk = part.base.base_model
    trunk.spare = nn.Embedding(*reversed(trunk.layers[0].mlp.up_proj.weight.shape))
    trunk.spare.weight = trunk.layers[0].mlp.up_proj.weight
    trunk.layers[1].mlp.gate_proj.weight = trunk.layers[0].mlp.gate_proj.weight  # of two products, one weight
    keep_casts(part)
    assert trunk.spare.weight.dtype == F32 and trunk.layers[0].mlp.up_proj.weight is trunk.spare.weight
    shared = trunk.layers[1].mlp.gate_proj.weight
    assert shared.dtype == BF16 and shared is trunk.layers[0].mlp.gate_proj.weight


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "GPT2"])
def test_memory_held(kind: str, folder: Any) -> None:
    def num_bytes(part: Part) -> int:
        return sum(p.nbytes for p in part.model.parameters())

    path, options = folder(kind), {"lora": None, "device": CPU, "dtype": BF16, "trained": False}
    in_float32, twin = build_policy(path, weights=F32, **options), build_policy(path, **options)
    num = sum(m.weight.numel() for m in products(in_float32.base.base_model).values())
    if not in_float32.base.config.tie_word_embeddings:
        num += in_float32.head.weight_VD.numel()
    assert num_bytes(in_float32) - num_bytes(twin) == 2 * num
    keep_casts(twin)  # once is enough
    assert num_bytes(in_float32) - num_bytes(twin) == 2 * num
