"""PPO: every control of the policy's training, in the order in which a practitioner reaches for them.

``docs/11-ppo.md`` explains each one, with the derivation where there is one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from heedful.config.section import (
    CheckpointConfig,
    Fraction,
    LoraConfig,
    NonNegative,
    PolicyOptimizer,
    Positive,
    Section,
    ValueOptimizer,
)

AboveZero = Annotated[float, Field(gt=0)]
AboveOne = Annotated[float, Field(gt=1)]
Scaling = Literal["card", "running", "batch", "none"]


def _word(name: str) -> str:
    if not name.isidentifier():
        raise ValueError("the name of a part is one word of letters, digits and _")
    return name


class SamplingConfig(Section):
    """How the policy speaks during PPO."""

    max_new_tokens: Positive = 128
    """Length limit of an answer; a cut answer is marked as such and never given an end token that was not sampled."""
    temperature: AboveZero = 1.0
    """Divides the logits in the sampler and in every training log-prob alike, so that ratios stay exact."""
    answers_together: Positive = 64
    """Answers decoded at once. Each more costs memory for its keys and values; all share one reading of the weights per
    token, which on a GPU is most of the time. An interrupted rollout is kept in parts of this size."""


class GuardConfig(Section):
    """Raise β while score and KL climb together (the mark of reward hacking), give it back when the alarm clears."""

    window_steps: Positive = 5
    """The alarm compares the mean of the last steps with that of as many before them."""
    score_rise: AboveZero = 0.5
    """Rise of the score between the two windows, in deviations of a step's scores, that counts as a climb."""
    kl_rise_nats: AboveZero = 2.0
    """Rise of the KL per answer between the two windows that counts as a climb."""
    factor: AboveOne = 1.5
    """β is multiplied by this at every step of the alarm, and divided by it at every step without."""
    limit: AboveOne = 10.0
    """β never exceeds this many times its unguarded value."""


class OutlierConfig(Section):
    """A stronger penalty for single answers far outside the batch's KL distribution."""

    threshold: AboveZero = 3.0
    """Robust deviations (1.4826 · median absolute deviation) above the median from which an answer is an outlier."""
    slope: AboveZero = 0.5
    """Weight added per deviation beyond the threshold."""
    max_weight: AboveOne = 4.0
    """No answer's β is multiplied by more than this."""


class KLConfig(Section):
    """The leash to the reference: how strong, where it acts, and what happens when it stretches."""

    coefficient: NonNegative = 0.05
    """β at the start, in reward standard deviations per nat."""
    target: AboveZero | None = None
    """Nats per answer; when set, β adapts towards it (Ziegler et al. 2019). None keeps β fixed."""
    horizon: Positive = 2000
    """Samples over which β moves; smaller moves faster."""
    in_reward: Literal["k1", "k2", "k3", "abs", "exact", "none"] = "k1"
    """Per-token penalty inside the reward. k1 alone gives the whole gradient of the KL. The others alone leave out that
    of the token itself (k3 and k2 to first order, exact wholly) and need in_loss: exact. exact costs a second output
    layer per token and is free of noise itself, but k1 cancels the score answer by answer near the optimum, exact only
    on average. See docs/11c-kl-placements.md for what each placement reaches."""
    in_loss: Literal["none", "k1", "k2", "k3", "abs", "exact"] = "none"
    """KL of the current token as a loss term; the reward then carries that of later tokens only. exact + exact is
    unbiased, as are k2 or exact here with k1 or k3 there. With in_reward: none the effect of a token on later ones is
    left out. k3 here follows KL(reference ‖ policy), abs the distance of the probabilities, k1 nothing (refused)."""
    guard: GuardConfig | None = None
    outliers: OutlierConfig | None = None
    stop_above_nats: AboveZero | None = None
    """The policy's remaining epochs of a step are left out once its KL to the policy that sampled (nats per token)
    exceeds this, before the update that would follow; 0.02 to 0.1 where several epochs drift. None = never."""

    @model_validator(mode="after")
    def _acts_somewhere(self) -> KLConfig:
        if self.in_loss == "k1":
            raise ValueError(
                "in_loss: k1 has an expected gradient of 0, so it would hold nothing back; take exact or k2"
            )
        if self.in_reward == self.in_loss == "none" and self.coefficient:
            raise ValueError("in_reward and in_loss are both none; set coefficient to 0 to train without a leash")
        if self.target is not None and self.coefficient == 0:
            raise ValueError("target steers coefficient, which must then start above 0")
        for name in ("guard", "outliers"):
            if getattr(self, name) is not None and self.coefficient == 0:
                raise ValueError(f"{name} multiplies coefficient, which is 0; set it above 0 or leave {name} out")
        return self


class RewardPart(Section):
    """One named part of the reward: a model, a Python function or an HTTP server."""

    model: str | None = None
    """A reward model: run:reward (this run's own), or a folder or hub id; parts that name the same one share it."""
    head: Annotated[int, Field(ge=0)] = 0
    """Which output of a model with several."""
    function: str | None = None
    """module:function, called with (prompts, answers), giving one number per answer."""
    url: str | None = None
    """A reward server that speaks OpenRLHF's /get_reward; that path is added where the address has none."""
    weight: float = 1.0
    """Factor of this part in the sum, after scaling; negative punishes."""
    scaling: Scaling | None = None
    """None takes ppo.score_scaling for models (none where that is card and there is none), none for everything else."""
    timeout_seconds: AboveZero = 60.0
    """A server's answer to 64 texts or fewer is waited for so long."""
    retries: Annotated[int, Field(ge=0)] = 3
    """Further tries after a failed one, with growing pauses; then the run stops. A reward is never silently zero."""

    @model_validator(mode="after")
    def _one_source(self) -> RewardPart:
        given = [n for n in ("model", "function", "url") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError(f"a part of the reward is one of model, function or url; {len(given)} are given")
        if self.weight == 0:
            raise ValueError("a part of weight 0 would cost time and do nothing; leave it out")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError("url must start with http:// or https://")
        if self.model is None and self.head:
            raise ValueError("head chooses an output of a model; this part has none")
        if self.model is not None and self.model.startswith("run:") and (self.model != "run:reward" or self.head):
            raise ValueError("the model that a run has of its own is run:reward, with the one output 0")
        if self.model is None and self.scaling == "card":
            raise ValueError("only a model has a reward card; take running, batch or none")
        return self


class PTXConfig(Section):
    """Demonstrations mixed into the policy's loss, against forgetting (InstructGPT's PPO-ptx)."""

    coefficient: AboveZero = 1.0
    """Weight of the mean loss per demonstration token beside the policy loss."""
    data: str | None = None
    """Demonstrations or texts; None takes data.demonstrations."""
    prompts_per_step: Positive = 16
    """Demonstrations per optimizer step of the policy."""
    max_tokens: Positive = 1024
    """Longer ones are left out and counted."""


class BestConfig(Section):
    """Keep the best policy of the run instead of the last, by answers to prompts that PPO does not train on."""

    by: Literal["validation", "gold"] = "validation"
    """validation: the training reward without KL and clip; gold: evaluate.gold, which shows over-optimisation."""
    every_steps: Positive = 10
    """PPO steps between measurements; the last step is always measured."""
    num_prompts: Positive = 32
    """Prompts set aside from the training prompts for it."""


class PPOConfig(Section):
    """Proximal policy optimisation with four parts: policy, value, reference, reward."""

    steps: Positive = 100
    """PPO steps: one batch of answers each."""
    prompts_per_step: Positive = 32
    """Prompts answered per step."""
    samples_per_prompt: Positive = 1
    """Answers per prompt."""
    micro_batch_tokens: Positive = 4096
    """Padded tokens per forward in scoring and training; changes memory and speed, not the result."""
    epochs: Positive = 1
    """Passes over the answers of a step; more reuse, less stability."""
    minibatches: Positive = 1
    """Optimizer steps per pass."""
    sampling: SamplingConfig = SamplingConfig()
    kl: KLConfig = KLConfig()

    # what an answer is worth
    rewards: dict[Annotated[str, AfterValidator(_word)], RewardPart] | None = None
    """Named parts, summed by weight; None is the run's own reward model alone."""
    score_scaling: Scaling = "card"
    """Scores to mean 0 and deviation 1: by the reward card, by running or by the step's statistics, or not at all."""
    disagreement_penalty: NonNegative = 0.0
    """Taken off the score per unit by which the heads of an ensemble disagree (reward.ensemble), in the score's own
    units: 1 is the mean less one deviation over the heads (a lower confidence bound); 0 = off."""
    score_clip: AboveZero | None = 5.0
    """The weighted sum of the scaled parts is clamped to ± this."""
    missing_end_penalty: float = 1.0
    """Subtracted from the score of an answer that was cut by the length limit, in score deviations."""
    missing_end_score: float | None = None
    """Instead, the score that every cut answer gets, whatever it says (Ziegler et al. 2019 take −1)."""
    overlong_from_tokens: Positive | None = None
    """From this length on overlong_penalty grows linearly, up to its full size at max_new_tokens; None = off."""
    overlong_penalty: float = 1.0
    """Subtracted from the score of an answer of max_new_tokens, in score deviations; negative is a bonus for length."""
    bootstrap_truncated: bool = False
    """A cut answer ends like a finished one (False), or its last value stands for the rest (True)."""
    whiten_rewards: bool = False
    """Per-token rewards of the step to variance 1, their mean kept (Ziegler et al. 2019); hides β, so off."""

    # advantages
    gamma: Fraction = 1.0
    """Discount; 1 since an answer has one reward at its end."""
    lam: Fraction = 0.95
    """GAE decay of the policy's advantages: 1 is unbiased and noisy, 0 trusts the value model alone."""
    value_lam: Fraction | None = None
    """GAE decay of the value's targets; None = lam. 1 keeps long answers from losing their reward on the way back."""
    whiten_advantages: bool = True
    """Advantages of the step to mean 0 and variance 1 over all counted tokens; a KL in the loss is scaled alike."""

    # the policy's loss
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below 1 − clip_low."""
    clip_high: AboveZero = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: AboveOne | None = None
    """Upper bound on the loss of bad actions (Ye et al. 2020), in multiples of |advantage|; None = off."""
    skip_ratio_above: AboveOne | None = None
    """A minibatch whose mean ratio exceeds this is skipped and counted; 10 is usual. None = never."""
    entropy_coefficient: NonNegative = 0.0
    """Bonus per nat of next-token entropy; 0, since the KL already holds the policy's breadth. 0.01 is much."""
    loss_average: Literal["tokens", "sequences"] = "tokens"
    """Every token weighs the same, or every answer does (tokens of long answers then weigh less)."""
    ptx: PTXConfig | None = None

    # the value model
    value_from: Literal["reward", "policy", "trunk", "frozen_trunk"] = "reward"
    """Own model that starts as the reward model, own model that starts as the policy, or a head on the policy's trunk:
    trained together with it, or on its frozen features. reward knows what is good from the first step."""
    value_coefficient: AboveZero = 0.1
    """Weight of the value loss in a trained shared trunk; small, so that values do not drown the policy."""
    value_clip: AboveZero | None = 0.2
    """Values move at most this far from the old ones per step; None = off."""
    value_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First PPO steps in which only the value model (or head) learns and β stays; 10 or so unless it starts as the
    reward."""

    # safety, weights, book-keeping
    accept_weak_reward: bool = False
    """Start although the reward model is below reward.min_accuracy."""
    self_test: bool = True
    """Prove the set-up before the first step, as `heedful check` does; costs about one step."""
    optimizer: PolicyOptimizer = PolicyOptimizer()
    value_optimizer: ValueOptimizer = ValueOptimizer()
    roles: Literal["separate", "shared", "trunk"] | None = None
    """separate: no part shares a weight with another. shared: all on one frozen base, each with adapters and a head of
    its own, which needs a reward model with reward.lora on this policy. trunk: the value is a head on the policy. None:
    as value_from and lora say."""
    lora: LoraConfig | None = None
    """Adapters for policy and value; the reference is then the policy with its adapters off, on the same base."""
    frozen_weights: Literal["float", "int8"] = "float"
    """int8 holds what is never trained (reference, reward, the base under adapters where lora.base is float) in a byte
    per weight, measured."""
    offload_frozen: bool = False
    """Frozen models of their own (reference, reward models) wait elsewhere while nothing reads them: beside a GPU in
    main memory, from which they come back layer by layer, on a CPU in a file."""
    activation_checkpointing: bool = False
    """Keep only the layers' inputs for the backward pass and compute the rest again: less memory, a third more time."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Exponential moving average of the policy's weights per PPO step; when set it is what is saved. 0.992 is usual."""
    best: BestConfig | None = None
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

    @property
    def reward_parts(self) -> dict[str, RewardPart]:
        """The named parts of the reward; without ``rewards`` the run's own model under the name reward_model."""
        return self.rewards or {"reward_model": RewardPart(model="run:reward")}

    @property
    def keeps_both_forwards(self) -> bool:
        """Whether a single update starts from the scoring's forwards of policy and value: where both graphs together
        are no more than it would hold itself, layers keeping only their inputs or the value being a mere head."""
        return self.activation_checkpointing or self.value_from in ("trunk", "frozen_trunk")

    @property
    def uses_own_reward(self) -> bool:
        """Whether this run's reward model (the reward stage's, or model.reward) is needed at all."""
        return self.value_from == "reward" or any(p.model == "run:reward" for p in self.reward_parts.values())

    @model_validator(mode="before")
    @classmethod
    def _roles_bring_what_they_need(cls, values: Any) -> Any:
        needs: dict[str, dict[str, Any]] = {"shared": {"lora": {}}, "trunk": {"value_from": "trunk"}}
        return {**needs.get(str(values.get("roles")), {}), **values} if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _roles_fit(self) -> PPOConfig:
        on_trunk = self.value_from in ("trunk", "frozen_trunk")
        if self.roles in ("separate", "shared") and on_trunk:
            raise ValueError(f"value_from: {self.value_from} is a head on the policy's trunk, which is roles: trunk")
        if self.roles == "trunk" and not on_trunk:
            raise ValueError(f"roles: trunk makes the value a head on the policy; value_from: {self.value_from} is not")
        if self.roles == "shared" and self.lora is None:
            raise ValueError("roles: shared trains adapters on one base; lora must not be null")
        return self

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
        if self.kl.target is not None and self.kl.horizon < self.samples_per_step:
            raise ValueError(
                f"kl.horizon ({self.kl.horizon}) must be at least the answers of a step ({self.samples_per_step})"
            )
        if self.kl.outliers is not None and self.samples_per_step < 4:
            raise ValueError(f"kl.outliers compares the answers of a step: 4 or more, not {self.samples_per_step}")
        if self.epochs * self.minibatches == 1:
            for name, value in (("kl.stop_above_nats", self.kl.stop_above_nats), ("dual_clip", self.dual_clip),
                                ("skip_ratio_above", self.skip_ratio_above)):  # fmt: skip
                if value is not None:
                    raise ValueError(
                        f"{name} looks at what earlier updates of the step did, and epochs × minibatches is 1, so "
                        f"there are none; raise epochs or minibatches, or leave {name} out"
                    )
        if self.score_scaling == "batch" and self.samples_per_step < 2:
            raise ValueError("score_scaling: batch makes the only answer of a step 0; take running, or more answers")
        self._refuse_without_effect()
        limit = self.sampling.max_new_tokens
        if self.overlong_from_tokens is not None and self.overlong_from_tokens >= limit:
            raise ValueError(
                f"overlong_from_tokens ({self.overlong_from_tokens}) must be below sampling.max_new_tokens ({limit})"
            )
        if self.rewards is not None and not self.rewards:
            raise ValueError("rewards is empty; name at least one part, or leave the section out")
        return self

    @property
    def _leaves_frozen_float(self) -> bool:
        """Whether something that is never trained is not in few bits by lora.base."""
        return self.lora is None or self.lora.base == "float" or self._has_frozen_reward

    @property
    def _has_frozen_reward(self) -> bool:
        """Whether a reward model shares no weight with a part that is trained."""
        if any(part.model not in (None, "run:reward") for part in self.reward_parts.values()):
            return True
        apart = self.roles == "separate" or self.value_from != "reward" or self.lora is None
        return self.uses_own_reward and self.roles != "shared" and apart

    def _refuse_without_effect(self) -> None:
        """A changed key that nothing would read; keys at their default may stand beside anything."""

        def changed(section: Section, key: str) -> bool:
            return bool(getattr(section, key) != type(section).model_fields[key].default)

        penalty = changed(self, "missing_end_penalty") and self.missing_end_penalty != 0
        for name, is_changed, acts, needs in (
            ("kl.horizon", changed(self.kl, "horizon"), self.kl.target is not None, "kl.target"),
            ("overlong_penalty", changed(self, "overlong_penalty"), self.overlong_from_tokens is not None,
             "overlong_from_tokens"),
            ("value_coefficient", changed(self, "value_coefficient"), self.value_from == "trunk", "value_from: trunk"),
            ("frozen_weights", changed(self, "frozen_weights"), self._leaves_frozen_float,
             "lora.base: float, or a frozen model of its own"),
            ("offload_frozen", self.offload_frozen,
             self.lora is None or self.roles == "separate" or self._has_frozen_reward, "a frozen model of its own"),
            ("missing_end_penalty", penalty, self.missing_end_score is None, "missing_end_score to be left out"),
        ):  # fmt: skip
            if is_changed and not acts:
                raise ValueError(f"{name} has no effect as things stand: it needs {needs}")
