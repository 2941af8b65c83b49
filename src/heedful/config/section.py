"""What every section of a recipe is made of: strict frozen models, number types, optimizers, adapters, checkpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def word(name: str) -> str:
    """The name itself, when it can stand in a metric's name and in a dotted key."""
    if not name.isidentifier():
        raise ValueError(f"{name!r} must be one word of letters, digits and _")
    return name


class Section(BaseModel):
    """Base of every part of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would read yes as 1."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if _holds(kind, bool) or not (_holds(kind, float) or _holds(kind, int)):
            return value
        items = value.items() if isinstance(value, dict) else ()
        for name, item in [*items, *((None, x) for x in (value if isinstance(value, list) else [value]))]:
            if isinstance(item, bool):
                raise ValueError(f"{'' if name is None else f'{name} '}must be a number, not yes or no")
        return value


def _holds(annotation: Any, kind: type) -> bool:
    """Whether a type is among the parts of an annotation."""
    return annotation is kind or any(_holds(part, kind) for part in get_args(annotation))


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
    offload: bool = False
    """On a GPU the moments of AdamW (8 bytes per weight) wait in main memory and come in buckets at each step; off, as
    that takes the time of two copies over the bus. Adapters have few moments. Elsewhere nothing is moved."""


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
    base: Literal["float", "int8", "nf4"] = "float"
    """Form of the frozen weights under the adapters: the compute precision, a byte or half a byte (QLoRA) per weight.
    What is saved is the rounded base with the adapters, as it was trained."""


class CheckpointConfig(Section):
    """When a stage saves itself."""

    every_steps: Positive = 10
    """Optimizer (SFT, reward) or PPO steps between checkpoints."""
    keep: Positive = 1
    """Complete checkpoints kept; an old one goes only when the new one is complete."""
