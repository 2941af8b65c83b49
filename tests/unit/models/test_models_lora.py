from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_tiny import make_model, make_tokenizer

from heedful.errors import ModelError
from heedful.models.export import save_reward
from heedful.models.load import load_causal, load_scalar, load_tokenizer
from heedful.models.lora import add_lora, base_of, is_adapted, merged_state, num_merged
from heedful.models.roles import Roles, build_policy, build_roles, build_scalar
from toy_parts import BATCH, IDS

CPU = torch.device("cpu")
LORA = SimpleNamespace(rank=4, alpha=8.0, targets="all-linear", dropout=0.0, base="float")
ONES = torch.ones_like(IDS)


def move(model: Any, seed: int = 0) -> None:
    """A known non-zero update of everything that is trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def reward_folder(folder: Callable[..., Path], tmp_path: Path) -> Path:
    base = folder("Llama", name="sft", seed=5)
    model = load_scalar(base, dtype=torch.float32, device=CPU, head="new", seed=3)
    save_reward(model, load_tokenizer(base), tmp_path / "reward", score_mean=0.0, score_std=1.0)
    return tmp_path / "reward"


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2"])
def test_adapters_are_float32_and_the_base_is_frozen(kind: str, folder: Callable[..., Path]) -> None:
    model = load_causal(folder(kind), dtype=torch.bfloat16, device=CPU)
    assert not is_adapted(model) and num_merged(model) == 0
    adapted = add_lora(model, rank=4, alpha=8, task="causal")
    assert is_adapted(adapted) and base_of(adapted) is model
    for name, parameter in adapted.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name


def test_scalar_models_train_their_head_too(reward_folder: Path) -> None:
    value = build_scalar(reward_folder, lora=LORA, device=CPU, dtype=torch.bfloat16)
    trained = value.trainable_parameters()
    heads = [n for n in trained if "lora_" not in n]
    assert heads == ["base_model.model.score.modules_to_save.default.weight"]
    assert all(p.dtype == torch.float32 for p in trained.values())


@pytest.mark.parametrize("targets", ["q_proj, v_proj", ["q_proj", "v_proj"]])
def test_named_targets(targets: Any, folder: Callable[..., Path]) -> None:
    model = load_causal(folder(), dtype=torch.float32, device=CPU)
    model = add_lora(model, rank=2, alpha=4, targets=targets, task="causal")
    assert num_merged(model) == 4


def test_targets_that_do_not_exist_are_named(folder: Callable[..., Path]) -> None:
    model = load_causal(folder(), dtype=torch.float32, device=CPU)
    with pytest.raises(ModelError, match="no_such_layer"):
        add_lora(model, rank=2, alpha=4, targets="no_such_layer", task="causal")


def test_adapters_on_the_output_layer_are_refused(folder: Callable[..., Path]) -> None:
    """Log-probs are computed from the layer's weight, so such an adapter would never act and never learn."""
    model = load_causal(folder("Qwen2"), dtype=torch.float32, device=CPU)
    with pytest.raises(ModelError, match="output layer"):
        add_lora(model, rank=2, alpha=4, targets="q_proj, lm_head", task="causal")


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2"])
def test_EXP_07_merged_is_base_plus_scaled_BA_exactly(kind: str, folder: Callable[..., Path]) -> None:
    path = folder(kind)
    before = load_causal(path, dtype=torch.float32, device=CPU).state_dict()
    model = add_lora(load_causal(path, dtype=torch.float32, device=CPU), rank=4, alpha=6, task="causal")
    move(model)
    merged = dict(merged_state(model))
    assert merged.keys() == before.keys()
    adapters = dict(model.named_parameters())
    expected_changed = set()
    for name in adapters:
        if ".lora_A." in name:
            stem = name.removeprefix("base_model.model.").split(".lora_A.")[0]
            delta = adapters[name.replace("lora_A", "lora_B")] @ adapters[name] * (6 / 4)
            delta = delta.T if kind == "GPT2" else delta
            assert torch.equal(merged[stem + ".weight"], before[stem + ".weight"] + delta), stem
            expected_changed.add(stem + ".weight")
    changed = {n for n in before if not torch.equal(before[n], merged[n])}
    assert changed == expected_changed and num_merged(model) == len(changed) > 0


def test_EXP_07_merging_leaves_the_live_model_alone_and_rounds_once(folder: Callable[..., Path]) -> None:
    path = folder("Qwen2")
    model = add_lora(load_causal(path, dtype=torch.bfloat16, device=CPU), rank=4, alpha=8, task="causal")
    move(model)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    low, high = dict(merged_state(model)), dict(merged_state(model, dtype=torch.float32))
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    for name in high:
        assert high[name].dtype == torch.float32 and low[name].dtype == torch.bfloat16
        assert torch.equal(high[name].bfloat16(), low[name])


def test_EXP_07_nothing_to_merge_is_an_error(folder: Callable[..., Path]) -> None:
    import peft

    config = peft.IA3Config(task_type="CAUSAL_LM")  # an adapter of another kind: none of its layers is low-rank
    model = peft.get_peft_model(load_causal(folder(), dtype=torch.float32, device=CPU), config)
    with pytest.raises(ModelError, match="0 tensors"):
        dict(merged_state(model))


def test_a_plain_models_state_is_its_own(tokenizer: Any) -> None:
    model = make_model("Llama", tokenizer)
    state = model.state_dict()
    assert all(torch.equal(state[n], t) for n, t in merged_state(model))


@pytest.fixture(params=["lora", "full"])
def lora(request: pytest.FixtureRequest) -> Any:
    return LORA if request.param == "lora" else None


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def roles(request: pytest.FixtureRequest, lora: Any, folder: Callable[..., Path], reward_folder: Path) -> Roles:
    return build_roles(
        folder("Llama", name="sft"), reward_folder, policy_lora=lora, value_lora=lora, device=CPU, dtype=request.param
    )


def test_reference_is_exactly_the_policy_at_the_start(roles: Roles) -> None:
    own, _ = roles.policy.logprobs(BATCH, temperature=0.8)
    reference, _ = roles.reference.logprobs(BATCH, temperature=0.8)
    assert own.requires_grad and not reference.requires_grad
    assert torch.equal(own.detach(), reference)


def test_reward_and_reference_stay_while_policy_and_value_move(roles: Roles, lora: Any) -> None:
    reference, _ = roles.reference.logprobs(BATCH)
    scores = roles.reward.scores(IDS, ONES)
    assert torch.equal(roles.value.part.scores(IDS, ONES).detach(), scores)
    trained = [set(p.trainable_parameters()) for p in (roles.policy, roles.value)]
    move(roles.policy.model)
    move(roles.value.part.model)
    assert torch.equal(roles.reference.logprobs(BATCH)[0], reference)
    assert torch.equal(roles.reward.scores(IDS, ONES), scores)
    assert not torch.allclose(roles.policy.logprobs(BATCH)[0], reference, atol=1e-2)
    assert not torch.allclose(roles.value.part.scores(IDS, ONES), scores, atol=1e-2)
    assert [set(p.trainable_parameters()) for p in (roles.policy, roles.value)] == trained
    assert (roles.reference.part is roles.policy) == (roles.reward.part is roles.value.part) == (lora is not None)


def test_values_are_in_units_of_the_standardised_score(folder: Callable[..., Path], reward_folder: Path) -> None:
    roles = build_roles(
        folder("Llama", name="sft"), reward_folder, policy_lora=None, value_lora=None, device=CPU, dtype=torch.float32,
        value_shift=0.5, value_scale=2.0,
    )  # fmt: skip
    assert torch.allclose(roles.value.values_after(IDS), (roles.reward.scores(IDS, ONES) - 0.5) / 2.0)
    assert torch.allclose(roles.value.values(BATCH), (roles.value.part.values(BATCH) - 0.5) / 2.0)


def test_trained_weights_are_float32_and_twins_frozen(roles: Roles, lora: Any) -> None:
    for part in (roles.policy, roles.value.part):
        assert all(p.dtype == torch.float32 for p in part.trainable_parameters().values())
    if lora is None:
        assert roles.reference.part.trainable_parameters() == roles.reward.part.trainable_parameters() == {}


def test_gradients_reach_the_policy_across_a_reference_call(roles: Roles) -> None:
    """Switching adapters off and on between forward and backward must not cut the graph."""
    own, _ = roles.policy.logprobs(BATCH)
    roles.reference.logprobs(BATCH)
    own.sum().backward()
    with_gradient = [n for n, p in roles.policy.trainable_parameters().items() if p.grad is not None]
    assert with_gradient == list(roles.policy.trainable_parameters())


def test_shared_base_equals_separate_models(folder: Callable[..., Path], reward_folder: Path) -> None:
    arguments: dict[str, Any] = {"device": CPU, "dtype": torch.float32}
    sft = folder("Llama", name="sft")
    shared = build_roles(sft, reward_folder, policy_lora=LORA, value_lora=LORA, **arguments)
    apart = build_roles(sft, reward_folder, policy_lora=None, value_lora=None, **arguments)
    for one, other in (
        (shared.policy.logprobs(BATCH)[0], apart.policy.logprobs(BATCH)[0]),
        (shared.reference.logprobs(BATCH)[0], apart.reference.logprobs(BATCH)[0]),
        (shared.value.values(BATCH), apart.value.values(BATCH)),
        (shared.reward.scores(IDS, ONES), apart.reward.scores(IDS, ONES)),
    ):
        assert torch.equal(one, other)


def test_PPO_08_dropout_in_the_config_changes_no_logprob(folder: Callable[..., Path]) -> None:
    path = folder("GPT2", attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)
    policy = build_policy(path, lora=None, device=CPU, dtype=torch.float32)
    policy.model.train()
    old, new = (policy.logprobs(BATCH)[0].detach() for _ in range(2))
    assert torch.equal(old, new)


def test_roles_need_a_reward_model(folder: Callable[..., Path]) -> None:
    path = folder("Llama", name="sft", tokenizer=make_tokenizer())
    with pytest.raises(ModelError, match="no score head"):
        build_roles(path, path, policy_lora=None, value_lora=None, device=CPU, dtype=torch.float32)
