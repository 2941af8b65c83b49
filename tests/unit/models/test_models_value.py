"""Where values come from: the reward model, a copy of the policy, or the policy's own trunk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from heedful.errors import ModelError
from heedful.models.export import save_policy, save_reward
from heedful.models.load import load_scalar, load_tokenizer
from heedful.models.parts import ScalarModel
from heedful.models.roles import Roles, ValueFrom, build_roles
from heedful.models.value import TrunkHead
from toy_parts import BATCH, IDS

CPU = torch.device("cpu")
LORA = SimpleNamespace(rank=4, alpha=8.0, targets="all-linear", base="float")
MODES = get_args(ValueFrom)
ONES = torch.ones_like(IDS)


def move(part: Any, seed: int = 0) -> None:
    """A known non-zero update of everything that is trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in part.trainable_parameters().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(params=["lora", "full"])
def lora(request: pytest.FixtureRequest) -> Any:
    return LORA if request.param == "lora" else None


@pytest.fixture
def build(folder: Callable[..., Path], tmp_path: Path) -> Callable[..., Roles]:
    """build(value_from, lora, …) → roles on one policy and one reward folder."""
    policy, base = folder("Llama", name="sft"), folder("Llama", name="reward-base", seed=5)
    model = load_scalar(base, dtype=torch.float32, device=CPU, head="new", seed=3)
    save_reward(model, load_tokenizer(base), tmp_path / "reward", score_mean=0.0, score_std=1.0)

    def make(value_from: str, lora: Any, **options: Any) -> Roles:
        options = {"reward_path": tmp_path / "reward", "dtype": torch.float32, **options}
        torch.manual_seed(4)  # new adapters
        return build_roles(
            policy, policy_lora=lora, value_lora=lora, value_from=value_from, device=CPU, **options
        )  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize("value_from", MODES)
def test_first_values_are_the_standardised_scores_or_zero(
    value_from: str, lora: Any, build: Callable[..., Roles]
) -> None:
    roles = build(value_from, lora, value_shift=0.5, value_scale=2.0)
    assert roles.reward is not None
    expected = (roles.reward.scores(IDS, ONES) - 0.5) / 2.0 if value_from == "reward" else torch.zeros(2)
    assert torch.allclose(roles.value.values_after(IDS), expected, atol=1e-6)
    assert expected.abs().max() > 0.1 or value_from != "reward"


@pytest.mark.parametrize("value_from", MODES)
def test_PPO_03_value_of_a_cut_answer_is_that_of_its_last_state(
    value_from: str, lora: Any, build: Callable[..., Roles]
) -> None:
    roles = build(value_from, lora)
    move(roles.policy)
    move(roles.value, seed=1)
    values_BT = roles.value.values(BATCH)
    assert values_BT.dtype == torch.float32 and values_BT.requires_grad
    for t in range(5):
        assert torch.allclose(roles.value.values_after(IDS[:, : t + 1]), values_BT[:, t], atol=1e-4)
    assert values_BT.std() > 0.05


@pytest.mark.parametrize("value_from", MODES)
def test_given_hidden_states_change_nothing(value_from: str, lora: Any, build: Callable[..., Roles]) -> None:
    roles = build(value_from, lora)
    move(roles.value)
    hidden_BTD = roles.policy.hidden(BATCH)
    assert torch.equal(roles.value.values(BATCH, hidden_BTD), roles.value.values(BATCH))
    assert roles.value.is_shared == (value_from in ("trunk", "frozen_trunk")) == isinstance(roles.value.part, TrunkHead)
    # and they are used where values are shared: no second forward
    assert torch.equal(roles.value.values(BATCH, hidden_BTD * 2), roles.value.values(BATCH)) != roles.value.is_shared


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("value_from", MODES)
def test_whom_the_value_loss_moves(value_from: str, given: bool, lora: Any, build: Callable[..., Roles]) -> None:
    roles = build(value_from, lora)
    move(roles.policy)  # away from B = 0, where the A of an adapter has no gradient
    move(roles.value, seed=1)
    hidden_BTD = roles.policy.hidden(BATCH) if given else None
    roles.value.values(BATCH, hidden_BTD).square().sum().backward()
    own = roles.value.trainable_parameters()
    assert own and all(p.grad is not None and p.grad.abs().max() > 0 for p in own.values())
    others = [p.grad for p in roles.policy.trainable_parameters().values() if p.grad is not None]
    assert bool(others) == (value_from == "trunk")
    assert all(g.to_dense().abs().max() > 0 for g in others)  # a tied embedding's is of rows


@pytest.mark.parametrize("value_from", MODES)
def test_no_weight_has_two_optimizers(value_from: str, lora: Any, build: Callable[..., Roles]) -> None:
    roles = build(value_from, lora)
    policy, value = (part.trainable_parameters() for part in (roles.policy, roles.value))
    assert not {id(p) for p in policy.values()} & {id(p) for p in value.values()}
    if roles.value.is_shared:
        assert list(value) == ["value_head.weight", "value_head.bias"]
    assert all(p.dtype == torch.float32 and p.requires_grad for p in value.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("value_from", MODES)
def test_PPO_17_reward_and_reference_stay(
    value_from: str, dtype: torch.dtype, lora: Any, build: Callable[..., Roles]
) -> None:
    roles = build(value_from, lora, dtype=dtype)
    assert roles.reward is not None
    scores, reference_BT = roles.reward.scores(IDS, ONES), roles.reference.logprobs(BATCH)[0]
    move(roles.policy)
    move(roles.value)
    assert torch.equal(roles.reward.scores(IDS, ONES), scores)
    assert torch.equal(roles.reference.logprobs(BATCH)[0], reference_BT)
    assert (roles.reward.part is roles.value.part) == (value_from == "reward" and lora is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_scores_do_not_depend_on_where_values_come_from(
    dtype: torch.dtype, lora: Any, build: Callable[..., Roles]
) -> None:
    scores: list[Tensor] = []
    for value_from in MODES:
        reward = build(value_from, lora, dtype=dtype).reward
        assert reward is not None
        scores.append(reward.scores(IDS, ONES))
    assert all(torch.equal(s, scores[0]) for s in scores)


def test_a_value_from_the_policy_starts_with_its_features(lora: Any, build: Callable[..., Roles]) -> None:
    roles = build("policy", lora)
    assert isinstance(roles.value.part, ScalarModel)
    hidden_BTD = roles.policy.hidden(BATCH).detach()
    assert torch.equal(roles.value.part.hidden(BATCH), hidden_BTD)
    move(roles.value)  # a copy, so the policy stays
    assert not torch.allclose(roles.value.part.hidden(BATCH), hidden_BTD, atol=1e-2)
    assert torch.equal(roles.policy.hidden(BATCH), hidden_BTD)


@pytest.mark.parametrize("value_from", ["policy", "trunk", "frozen_trunk"])
def test_ppo_without_a_reward_model(value_from: str, lora: Any, build: Callable[..., Roles]) -> None:
    assert build(value_from, lora, reward_path=None).reward is None
    with pytest.raises(ModelError, match="needs a reward model"):
        build("reward", lora, reward_path=None)


def test_the_head_is_no_part_of_the_saved_policy(lora: Any, build: Callable[..., Roles], tmp_path: Path) -> None:
    roles = build("trunk", lora)
    names = {n.replace(".base_layer.", ".") for n in roles.policy.base.state_dict() if ".lora_" not in n}
    save_policy(roles.policy.model, roles.policy.tokenizer, tmp_path / "saved")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert set(loaded.state_dict()) == names
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_a_new_head_draws_no_random_number(build: Callable[..., Roles]) -> None:
    build("trunk", None)
    after = torch.get_rng_state()
    torch.manual_seed(4)
    assert torch.equal(torch.get_rng_state(), after)


def test_values_are_float32_in_low_precision(build: Callable[..., Roles]) -> None:
    roles = build("trunk", LORA, dtype=torch.bfloat16)
    move(roles.value)
    hidden_BTD = roles.policy.hidden(BATCH)
    head: Any = roles.value.part.model
    exact_BT = (hidden_BTD.double() @ head.weight.double().T).squeeze(-1) + head.bias.double()
    assert (roles.value.values(BATCH) - exact_BT).abs().max() < 1e-6  # bfloat16 would be off by 1e-3
