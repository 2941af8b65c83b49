"""One frozen language model for every part of PPO: adapters and heads are all that the parts have of their own.

    policy     adapter "default", trained         the language model's output layer
    reference  none: the SFT policy itself        the same
    reward     adapter "reward" or none, frozen   its score head, frozen
    value      adapter "value", trained           a score head, trained

The value's adapter and head start as copies of the reward's. A reward model without an adapter is one whose head alone
was trained; the value's adapter is then new, as the policy's is.

The base is the SFT policy as it was saved, and fits a reward model that the reward stage has trained on it with LoRA:
the folder of that one must hold, weight by weight, what base and adapter give together. A base in few bits
(``lora.base``) is then the one that the reward model was trained on, to the bit; its rounding moves no score.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, final

import torch
from torch import Tensor, nn

from heedful.errors import ModelError
from heedful.models.folders import quiet
from heedful.models.heads import load_heads
from heedful.models.load import (
    HEAD_NAMES,
    draw_head,
    load_causal,
    load_tokenizer,
    read_head,
    saved_tensors,
    scalar_head,
)
from heedful.models.lora import Adapters, adapter_of, add_lora, merged_state, one_list
from heedful.models.parts import LanguageModel, ScalarModel
from heedful.models.quantise import Rounding

POLICY, VALUE, REWARD = "default", "value", "reward"
"""Names of adapters; PEFT saves the first one at the top of a folder."""


class LoraSettings(Protocol):
    """What a recipe says about adapters (``config.section.LoraConfig``)."""

    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def targets(self) -> str: ...
    @property
    def base(self) -> Literal["float", "int8", "nf4"]: ...


@final
@dataclass(frozen=True)
class SharedParts:
    """The parts on one base."""

    policy: LanguageModel
    reference: LanguageModel
    value: ScalarModel
    reward: ScalarModel | None


def shared_parts(
    policy_path: Path | str,
    reward_path: Path | str | None,
    *,
    lora: LoraSettings,
    value_is_reward: bool,
    device: torch.device,
    dtype: torch.dtype,
    attention: str = "auto",
    new_reward_head: bool = False,
    rounding: Rounding | None = None,
) -> SharedParts:
    """All parts on the policy's base, which is held once, in the compute precision.

    Args:
        lora: of the policy's adapter, and of the value's where that does not start as the reward's.
        value_is_reward: the value starts as the reward model; otherwise as the policy with a head of 0.
        new_reward_head: ``reward_path`` is a language model's; a random head on the base stands in for a reward model.
        rounding: measures what few bits do to the base, where ``lora.base`` asks for them.

    Raises:
        ModelError: a reward model that is not an adapter and a head on this very policy, or an architecture whose
            classifier has another trunk than its language model, or few bits that change too much.
    """
    causal = load_causal(policy_path, dtype=dtype, device=device, attention=attention)
    model = add_lora(causal, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, task="causal")
    adapter = None if reward_path is None or new_reward_head else Path(reward_path) / "adapter"
    trained_adapter = adapter is not None and adapter.is_dir()
    if trained_adapter:
        assert adapter is not None
        _add_saved(model, adapter)
    if trained_adapter and value_is_reward:
        _add_copy(model)
    else:
        model.add_adapter(VALUE, copy.deepcopy(model.peft_config[POLICY]))
    now = one_list(model)
    _train_only(model, (POLICY, VALUE))

    def part(kind: Any, of: Any, path: Path | str, *names: str) -> Any:
        return kind(of, load_tokenizer(path), device, dtype, adapters=Adapters(names, now))

    reference = part(LanguageModel, model, policy_path)
    if lora.base != "float":  # after the last adapter, which goes on float layers only
        (rounding or Rounding()).hold(lora.base, {"policy": reference}, key="lora.base", trained=True)
    reward = None
    if reward_path is not None:
        reward = part(ScalarModel, _scorer(causal, device), reward_path, *[REWARD] * trained_adapter)
        reward.freeze_head()
        if new_reward_head:
            draw_head(scalar_head(reward.base), seed=0)
        else:
            read_head(reward.base, reward_path)
            _require_same_base(model, reward, Path(reward_path), Path(policy_path))
            reward.heads = load_heads(reward_path, device)
    value_path = reward_path if reward_path is not None and value_is_reward else policy_path
    value = part(ScalarModel, _scorer(causal, device), value_path, VALUE)
    if reward is not None and value_is_reward:
        scalar_head(value.base).load_state_dict(scalar_head(reward.base).state_dict())
    return SharedParts(part(LanguageModel, model, policy_path, POLICY), reference, value, reward)


def _add_saved(model: Any, folder: Path) -> None:
    """Put the saved adapter of a reward model on the language model; its head is read elsewhere."""
    import peft

    try:
        with quiet():
            config = peft.LoraConfig.from_pretrained(str(folder))
            config.modules_to_save, config.task_type, config.inference_mode = None, "CAUSAL_LM", False
            with _same_random_stream(model):
                model.add_adapter(REWARD, config)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{folder}: this adapter cannot be used ({' '.join(str(error).split())[:200]})") from error
    own = _adapter_weights(model, REWARD)
    saved = {name: read for name, read in saved_tensors(folder).items() if ".lora_" in name}
    odd = own.keys() ^ saved.keys()
    if odd:
        raise ModelError(f"{folder}: {min(odd)} is not both in this adapter and in the policy; train the reward again")
    for name, parameter in own.items():
        _copy(parameter, saved[name](), f"{folder}: {name}")


def _add_copy(model: Any) -> None:
    """The value's adapter, as the reward's is now."""
    with _same_random_stream(model):
        model.add_adapter(VALUE, copy.deepcopy(model.peft_config[REWARD]))
    start = _adapter_weights(model, REWARD)
    for name, parameter in _adapter_weights(model, VALUE).items():
        _copy(parameter, start[name], name)


def _same_random_stream(model: Any) -> Any:
    """New adapters are drawn, though these are filled at once."""
    device = next(model.parameters()).device
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def _adapter_weights(model: Any, adapter: str) -> dict[str, nn.Parameter]:
    """Parameters of one adapter by the names that they have in a folder, which leave out the adapter's."""
    found = {name: p for name, p in model.named_parameters() if adapter_of(name) == adapter}
    return {name.replace(f".{adapter}.", "."): p for name, p in found.items()}


@torch.no_grad()
def _copy(parameter: Tensor, weights: Tensor, what: str) -> None:
    if parameter.shape != weights.shape:
        raise ModelError(f"{what} has the shape {list(weights.shape)}, and {list(parameter.shape)} is needed")
    parameter.copy_(weights)


def _train_only(model: Any, adapters: tuple[str, ...]) -> None:
    """Once and for all; nothing that switches adapters changes it."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(adapter_of(name) in adapters)


def _scorer(causal: Any, device: torch.device) -> Any:
    """A sequence classifier around the trunk of a language model; its own is a head of zeros alone.

    Raises:
        ModelError: no classifier of this architecture, or one with another trunk.
    """
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(causal.config)
    config.num_labels, config.problem_type = 1, "regression"
    kernel = causal.config._attn_implementation
    try:
        with quiet(), torch.device("meta"):
            scorer = AutoModelForSequenceClassification.from_config(config, attn_implementation=kernel)
    except ValueError:
        raise ModelError(f"transformers has no sequence classifier for type {config.model_type}") from None
    prefix, trunk = scorer.base_model_prefix, causal.base_model
    if prefix != causal.base_model_prefix or type(scorer.base_model) is not type(trunk):
        raise ModelError(f"{type(scorer).__name__} has another trunk than {type(causal).__name__}, so they share none")
    setattr(scorer, prefix, trunk)
    head = scalar_head(scorer).to_empty(device=device).float()
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    odd = [name for name, p in scorer.named_parameters() if p.device.type == "meta"]
    if odd:
        raise ModelError(f"{type(scorer).__name__} has {odd[0]} beside trunk and head, so it cannot share a trunk")
    return scorer.eval()


def _require_same_base(model: Any, reward: ScalarModel, path: Path, policy_path: Path) -> None:
    """The reward model as it was saved is base, adapter and head.

    Raises:
        ModelError: some weight of it is another.
    """
    assert reward.adapters is not None
    left = {name: read for name, read in saved_tensors(path).items() if name.split(".")[0] not in HEAD_NAMES}
    odd: str | None = None
    with reward.adapters.acting(reward.adapters.names or (VALUE,)):  # a new adapter is 0
        for name, ours in merged_state(model, dtype=torch.float32):
            if name not in left:
                continue  # the language model's output layer
            theirs = left.pop(name)().to(ours.device)
            if not reward.adapters.names:  # was trained and saved beside a trunk in float32
                theirs = theirs.to(reward.dtype)
            if ours.shape != theirs.shape or not torch.allclose(theirs.float(), ours, rtol=1e-5, atol=1e-5):
                odd = name
                break
    if odd or left:
        raise ModelError(
            f"{path} is not an adapter and a head on {policy_path} (its {odd or min(left)} is another), as ppo.roles: "
            f"shared needs; train the reward model from this policy with reward.lora, in the same model.dtype and on "
            f"the same lora.base"
        )
