"""A base in 4 bits under adapters: its numbers, gradients, who computes with it; what is saved is what was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from heedful.errors import ModelError
from heedful.models.export import save_policy, save_reward, verify_reward
from heedful.models.frozen import FrozenLinear, is_quantised
from heedful.models.int8 import Int8Linear
from heedful.models.nf4 import BLOCK, LEVELS, Nf4Linear, from_nf4, to_nf4
from heedful.models.parts import Part
from heedful.models.quantise import Rounding, quantise
from heedful.models.roles import Roles, build_policy, build_reward, build_roles, build_scalar
from heedful.records import Message, Prompt
from heedful.rollout.hf import HFEngine
from toy_parts import BATCH, IDS

CPU = torch.device("cpu")
HARDWARE: dict[str, Any] = {"device": CPU, "dtype": torch.float32}
PROMPTS = [(Prompt(f"p{n}", (Message("user", "Say " + "more " * n),)), list(range(20, 30 + 3 * n))) for n in range(12)]


def lora(base: str = "nf4", targets: str = "all-linear") -> Any:
    return SimpleNamespace(rank=4, alpha=8.0, targets=targets, base=base)


def move(parameters: dict[str, Any], size: float = 0.03) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def paths(folder: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """paths(base) → folders of a policy and of a reward model, an adapter on that form of it."""

    def make(base: str = "nf4", dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
        policy = folder(name="sft", seed=5, initializer_range=0.1)
        part = build_scalar(policy, lora=lora(base), new_head=True, device=CPU, dtype=dtype)
        move(part.trainable_parameters())
        path = tmp_path / f"reward-{base}"
        save_reward(part.model, part.tokenizer, path, score_mean=0.3, score_std=2.0)
        return policy, path

    return make


def build(paths: tuple[Path, Path | None], sharing: Any = None, base: str = "nf4", **options: Any) -> Roles:
    options = {"policy_lora": lora(base), "value_lora": lora(base), **HARDWARE, **options}
    torch.manual_seed(4)  # new adapters
    return build_roles(*paths, sharing=sharing, **options)


def forms(part: Any) -> set[type]:
    return {type(m) for m in part.model.modules() if isinstance(m, FrozenLinear)}


# The numbers.


def test_the_levels_are_those_of_the_papers_formula() -> None:
    def quantiles(num: int) -> torch.Tensor:
        largest = (1 - 1 / 32 + 1 - 1 / 30) / 2
        return torch.special.ndtri(torch.linspace(largest, 0.5, num + 1, dtype=torch.float64)[:-1])

    above, below = quantiles(8), -quantiles(7)
    levels = torch.cat([below, torch.zeros(1, dtype=torch.float64), above.flip(0)]) / above[0]
    assert torch.allclose(torch.tensor(LEVELS, dtype=torch.float64), levels, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(64, 48), (5, 7), (1, 1), (3, 64), (16, 200)])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e4])
def test_every_weight_becomes_the_nearest_level_of_its_block(shape: tuple[int, int], size: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weight_OI = size * torch.randn(shape, generator=generator)
    packed_BH, scale_B = to_nf4(weight_OI)
    num_blocks = -(-weight_OI.numel() // BLOCK)
    assert packed_BH.dtype == torch.uint8 and packed_BH.shape == (num_blocks, BLOCK // 2)
    assert scale_B.dtype == torch.bfloat16 and scale_B.shape == (num_blocks,)
    found_OI = from_nf4(packed_BH, scale_B, shape)
    assert found_OI.dtype == torch.float32 and found_OI.shape == shape
    flat, found = weight_OI.flatten(), found_OI.flatten()
    for b in range(num_blocks):
        block, ours = flat[b * BLOCK : (b + 1) * BLOCK], found[b * BLOCK : (b + 1) * BLOCK]
        scale = block.abs().max().bfloat16().float()
        choices = scale * torch.tensor(LEVELS)
        distance = (block[:, None] - choices).abs()
        assert torch.allclose((ours - block).abs(), distance.min(dim=1).values, rtol=1e-5, atol=1e-6 * float(scale))
        assert bool(torch.isin(ours, choices).all())


def test_what_was_rounded_once_is_exact_the_second_time() -> None:
    weight_OI = torch.randn(40, 50)
    weight_OI[3:7] = 0
    once = to_nf4(weight_OI)
    rounded_OI = from_nf4(*once, (40, 50))
    assert not rounded_OI[4:6].any()
    again = to_nf4(rounded_OI)
    assert torch.equal(again[0], once[0]) and torch.equal(again[1], once[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ModelError, match="not finite"):
        to_nf4(torch.tensor([[1.0, bad]]))


# The layer.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_held(dtype: torch.dtype, folder: Any) -> None:
    path = folder(hidden_size=64, intermediate_size=256)
    bytes_of = []
    for base in ("float", "nf4"):
        part = build_policy(path, lora=lora(base), device=CPU, dtype=dtype)
        products = [m.base_layer for m in part.base.modules() if hasattr(m, "base_layer")]
        bytes_of.append(sum(m.weight.nbytes + (m.scale.nbytes if base == "nf4" else 0) for m in products))
        num = sum(m.in_features * m.out_features for m in products)
    assert bytes_of == [num * dtype.itemsize, num // 2 + 2 * num // 64]


# The parts.


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2", "OPT", "Gemma2"])
def test_the_gradient_of_adapters_is_that_on_the_dequantised_weights(kind: str, folder: Any) -> None:
    part = build_policy(folder(kind), lora=lora(), **HARDWARE)
    assert forms(part) == {Nf4Linear}
    move(part.trainable_parameters())
    own = part.trainable_parameters()
    assert own and all(p.dtype == torch.float32 for p in own.values())
    ours = torch.autograd.grad(part.logprobs(BATCH)[0].sum(), list(own.values()))
    trunk = part.base.base_model
    for name, module in list(trunk.named_modules()):
        if isinstance(module, Nf4Linear):
            plain: Any = nn.Linear(module.in_features, module.out_features)
            if module.is_transposed:
                plain = Conv1D(module.out_features, module.in_features)
            plain.weight, plain.bias = nn.Parameter(module.dequantised(), requires_grad=False), module.bias
            trunk.set_submodule(name, plain)
    assert not is_quantised(part.model)
    expected = torch.autograd.grad(part.logprobs(BATCH)[0].sum(), list(own.values()))
    for name, a, b in zip(own, ours, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("sharing", [None, "separate", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_PPO_08_every_kl_at_the_start_is_0_to_the_bit(sharing: Any, dtype: torch.dtype, paths: Any) -> None:
    roles = build(paths(dtype=dtype), sharing, dtype=dtype)
    assert roles.reference.is_exact and forms(roles.policy) == forms(roles.reference.part) == {Nf4Linear}
    hidden, reference = roles.policy.hidden(BATCH), roles.reference.hidden(BATCH)
    assert torch.equal(hidden, reference)
    assert not roles.policy.exact_kl_of(hidden, BATCH, reference, roles.reference.head).any()


def test_the_form_of_every_part(paths: Any) -> None:
    def held(**options: Any) -> list[set[type]]:
        roles = build(paths(), **options)
        parts = (roles.policy, roles.reference.part, roles.value.part, roles.reward and roles.reward.part)
        return [forms(part) if isinstance(part, Part) else set() for part in parts]

    nf4, int8 = {Nf4Linear}, {Int8Linear}
    frozen = Rounding(frozen="int8")
    assert held() == [nf4] * 4  # the reward is the value's base
    assert held(sharing="shared") == [nf4] * 4
    assert held(sharing="separate") == [nf4, nf4, nf4, set()]
    assert held(sharing="separate", rounding=frozen) == [nf4, nf4, nf4, int8]
    assert held(value_from="policy") == [nf4, nf4, nf4, set()]
    assert held(value_from="policy", rounding=frozen) == [nf4, nf4, nf4, int8]
    assert held(value_from="trunk", rounding=frozen) == [nf4, nf4, set(), int8]
    assert held(base="int8") == [int8] * 4
    assert held(base="float", rounding=frozen) == [int8] * 4


@pytest.mark.parametrize("base", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_one_base_the_reward_scores_as_it_was_trained(base: str, dtype: torch.dtype, paths: Any) -> None:
    policy, reward = paths(base, dtype)
    saved = build_reward(reward, device=CPU, dtype=dtype)
    roles = build((policy, reward), "shared", base=base, dtype=dtype, rounding=Rounding(PROMPTS))
    assert roles.reward is not None and roles.rounding.found.keys() == {"policy"}
    ones = torch.ones_like(IDS)
    atol = 1e-4 if dtype == torch.float32 else 0.05
    assert torch.allclose(roles.reward.scores(IDS, ones), saved.scores(IDS, ones), rtol=0, atol=atol)
    assert torch.allclose(roles.value.part.scores(IDS, ones), saved.scores(IDS, ones), rtol=0, atol=atol)


def test_on_one_base_a_reward_of_another_form_is_refused(paths: Any) -> None:
    for trained, read in (("float", "nf4"), ("nf4", "float"), ("int8", "nf4")):
        with pytest.raises(ModelError, match="is not an adapter and a head on .* on the same lora.base"):
            build(paths(trained), "shared", base=read)


@pytest.mark.parametrize("sharing", [None, "shared"])
def test_recomputed_activations_give_the_same_gradients(sharing: Any, paths: Any) -> None:
    made, found = paths(), []
    for again in (False, True):
        roles = build(made, sharing, activation_checkpointing=again)
        gradients = []
        for part, loss in ((roles.policy, lambda r: r.policy.logprobs(BATCH)[0].sum()),
                           (roles.value.part, lambda r: r.value.values(BATCH).sum())):  # fmt: skip
            own = part.trainable_parameters()
            move(own)
            gradients += torch.autograd.grad(loss(roles), list(own.values()))
        found.append(gradients)
    assert all(bool(a.any()) for a in found[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# What is measured.


def test_what_the_base_does_is_measured_and_told(folder: Any, paths: Any, capsys: Any) -> None:
    rounding = Rounding(PROMPTS)
    part = build_policy(folder(initializer_range=0.1), lora=lora(), rounding=rounding, **HARDWARE)
    found = rounding.found["policy"]
    assert is_quantised(part.model) and 0 < found["kl_mean_nats"] < found["logprob_error_mean_nats"]
    assert found["logprob_error_mean_nats"] < found["logprob_error_max_nats"]
    assert "policy in nf4: log-probs of " in "".join(capsys.readouterr())
    roles = build(paths("int8"), base="int8", rounding=Rounding(PROMPTS))
    assert roles.rounding.found.keys() == {"policy", "reward"}
    assert 0 < roles.rounding.found["reward"]["score_error_mean"] < 0.2


def test_a_reward_model_is_held_to_the_bound_of_one_and_a_new_one_is_not(paths: Any) -> None:
    """Its scores are what the policy is trained to; on a base that is trained further any error is made good."""
    policy, reward = paths()
    part = build_reward(reward, **HARDWARE).part
    with torch.no_grad():
        for module in part.base.base_model.modules():
            if isinstance(module, nn.Linear):  # in blocks of such weights nothing is left of the others
                module.weight[:, 0] = 30.0
    save_reward(part.model, part.tokenizer, reward, score_mean=0.0, score_std=1.0)
    with pytest.raises(ModelError, match=r"reward in nf4: scores .* set lora.base to int8 or float"):
        build((policy, reward), rounding=Rounding(PROMPTS))
    part = build_scalar(reward, lora=lora(), rounding=Rounding(PROMPTS), **HARDWARE)
    assert is_quantised(part.model)


# What is saved, and what speaks.


@pytest.mark.parametrize("base", ["int8", "nf4"])
@pytest.mark.parametrize("targets", ["all-linear", "q_proj, v_proj"])
def test_the_saved_policy_is_the_trained_one(base: str, targets: str, folder: Any, tmp_path: Path) -> None:
    part = build_policy(folder(), lora=lora(base, targets), **HARDWARE)
    move(part.trainable_parameters())
    save_policy(part.model, part.tokenizer, tmp_path / "saved")
    saved = build_policy(tmp_path / "saved", lora=None, trained=False, **HARDWARE)
    assert not is_quantised(saved.model) and is_quantised(part.model)
    assert torch.allclose(saved.logprobs(BATCH)[0], part.logprobs(BATCH)[0], rtol=0, atol=1e-4)
    plain = build_policy(folder(), lora=None, trained=False, **HARDWARE)
    assert not torch.allclose(saved.logprobs(BATCH)[0], plain.logprobs(BATCH)[0], rtol=0, atol=1e-2)


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_the_saved_reward_model_is_the_trained_one(base: str, paths: Any, tmp_path: Path) -> None:
    policy, _ = paths(base)
    part = build_scalar(policy, lora=lora(base), new_head=True, **HARDWARE)
    move(part.trainable_parameters())
    save_reward(part.model, part.tokenizer, tmp_path / "out", score_mean=0.0, score_std=1.0)
    assert verify_reward(tmp_path / "out").largest_gap <= 1e-4
    ones = torch.ones_like(IDS)
    saved = build_reward(tmp_path / "out", **HARDWARE).part
    assert torch.allclose(saved.scores(IDS, ones), part.scores(IDS, ones), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_decodes_with_what_is_trained(kind: str, dtype: torch.dtype, folder: Any) -> None:
    part = build_policy(folder(kind, initializer_range=0.1), lora=lora(), device=CPU, dtype=dtype)
    move(part.trainable_parameters())
    engine = HFEngine(part, [0])
    logits_BTV = engine._model(input_ids=BATCH.inputs_BT, attention_mask=BATCH.attention_mask_BT,
                               position_ids=BATCH.position_ids_BT).logits.float()  # fmt: skip
    theirs_BT = logits_BTV.log_softmax(-1).gather(-1, BATCH.targets_BT[..., None])[..., 0]
    ours_BT = part.logprobs(BATCH)[0]
    gap = (theirs_BT - ours_BT).abs()[BATCH.loss_mask_BT].max()
    assert gap < (1e-4 if dtype == torch.float32 else 0.1)


def test_a_part_is_rounded_once(folder: Any) -> None:
    part = build_policy(folder(), lora=lora(), **HARDWARE)
    rounding = Rounding(PROMPTS)
    rounding.hold("int8", {"policy": part})
    quantise(part, "int8")
    assert forms(part) == {Nf4Linear} and not rounding.found
