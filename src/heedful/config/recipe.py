"""The recipe: every field of a run, the important ones first, with its unit and the reason for its default.

Three words for batch sizes, everywhere: ``prompts_per_step`` (prompts, demonstrations or rankings in one optimizer or
PPO step), ``samples_per_prompt`` and ``micro_batch_tokens`` (padded tokens in one forward pass on one device).
Everything else is derived here and printed at the start of a run.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from heedful.config.ppo import PPOConfig
from heedful.config.reward import RewardConfig
from heedful.config.section import (
    CheckpointConfig,
    FineTuneOptimizer,
    LoraConfig,
    NonNegative,
    Positive,
    Section,
)

STAGES = ("sft", "reward", "ppo", "evaluate")
Stage = Literal["sft", "reward", "ppo", "evaluate"]


class ModelConfig(Section):
    """The model that everything starts from."""

    name: str = "smollm2-135m"
    """Hub id, local folder, .gguf file or alias; the start of the SFT policy."""
    policy: str | None = None
    """Folder of an SFT policy that already exists; used where the recipe has no sft stage."""
    reward: str | None = None
    """Folder of a reward model that already exists; used where the recipe has no reward stage."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU), or a torch device such as cuda:1."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute precision; auto takes bfloat16 where the hardware has it. Trained weights stay float32 either way."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """Attention kernel of transformers; auto takes eager on CPU (faster for short sequences), sdpa elsewhere."""


class DataConfig(Section):
    """Where the texts are. Every file may be in any format that `heedful data inspect` recognises."""

    demonstrations: str | None = None
    """Conversations to imitate (SFT). package:NAME is a file that ships with heedful."""
    rankings: str | None = None
    """Ranked answers or preference pairs (reward model)."""
    prompts: str | None = None
    """Prompts that PPO answers; None takes the prompts of the training rankings."""
    heldout_prompts: str | None = None
    """Prompts for the evaluation, seen nowhere else; None takes the prompts of the held-out rankings."""
    heldout_rankings: str | None = None
    """Rankings for the reward card; None splits heldout_fraction off `rankings` by prompt."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of prompts held out where no held-out file is given; near-duplicate prompts stay on one side."""
    on_bad_row: Literal["error", "skip"] = "error"
    """error stops at the first bad row and names it; skip drops it and counts the reason."""
    max_prompt_tokens: Positive = 512
    """Longer prompts are left out and counted."""


class SFTConfig(Section):
    """Supervised fine-tuning on demonstrations; only the assistant's tokens are trained."""

    epochs: Annotated[float, Field(gt=0)] = 2.0
    """Passes over the demonstrations."""
    prompts_per_step: Positive = 16
    """Demonstrations per optimizer step."""
    micro_batch_tokens: Positive = 4096
    """Padded tokens per forward."""
    max_tokens: Positive = 1024
    """Longest conversation."""
    too_long: Literal["drop", "cut"] = "drop"
    """Longer conversations are dropped and counted, or cut without a trained end token."""
    packing: bool = False
    """Several samples in one row, without attention across them; pays off for many short samples on a GPU."""
    train_on: Literal["assistant", "last"] = "assistant"
    """Every assistant turn, or the last one only."""
    optimizer: FineTuneOptimizer = FineTuneOptimizer()
    lora: LoraConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()


class EvaluateConfig(Section):
    """Is the trained policy better than the SFT policy, on prompts that no stage has seen?"""

    max_prompts: Positive = 100
    """Held-out prompts answered."""
    max_new_tokens: Positive | None = None
    """Length limit; None takes ppo.sampling.max_new_tokens."""
    temperature: NonNegative = 1.0
    """1 judges the distribution that PPO trained; 0 is greedy."""
    gold: str | None = None
    """module:function that scores an answer (never used in training), or None."""
    batch_size: Positive = 32
    """Answers decoded together."""


class Recipe(Section):
    """A whole run."""

    name: Annotated[str, BeforeValidator(str), Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run's folder."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """One seed for data order, new heads and sampling; same seed, same machine, same result."""
    output: str = "runs"
    """Folder that holds the run folders."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    sft: SFTConfig | None = None
    """Leave a stage out by leaving its section out."""
    reward: RewardConfig | None = None
    ppo: PPOConfig | None = None
    evaluate: EvaluateConfig | None = None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that this recipe has, in order."""
        return tuple(s for s in STAGES if getattr(self, s) is not None)  # type: ignore[misc]

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Recipe:
        if not self.stages:
            raise ValueError(f"a recipe needs at least one stage: {', '.join(STAGES)}")
        if self.sft and not self.data.demonstrations:
            raise ValueError("the sft stage needs data.demonstrations")
        if self.reward and not self.data.rankings:
            raise ValueError("the reward stage needs data.rankings")
        if self.ppo:
            if self.ppo.uses_own_reward and not self.reward and not self.model.reward:
                raise ValueError(
                    "the ppo stage needs a reward stage or model.reward (or ppo.rewards without run:reward and another "
                    "ppo.value_from)"
                )
            if self.ppo.roles == "shared" and self.ppo.uses_own_reward:
                self._reward_is_adapter()
            if self.ppo.ptx and not (self.ppo.ptx.data or self.data.demonstrations):
                raise ValueError("ppo.ptx needs ppo.ptx.data or data.demonstrations")
            if self.ppo.best and self.ppo.best.by == "gold" and not (self.evaluate and self.evaluate.gold):
                raise ValueError("ppo.best.by gold needs evaluate.gold")
            if not (self.data.prompts or self.data.rankings):
                raise ValueError("the ppo stage needs data.prompts or data.rankings")
        if self.evaluate:
            if not (self.ppo or self.sft):
                raise ValueError("the evaluate stage needs an sft or a ppo stage to judge")
            if not (self.data.heldout_prompts or self.data.rankings or self.data.heldout_rankings):
                raise ValueError("the evaluate stage needs data.heldout_prompts or data.rankings")
        return self

    def _reward_is_adapter(self) -> None:
        """As far as can be known before anything is trained."""
        assert self.ppo is not None and self.ppo.lora is not None
        base = self.reward.lora.base if self.reward is not None and self.reward.lora is not None else "float"
        if self.reward is not None and base != self.ppo.lora.base:
            raise ValueError(
                f"ppo.roles: shared reads the reward model's adapter on the base that it was trained on; "
                f"reward.lora.base ({base}) and ppo.lora.base ({self.ppo.lora.base}) must be the same"
            )
        if self.reward is not None and self.reward.lora is None and self.reward.train != "head":
            raise ValueError(
                "ppo.roles: shared needs a reward model that is an adapter on the policy; set reward.lora (such as "
                "--reward.lora.rank 16)"
            )
        if self.reward is None and self.sft is not None:
            raise ValueError(
                "ppo.roles: shared needs a reward model that is an adapter on the policy, and model.reward cannot be "
                "one on what the sft stage has yet to train; add a reward stage with reward.lora, or give model.policy"
            )
