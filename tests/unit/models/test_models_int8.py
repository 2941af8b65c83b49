"""Frozen weights in int8: how far they are from float, that gradients pass, what is held, and what is saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_tiny import make_tokenizer
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from heedful.batches import TokenBatch
from heedful.errors import ModelError
from heedful.models.export import save_policy, save_reward
from heedful.models.frozen import is_quantised
from heedful.models.int8 import Int8Linear, to_int8
from heedful.models.lora import merged_state
from heedful.models.parts import Part, ScalarModel
from heedful.models.quantise import LARGEST_BOUND_NATS, MEAN_BOUND_NATS, Rounding, quantise
from heedful.models.roles import Roles, build_policy, build_reward, build_roles, build_scalar
from heedful.records import Message, Prompt
from toy_parts import BATCH, IDS

CPU = torch.device("cpu")
LORA = SimpleNamespace(rank=4, alpha=8.0, targets="all-linear", base="float")
NARROW = SimpleNamespace(rank=2, alpha=6.0, targets="q_proj, v_proj", base="float")
PROMPTS = [(Prompt(f"p{n}", (Message("user", "Say " + "more " * n),)), list(range(20, 30 + 3 * n))) for n in range(12)]
HARDWARE: dict[str, Any] = {"device": CPU, "dtype": torch.float32}


def move(parameters: dict[str, Any], seed: int = 0, size: float = 0.1) -> None:
    """A known non-zero update."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def paths(folder: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """paths(kind) → folders of a policy and of a reward model that is an adapter on it."""

    def make(kind: str = "Llama", dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
        # smaller weights than the other tests have: differences of logits as real models have them
        base = folder(kind, name=f"{kind}-sft", seed=5, initializer_range=0.1)
        part = build_scalar(base, lora=LORA, new_head=True, device=CPU, dtype=dtype)
        move(part.trainable_parameters(), size=0.03)
        save_reward(part.model, part.tokenizer, tmp_path / "reward", score_mean=0.3, score_std=2.0)
        return base, tmp_path / "reward"

    return make


def build(paths: tuple[Path, Path | None], sharing: Any = None, *, int8: bool = True, **options: Any) -> Roles:
    options = {"policy_lora": LORA, "value_lora": LORA, **HARDWARE, **options}
    torch.manual_seed(4)  # new adapters
    return build_roles(*paths, sharing=sharing, rounding=Rounding(PROMPTS, frozen="int8") if int8 else None, **options)


def streams(roles: Roles) -> dict[str, torch.Tensor]:
    found = {"policy": roles.policy.logprobs(BATCH)[0], "reference": roles.reference.logprobs(BATCH)[0],
             "value": roles.value.values(BATCH)}  # fmt: skip
    if roles.reward is not None:
        found["reward"] = roles.reward.scores(IDS, torch.ones_like(IDS))
    return {name: x.detach() for name, x in found.items()}


def bytes_of_trunk(part: Part) -> int:
    trunk = part.base.base_model
    held = [*trunk.parameters(), *trunk.buffers()]
    return sum(x.nbytes for x in {x.data_ptr(): x for x in held}.values())


# The layer.


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1.0, 1e4])
def test_no_weight_moves_by_more_than_half_a_step_of_its_row(size: float) -> None:
    weight_OI = size * torch.randn(64, 48) * torch.logspace(-3, 0, 64)[:, None]
    weight_OI[3] = 0
    whole_OI, scale_O = to_int8(weight_OI)
    assert whole_OI.dtype == torch.int8 and scale_O.dtype == torch.bfloat16
    error_OI = (whole_OI.float() * scale_O.float()[:, None] - weight_OI).abs()
    largest_O = weight_OI.abs().amax(dim=1)
    assert bool((error_OI <= 1.01 * largest_O[:, None] / 254).all())
    assert not whole_OI[3].any() and bool((whole_OI[weight_OI.abs().sum(1) > 0].abs().amax(1) >= 126).all())


def test_a_weight_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ModelError, match="not finite"):
        to_int8(torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(ModelError, match="not finite"):
        to_int8(torch.tensor([[1.0, float("inf")]]))


# The parts.


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2", "OPT", "Gemma2"])
def test_the_matrix_products_of_a_trunk_are_held_so_and_nothing_else(kind: str, folder: Any) -> None:
    part = build_policy(folder(kind), lora=None, trained=False, **HARDWARE)
    before = dict(part.base.named_parameters())
    quantise(part, "int8")
    products = [m for m in part.base.modules() if isinstance(m, Int8Linear)]
    assert products and not [m for m in part.base.base_model.modules() if type(m) in (nn.Linear, Conv1D)]
    assert type(part.base.get_output_embeddings()) is nn.Linear
    left = dict(part.base.named_parameters())
    assert all(left[name] is before[name] for name in left)
    gone = before.keys() - left.keys()
    assert len(gone) == len(products) and all(before[name].ndim == 2 for name in gone)


def test_trained_weights_and_adapters_stay_float(paths: Any) -> None:
    roles = build(paths())
    for part in (roles.policy, roles.value.part):
        trained = part.trainable_parameters()
        assert trained and all(p.dtype == torch.float32 for p in trained.values())
        assert isinstance(part, Part) and is_quantised(part.model)
    full = build(paths(), policy_lora=None, value_lora=None)
    assert not is_quantised(full.policy.model) and not is_quantised(full.value.part.model)
    assert full.reward is not None
    assert is_quantised(full.reference.part.model) and is_quantised(full.reward.part.model)


@pytest.mark.parametrize("sharing", [None, "separate", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_PPO_08_under_adapters_every_kl_at_the_start_is_0_to_the_bit(
    sharing: Any, dtype: torch.dtype, paths: Any
) -> None:
    roles = build(paths(dtype=dtype), sharing, dtype=dtype)
    assert roles.reference.is_exact
    hidden, reference = roles.policy.hidden(BATCH), roles.reference.hidden(BATCH)
    assert torch.equal(hidden, reference)
    assert torch.equal(roles.policy.logprobs(BATCH)[0], roles.reference.logprobs(BATCH)[0])
    assert not roles.policy.exact_kl_of(hidden, BATCH, reference, roles.reference.head).any()


def test_beside_a_fully_trained_policy_the_kl_starts_at_what_was_measured(paths: Any) -> None:
    roles = build(paths(), policy_lora=None, value_lora=None)
    assert not roles.reference.is_exact
    measured = roles.rounding.found["reference"]
    assert 0 < measured["logprob_error_mean_nats"] <= MEAN_BOUND_NATS
    assert measured["logprob_error_mean_nats"] < measured["logprob_error_max_nats"] <= LARGEST_BOUND_NATS
    assert 0 < measured["kl_mean_nats"] < measured["logprob_error_mean_nats"]
    # by another way: the trained policy is the float model, so the two roles differ by just that
    ids = torch.tensor([PROMPTS[-1][1]])
    ones, place = torch.ones_like(ids[:, 1:]), torch.arange(ids.shape[1] - 1)[None]
    batch = TokenBatch(ids[:, :-1], ids[:, 1:], ones.bool(), ones, place)
    gap = (roles.policy.logprobs(batch)[0] - roles.reference.logprobs(batch)[0]).detach().abs()
    assert 0 < float(gap.max()) <= measured["logprob_error_max_nats"] + 1e-6


@pytest.mark.parametrize("sharing", [None, "separate", "shared"])
def test_every_way_of_sharing_says_the_same(sharing: Any, paths: Any) -> None:
    """Parts on one int8 base, on two and apart; and all near the float ones."""
    made = paths()
    ours, float_ones = streams(build(made, sharing)), streams(build(made, sharing, int8=False))
    full = streams(build(made, None, policy_lora=None, value_lora=None))
    assert float((ours["reference"] - full["reference"]).abs().max()) < 1e-5
    if sharing == "shared":  # elsewhere adapters of the reward are merged before its base is rounded
        apart = streams(build(made, "separate"))
        assert float((ours["policy"] - apart["policy"]).abs().max()) < 1e-5
    else:
        assert float((ours["reward"] - full["reward"]).abs().max()) < 1e-5
    for name, x in ours.items():
        gap = (x - float_ones[name]).abs().max()
        assert 0 < gap < 0.1 * max(1.0, float(float_ones[name].abs().max())), name


@pytest.mark.parametrize(("value_from", "names"), [
    ("reward", {"reference", "reward"}), ("policy", {"reference", "reward"}), ("trunk", {"reference", "reward"}),
])  # fmt: skip
@pytest.mark.parametrize("lora", [LORA, None])
def test_what_is_measured(value_from: Any, names: set[str], lora: Any, paths: Any) -> None:
    roles = build(paths(), policy_lora=lora, value_lora=lora, value_from=value_from)
    assert roles.rounding.found.keys() == names
    scores = roles.rounding.found["reward"]
    assert 0 < scores["score_error_mean"] < scores["score_error_max"] < 0.5
    unmeasured = build_roles(*paths(), policy_lora=lora, value_lora=lora, rounding=Rounding(frozen="int8"), **HARDWARE)
    assert is_quantised(unmeasured.reference.part.model)
    assert not unmeasured.rounding.found


def spike(part: Any) -> None:
    """One weight per row that is a thousand times the others leaves nothing of the others."""
    with torch.no_grad():
        for module in part.base.base_model.modules():
            if isinstance(module, nn.Linear):
                module.weight[:, 0] = 300.0
                module.weight[:, 1] = -300.0


def test_a_model_that_int8_damages_is_refused(folder: Any) -> None:
    base = folder(name="spiky", initializer_range=0.1)
    part = build_policy(base, lora=None, trained=False, **HARDWARE)
    spike(part)
    with pytest.raises(ModelError, match=r"reference in int8: .* nats .* set ppo.frozen_weights to float"):
        Rounding(PROMPTS).hold("int8", {"reference": part})


def test_a_reward_model_that_int8_damages_is_refused(paths: Any) -> None:
    _, path = paths()
    part = build_reward(path, **HARDWARE).part
    spike(part)
    with pytest.raises(ModelError, match=r"judge in int8: scores .* set ppo.frozen_weights to float"):
        Rounding(PROMPTS).hold("int8", {"judge": part})


def test_a_reward_model_of_its_own_is_held_so_too(paths: Any) -> None:
    _, path = paths()
    rounding = Rounding(PROMPTS, frozen="int8")
    ours = build_reward(path, rounding=rounding, name="rewards.more", **HARDWARE)
    float_one = build_reward(path, **HARDWARE)
    assert rounding.found.keys() == {"rewards.more"} and is_quantised(ours.part.model)
    ones = torch.ones_like(IDS)
    assert 0 < float((ours.scores(IDS, ones) - float_one.scores(IDS, ones)).abs().max()) < 0.1


@pytest.mark.parametrize("sharing", [None, "shared"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_the_adapters_of_the_first_layer(sharing: Any, checkpointing: bool, paths: Any) -> None:
    made = paths()
    found = []
    for int8 in (True, False):
        roles = build(made, sharing, int8=int8, activation_checkpointing=checkpointing)
        move(roles.policy.trainable_parameters(), size=0.03)
        own = roles.policy.trainable_parameters()
        loss = roles.policy.logprobs(BATCH)[0].sum()
        found.append(dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True)))
    ours, float_ones = found
    assert any("layers.0" in name for name in ours)
    for name, gradient in ours.items():
        similarity = torch.cosine_similarity(gradient.flatten(), float_ones[name].flatten(), dim=0)
        assert similarity > 0.98, name


def test_the_gradient_is_that_of_the_weights_it_computes_with(paths: Any) -> None:
    """Not only near: the same model with its dequantised weights in float gives the same gradients."""
    roles = build(paths())
    move(roles.policy.trainable_parameters(), size=0.03)
    own = roles.policy.trainable_parameters()
    ours = torch.autograd.grad(roles.policy.logprobs(BATCH)[0].sum(), list(own.values()))
    for name, module in list(roles.policy.base.base_model.named_modules()):
        if isinstance(module, Int8Linear):
            linear = nn.Linear(module.in_features, module.out_features, bias=False).requires_grad_(False)
            linear.weight.copy_(module.dequantised())
            roles.policy.base.base_model.set_submodule(name, linear)
    assert not is_quantised(roles.policy.model)
    plain = torch.autograd.grad(roles.policy.logprobs(BATCH)[0].sum(), list(own.values()))
    for name, a, b in zip(own, ours, plain, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_held(dtype: torch.dtype, folder: Any) -> None:
    base = folder(hidden_size=64, intermediate_size=256)
    part = build_policy(base, lora=LORA, device=CPU, dtype=dtype)
    products = sum(m.base_layer.weight.numel() for m in part.base.modules() if hasattr(m, "base_layer"))
    rows = sum(m.base_layer.weight.shape[0] for m in part.base.modules() if hasattr(m, "base_layer"))
    before = bytes_of_trunk(part)
    quantise(part, "int8")
    assert before - bytes_of_trunk(part) == products * (dtype.itemsize - 1) - 2 * rows
    quantise(part, "int8")  # once is enough
    assert before - bytes_of_trunk(part) == products * (dtype.itemsize - 1) - 2 * rows


# What is saved, and what speaks.


@pytest.mark.parametrize("lora", [LORA, NARROW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_merged_into_the_original_weights(
    lora: Any, dtype: torch.dtype, folder: Any, tmp_path: Path
) -> None:
    base = folder()
    saved = []
    for name in ("int8", "float"):
        torch.manual_seed(4)
        part = build_policy(base, lora=lora, device=CPU, dtype=dtype)
        move(part.trainable_parameters())
        if name == "int8":
            quantise(part, "int8")
        save_policy(part.model, part.tokenizer, tmp_path / name, base=base)
        saved.append(load_file(tmp_path / name / "model.safetensors"))
        assert (tmp_path / name / "adapter" / "adapter_model.safetensors").is_file()
    ours, float_ones = saved
    assert ours.keys() == float_ones.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor, float_ones[key]), key


def test_into_other_weights_nothing_is_merged(folder: Any, tmp_path: Path) -> None:
    base, other = folder(), folder(name="other", seed=1)
    part = build_policy(base, lora=LORA, **HARDWARE)
    move(part.trainable_parameters())
    quantise(part, "int8")
    with pytest.raises(ModelError, match="not what the rounded weights were made of"):
        save_policy(part.model, part.tokenizer, tmp_path / "saved", base=other)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_what_the_engine_is_given_computes_as_the_policy_does(kind: str, folder: Any) -> None:
    """Merged for decoding are the weights that the policy is trained with, not the original ones."""
    part = build_policy(folder(kind), lora=LORA, **HARDWARE)
    plain = copy.deepcopy(build_policy(folder(kind), lora=None, **HARDWARE))
    move(part.trainable_parameters(), size=0.03)
    quantise(part, "int8")
    missing, odd = plain.model.load_state_dict(dict(merged_state(part.model)), strict=False)
    assert not odd and set(missing) <= {"lm_head.weight"}
    assert torch.allclose(plain.logprobs(BATCH)[0], part.logprobs(BATCH)[0], atol=2e-4)


def test_a_tokenizer_of_another_kind_reads_the_prompts(folder: Any, paths: Any) -> None:
    """A reward model is measured on texts, by its own tokenizer."""
    _, path = paths()
    make_tokenizer(shift=3).save_pretrained(path)
    part: ScalarModel = build_reward(path, rounding=Rounding(PROMPTS, frozen="int8"), **HARDWARE).part
    assert is_quantised(part.model)
