"""The recipe: every field of a run, the important ones first, with its unit and the reason for its default.

Three words for batch sizes, everywhere: ``prompts_per_step`` (prompts, demonstrations or rankings in one optimizer or
PPO step), ``samples_per_prompt`` and ``micro_batch_tokens`` (padded tokens in one forward pass on one device).
Everything else is derived here and printed at the start of a run.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

STAGES = ("sft", "reward", "ppo", "evaluate")
Stage = Literal["sft", "reward", "ppo", "evaluate"]


class Section(BaseModel):
    """Base of every part of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


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


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak rate."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """After the warm-up: constant, or down to zero at the last optimizer step."""
    warmup_fraction: Fraction = 0.1
    """Share of the optimizer steps in which the rate rises from zero."""
    weight_decay: NonNegative = 0.0
    """Decoupled decay on matrices; 0, since runs are short and start from a good model."""
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.95
    """Decay of the second moment; 0.95 follows changes faster than 0.999 in short runs."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    max_gradient_norm: Annotated[float, Field(gt=0)] = 1.0
    """The gradient of the whole step is scaled down to this norm."""


class FineTuneOptimizer(OptimizerConfig):
    """AdamW for supervised fine-tuning and the reward model."""

    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    """Peak rate; for all weights of a small model. Adapters take about ten times as much."""


class PolicyOptimizer(OptimizerConfig):
    """AdamW for the policy of PPO."""

    learning_rate: Annotated[float, Field(gt=0)] = 2e-6
    """Rate; an order below SFT's, since the data moves with the policy. Adapters take about a hundred times as much."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Constant, since PPO has no natural end."""
    warmup_fraction: Fraction = 0.0
    """No warm-up: the first advantages are as good as later ones."""


class ValueOptimizer(PolicyOptimizer):
    """AdamW for the value model of PPO."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Rate; above the policy's, since the value must follow it."""


class LoraConfig(Section):
    """Low-rank adapters; without this section all weights are trained."""

    rank: Positive = 16
    """Width of the update."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The update is scaled by alpha / rank."""
    targets: str = "all-linear"
    """Module names, comma-separated, or all-linear."""


class CheckpointConfig(Section):
    """When a stage saves itself."""

    every_steps: Positive = 10
    """Optimizer (SFT, reward) or PPO steps between checkpoints."""
    keep: Positive = 1
    """Complete checkpoints kept; an old one goes only when the new one is complete."""


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


class RewardConfig(Section):
    """The reward model: a scalar head on the SFT policy, read at the last token, trained on all pairs of a ranking."""

    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the rankings; more than one or two overfits."""
    prompts_per_step: Positive = 8
    """Rankings per optimizer step; all pairs of a ranking stay together and weigh as one prompt."""
    micro_batch_tokens: Positive = 4096
    """Padded tokens per forward; a ranking is never cut apart."""
    share_prompts: bool = True
    """Encode the prompt of a ranking once for all its answers in training, where the model's attention allows it."""
    max_tokens: Positive = 1024
    """Longest prompt + answer; longer answers are left out of their ranking and counted."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of labels taken to be wrong."""
    min_accuracy: Fraction = 0.70
    """The gate: PPO refuses a reward model below this held-out pair accuracy (see ppo.accept_weak_reward)."""
    evaluate_every_steps: Positive = 20
    """Optimizer steps between held-out evaluations; the last step has one of its own."""
    optimizer: FineTuneOptimizer = FineTuneOptimizer()
    lora: LoraConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()


class SamplingConfig(Section):
    """How the policy speaks during PPO."""

    max_new_tokens: Positive = 128
    """Length limit of an answer; a cut answer is marked as such and never given an end token that was not sampled."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits in the sampler and in every training log-prob alike, so that ratios stay exact."""


class KLConfig(Section):
    """The leash to the reference, per token inside the reward: −β·(log π − log π_ref)."""

    coefficient: NonNegative = 0.05
    """β at the start, in reward standard deviations per nat."""
    target: Annotated[float, Field(gt=0)] | None = None
    """Nats per answer; when set, β adapts towards it (Ziegler et al. 2019). None keeps β fixed."""
    horizon: Positive = 2000
    """Samples over which β moves; smaller moves faster."""
    kind: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimator in the reward; k1 is the only one whose policy gradient is that of the true KL."""


class PPOConfig(Section):
    """Proximal policy optimisation with four parts: policy, value, reference, reward."""

    steps: Positive = 100
    """PPO steps: one batch of answers each."""
    prompts_per_step: Positive = 32
    """Prompts answered per step."""
    samples_per_prompt: Positive = 1
    """Answers per prompt."""
    micro_batch_tokens: Positive = 4096
    """Padded tokens per forward in scoring and training."""
    epochs: Positive = 1
    """Passes over the answers of a step; more reuse, less stability."""
    minibatches: Positive = 1
    """Optimizer steps per pass."""
    sampling: SamplingConfig = SamplingConfig()
    kl: KLConfig = KLConfig()
    gamma: Fraction = 1.0
    """Discount; 1 since an answer has one reward at its end."""
    lam: Fraction = 0.95
    """GAE decay: 1 is unbiased and noisy, 0 trusts the value model alone."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below 1 − clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper bound on the loss of bad actions (Ye et al. 2020), in multiples of |advantage|; None = off."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Values move at most this far from the old ones per step; None = off."""
    value_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First PPO steps in which only the value model learns."""
    normalize_scores: bool = True
    """Scores are standardised by the reward card's mean and deviation, so that β means the same for every model."""
    score_clip: Annotated[float, Field(gt=0)] | None = 5.0
    """Standardised scores are clamped to ± this."""
    whiten_advantages: bool = True
    """Advantages of the step to mean 0 and variance 1 over all counted tokens."""
    missing_end_penalty: float = 1.0
    """Subtracted from the score of an answer that was cut by the length limit, in score deviations."""
    bootstrap_truncated: bool = False
    """A cut answer ends like a finished one (False), or its last value stands for the rest (True)."""
    accept_weak_reward: bool = False
    """Start although the reward model is below reward.min_accuracy."""
    optimizer: PolicyOptimizer = PolicyOptimizer()
    value_optimizer: ValueOptimizer = ValueOptimizer()
    lora: LoraConfig | None = None
    """Adapters for policy and value; the reference is then the policy with its adapters off, on the same base."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample_rows: Positive = 4
    """Answers per step kept in the sample table."""
    histogram_every_steps: Positive = 1
    """Steps between histograms."""

    @property
    def samples_per_step(self) -> int:
        """Answers per PPO step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def samples_per_minibatch(self) -> int:
        """Answers per optimizer step."""
        return self.samples_per_step // self.minibatches

    @model_validator(mode="after")
    def _fits(self) -> PPOConfig:
        if self.samples_per_step % self.minibatches:
            raise ValueError(
                f"minibatches ({self.minibatches}) must divide prompts_per_step × samples_per_prompt "
                f"({self.samples_per_step})"
            )
        if self.value_warmup_steps >= self.steps:
            raise ValueError(
                f"value_warmup_steps ({self.value_warmup_steps}) must be below steps ({self.steps}), or the policy "
                f"never learns"
            )
        if self.kl.target is not None and self.kl.coefficient == 0:
            raise ValueError("kl.target steers kl.coefficient, which must then start above 0")
        if self.kl.target is not None and self.kl.horizon < self.samples_per_step:
            raise ValueError(
                f"kl.horizon ({self.kl.horizon}) must be at least the answers of a step ({self.samples_per_step})"
            )
        return self


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
            if not self.reward and not self.model.reward:
                raise ValueError("the ppo stage needs a reward stage or model.reward")
            if not (self.data.prompts or self.data.rankings):
                raise ValueError("the ppo stage needs data.prompts or data.rankings")
        if self.evaluate:
            if not (self.ppo or self.sft):
                raise ValueError("the evaluate stage needs an sft or a ppo stage to judge")
            if not (self.data.heldout_prompts or self.data.rankings or self.data.heldout_rankings):
                raise ValueError("the evaluate stage needs data.heldout_prompts or data.rankings")
        return self
