"""Who plays which part in PPO, and the only place that knows which of them share weights.

    with LoRA     policy = base + adapters            reference = the same base, adapters off
                  value  = reward base + adapters     reward    = the same base and the original head, adapters off
    without LoRA  four models
    separate      four models, with LoRA or without
    shared        one base: see ``models/shared.py``

A value that does not start as the reward model leaves that one alone: it is a second copy of the policy with a scalar
head (policy), or nothing but a head on the policy's trunk (trunk, frozen_trunk).

Either way the reference computes by the same path as the policy (same autocast, same casts), so that the KL at
step 0 is exactly 0. In few bits that is so under adapters, where policy and reference have the same rounded base, even
apart; beside a policy that is trained in float32 the reference is its int8 copy, and the KL starts at what the rounding
makes of it. A reward model under the value's adapters has the value's base, one of its own has none of ``lora.base``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor

from heedful.batches import TokenBatch
from heedful.errors import ModelError
from heedful.models.casts import keep_casts
from heedful.models.heads import load_heads
from heedful.models.load import load_causal, load_scalar, load_tokenizer
from heedful.models.lora import add_lora, is_adapted
from heedful.models.offload import Offload, Offloaded
from heedful.models.output import Head
from heedful.models.parts import LanguageModel, Part, ScalarModel
from heedful.models.quantise import Rounding, quantise
from heedful.models.recompute import recompute_activations
from heedful.models.shared import LoraSettings, shared_parts
from heedful.models.value import TrunkHead, Value
from heedful.records import Message

ValueFrom = Literal["reward", "policy", "trunk", "frozen_trunk"]
"""Own model that starts as the reward model or as the policy, or a head on the policy's trunk, trained or frozen."""


Sharing = Literal["separate", "shared", "trunk"]
"""No part shares a weight with another, all sit on one base, or policy and value share a trunk."""


@final
@dataclass(frozen=True)
class Reference:
    """The policy as it was at the start: the policy's own base without adapters, or a frozen model of its own."""

    part: LanguageModel
    is_exact: bool = True
    """Computes as the policy does at the start; False for the int8 copy of a policy that is trained in float32"""
    offloaded: Offloaded | None = None
    """Its weights, where they wait elsewhere"""

    def logprobs(
        self, batch: TokenBatch, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`LanguageModel.logprobs`, without gradient."""
        with torch.no_grad(), self.part.reference():
            return self.part.logprobs(batch, temperature=temperature, with_entropy=with_entropy)

    def hidden(self, batch: TokenBatch) -> Tensor:
        """As :meth:`LanguageModel.hidden`, without gradient."""
        with torch.no_grad(), self.part.reference():
            return self.part.hidden(batch)

    @property
    def head(self) -> Head:
        """The output layer; no adapter acts on it."""
        if self.offloaded is not None:
            self.offloaded.arrive()
        return self.part.head

    def logprobs_of(
        self, hidden_BTD: Tensor, batch: TokenBatch, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`LanguageModel.logprobs_of`, without gradient."""
        if self.offloaded is not None:
            self.offloaded.arrive()
        with torch.no_grad(), self.part.reference():
            return self.part.logprobs_of(hidden_BTD, batch, temperature=temperature, with_entropy=with_entropy)


@final
@dataclass(frozen=True)
class Reward:
    """The reward model: the value model's own base and original head without adapters, or a frozen model of its own."""

    part: ScalarModel

    def scores(self, ids_NT: Tensor, attention_mask_NT: Tensor) -> Tensor:
        """As :meth:`ScalarModel.scores`, without gradient."""
        with torch.no_grad(), self.part.reference():
            return self.part.scores(ids_NT, attention_mask_NT)

    def score_texts(
        self, prompts: Sequence[Sequence[Message]], answers: Sequence[str], *, micro_batch_tokens: int
    ) -> list[float]:
        """As :meth:`ScalarModel.score_texts`."""
        return [row[0] for row in self.output_texts(prompts, answers, micro_batch_tokens=micro_batch_tokens)]

    def output_texts(
        self, prompts: Sequence[Sequence[Message]], answers: Sequence[str], *, micro_batch_tokens: int
    ) -> list[list[float]]:
        """As :meth:`ScalarModel.output_texts`."""
        with self.part.reference():
            return self.part.output_texts(prompts, answers, micro_batch_tokens=micro_batch_tokens)


@dataclass(frozen=True)
class Roles:
    """The four parts of PPO."""

    policy: LanguageModel
    reference: Reference
    value: Value
    reward: Reward | None
    """None where no reward model was given: the reward then comes from elsewhere"""
    rounding: Rounding = field(default_factory=Rounding)
    """What holds frozen weights in few bits, and what that has changed"""
    offload: Offload = field(default_factory=lambda: Offload(wanted=False))
    """Frozen models that wait outside of the device's memory"""


def build_policy(
    path: Path | str,
    *,
    lora: LoraSettings | None,
    device: torch.device,
    dtype: torch.dtype,
    attention: str = "auto",
    trained: bool = True,
    weights: torch.dtype | None = None,
    rounding: Rounding | None = None,
) -> LanguageModel:
    """A language model part. Trained weights are float32; under adapters the frozen base is in the compute dtype.

    Args:
        lora: adapters, on a base in few bits where ``lora.base`` says so.
        trained: False without ``lora`` gives the frozen twin, which computes as the trained one does to the bit (see
            :mod:`~heedful.models.casts`).
        weights: a dtype to hold them all in instead.
        rounding: measures what few bits do to the base.

    Raises:
        ModelError: no such model, or a base that few bits change too much.
    """
    held = weights or (torch.float32 if lora is None else dtype)
    model = load_causal(path, dtype=held, device=device, attention=attention)
    model = _with_trained_weights(model, lora, trained, task="causal")
    part = LanguageModel(model, load_tokenizer(path), device, dtype)
    if lora is not None and lora.base != "float":
        (rounding or Rounding()).hold(lora.base, {"policy": part}, key="lora.base", trained=True)
    if weights is None and not trained:
        keep_casts(part)
    return part


def build_scalar(
    path: Path | str,
    *,
    lora: LoraSettings | None,
    device: torch.device,
    dtype: torch.dtype,
    attention: str = "auto",
    new_head: bool = False,
    seed: int = 0,
    trained: bool = True,
    weights: torch.dtype | None = None,
    rounding: Rounding | None = None,
    judges: bool = False,
) -> ScalarModel:
    """A reward or value part: from a reward folder, or with ``new_head`` from a language model's folder.

    Args:
        lora, trained, weights, rounding: as in :func:`build_policy`.
        judges: without its adapters it is a reward model, whose scores few bits may not move far.

    Raises:
        ModelError: as :func:`build_policy`.
    """
    held = weights or (torch.float32 if lora is None else dtype)
    model = load_scalar(
        path, dtype=held, device=device, attention=attention, head="new" if new_head else "required", seed=seed
    )
    model = _with_trained_weights(model, lora, trained, task="scalar")
    part = ScalarModel(model, load_tokenizer(path), device, dtype)
    part.heads = None if new_head else load_heads(path, device)
    if lora is not None and lora.base != "float":
        (rounding or Rounding()).hold(lora.base, {"reward": part}, key="lora.base", trained=not judges)
    if weights is None and not trained:
        keep_casts(part)
    return part


def build_reward(
    path: Path | str, *, device: torch.device, dtype: torch.dtype, attention: str = "auto",
    rounding: Rounding | None = None, name: str = "reward",
) -> Reward:  # fmt: skip
    """A frozen reward model of its own, its head with one output or several, with the heads that it was made of.

    ``rounding`` holds it as that says frozen weights are held, and measures it by ``name``.
    """
    model = load_scalar(path, dtype=dtype, device=device, attention=attention, head="any").requires_grad_(False)
    part = ScalarModel(model, load_tokenizer(path), device, dtype, any_outputs=True)
    part.heads = load_heads(path, device)
    if rounding is not None and rounding.frozen == "int8":
        rounding.hold("int8", {name: part})
    return Reward(part)


def _with_trained_weights(
    model: Any, lora: LoraSettings | None, trained: bool, *, task: Literal["causal", "scalar"]
) -> Any:
    """The model with adapters to train, with all its weights to train, or frozen."""
    if lora is not None:
        return add_lora(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, task=task)
    return model if trained else model.requires_grad_(False)


def build_roles(
    policy_path: Path | str,
    reward_path: Path | str | None,
    *,
    policy_lora: LoraSettings | None,
    value_lora: LoraSettings | None,
    value_from: ValueFrom = "reward",
    device: torch.device,
    dtype: torch.dtype,
    attention: str = "auto",
    value_shift: float = 0.0,
    value_scale: float = 1.0,
    activation_checkpointing: bool = False,
    new_reward_head: bool = False,
    sharing: Sharing | None = None,
    rounding: Rounding | None = None,
    offload_frozen: bool = False,
) -> Roles:
    """The parts of PPO from an SFT policy's folder and, where there is one, a reward model's folder.

    Args:
        value_from: what the value starts as; new heads start at zero.
        value_shift, value_scale: mean and deviation that the reward model's scores are standardised by (see
            :class:`Value`); of no meaning to a value that does not start as the reward model.
        activation_checkpointing: of every trained model (see :func:`recompute_activations`).
        new_reward_head: ``reward_path`` is a language model's, which a random head makes a stand-in.
        sharing: None shares bases where adapters allow it, as the table above says; on one base a value that starts as
            the reward has that one's adapter, and ``value_lora`` says nothing.
        rounding: holds frozen weights as it says, those under adapters too where ``lora.base`` leaves them in float,
            and measures what that changes, and what ``lora.base`` does.
        offload_frozen: frozen models of their own wait elsewhere (see :mod:`~heedful.models.offload`).

    Raises:
        ModelError: a folder that does not hold what its part needs, no reward model for a value that starts as it, or
            few bits that change too much.
    """
    if value_from == "reward" and reward_path is None:
        raise ModelError("value_from: reward needs a reward model and there is none; take value_from: policy or trunk")
    rounding = rounding or Rounding()
    hardware: dict[str, Any] = {"device": device, "dtype": dtype, "attention": attention}
    policy: LanguageModel
    reference: LanguageModel
    value: ScalarModel | TrunkHead
    reward: ScalarModel | None
    offload, waiting = Offload(wanted=offload_frozen), None
    if sharing == "shared":
        if policy_lora is None:
            raise ModelError("parts on one base need adapters; give policy_lora")
        parts = shared_parts(
            policy_path, reward_path, lora=policy_lora, value_is_reward=value_from == "reward",
            new_reward_head=new_reward_head, rounding=rounding, **hardware,
        )  # fmt: skip
        policy, reference, value, reward = parts.policy, parts.reference, parts.value, parts.reward
        if rounding.frozen == "int8":
            rounding.hold("int8", {"reference": reference, "reward": reward})
    else:
        apart = sharing == "separate"
        policy, reference = _policy_and_reference(policy_path, policy_lora, apart, rounding, **hardware)
        waiting = None if reference is policy else offload.take(reference)
        value, reward = _value_and_reward(
            policy, policy_path, reward_path, value_lora, value_from, apart, rounding, new_reward_head, **hardware
        )
        if reward is not None and reward is not value:
            offload.take(reward)
    if activation_checkpointing:
        for part in (policy, value):
            if isinstance(part, Part):
                recompute_activations(part)
    starts_as_reward = value_from == "reward"
    return Roles(
        policy,
        Reference(reference, rounding.frozen == "float" or is_adapted(policy.model), waiting),
        Value(value, value_shift, value_scale) if starts_as_reward else Value(value),
        None if reward is None else Reward(reward),
        rounding,
        offload,
    )


def _policy_and_reference(
    path: Path | str, lora: LoraSettings | None, apart: bool, rounding: Rounding, **hardware: Any
) -> tuple[LanguageModel, LanguageModel]:
    """``apart``: the reference is a model of its own although adapters allow one base."""
    policy = build_policy(path, lora=lora, rounding=rounding, **hardware)
    reference = policy
    if not is_adapted(policy.model) or apart:
        held = torch.float32 if lora is None else hardware["dtype"]
        reference = build_policy(path, lora=None, trained=False, weights=held, **hardware)
        if lora is not None and lora.base != "float":
            quantise(reference, lora.base)
    if rounding.frozen == "int8":  # before the next model is loaded
        rounding.hold("int8", {"reference": reference})
        quantise(policy, "int8")
    keep_casts(reference)
    return policy, reference


def _value_and_reward(
    policy: LanguageModel, policy_path: Path | str, reward_path: Path | str | None, lora: LoraSettings | None,
    value_from: ValueFrom, apart: bool, rounding: Rounding, new_reward_head: bool, **hardware: Any,
) -> tuple[ScalarModel | TrunkHead, ScalarModel | None]:  # fmt: skip
    """``apart``: as in :func:`_policy_and_reference`."""
    value: ScalarModel | TrunkHead
    reward: ScalarModel | None = None
    if value_from in ("trunk", "frozen_trunk"):
        value = TrunkHead(policy, frozen=value_from == "frozen_trunk")
    elif value_from == "policy":
        value = build_scalar(policy_path, lora=lora, new_head=True, **hardware)
        value.set_head(torch.zeros(1, device=policy.device))
    else:
        assert reward_path is not None
        judges = lora is not None and not apart
        value = build_scalar(
            reward_path, lora=lora, new_head=new_reward_head, judges=judges,
            rounding=rounding if judges and not new_reward_head else None, **hardware,
        )  # fmt: skip
        reward = value if judges else None
    if rounding.frozen == "int8" and reward is None and isinstance(value, ScalarModel):
        quantise(value, "int8")
    if reward is None and reward_path is not None:
        held = torch.float32 if lora is None else hardware["dtype"]
        reward = build_scalar(reward_path, lora=None, trained=False, weights=held, new_head=new_reward_head, **hardware)
    if rounding.frozen == "int8":
        rounding.hold("int8", {"reward": reward})
    if reward is not None:
        keep_casts(reward)
    return value, reward
