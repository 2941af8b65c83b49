"""What a plan speaks of: what it is made from, the models that a stage holds, its phases and their largest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from heedful.config.recipe import Recipe, Stage
from heedful.plan.activations import Training
from heedful.plan.machine import Kernel, Machine
from heedful.plan.shape import ModelShape
from heedful.plan.workload import Workload

FLOAT32 = 4


@dataclass(frozen=True)
class Setup:
    """What a plan is made from."""

    recipe: Recipe
    base: ModelShape
    reward: ModelShape
    """Of the reward model, and of a value model that starts as it"""
    machine: Machine
    work: Workload
    more_rewards: tuple[ModelShape, ...] = ()
    """Reward models that PPO reads beside the run's own"""

    @property
    def s(self) -> int:
        """Bytes of a number in the compute precision."""
        return self.machine.compute_bytes(self.recipe.model.dtype)

    @property
    def kernel(self) -> Kernel:
        """Of attention."""
        return self.machine.kernel(self.recipe.model.attention)


@dataclass(frozen=True)
class Model:
    """A model that a stage holds."""

    part: str
    shape: ModelShape
    scalar: bool
    weight_bytes: int
    """Of one weight of the model itself"""
    training: Training | None = None
    head_only: bool = False
    frozen: bool = False
    """Its adapters are held, not trained"""
    on_policy: bool = False
    """Its base is the policy's; adapters and head are all that it has of its own"""
    form: Literal["float", "int8", "nf4"] = "float"
    """Of its matrix products: int8 is a byte per weight and a scale of two bytes per row, nf4 half a byte per weight
    and such a scale per 64"""
    product_bytes: int | None = None
    """Of one weight of its matrix products and of an untied output layer in float; None = as of any other weight"""
    offloads_moments: bool = False
    """AdamW's moments wait in main memory, but those of single rows"""

    @property
    def num_own(self) -> int:
        """Parameters without adapters."""
        return self.shape.num_scalar if self.scalar else self.shape.num_causal

    @property
    def num_trained(self) -> int:
        """Parameters that an optimizer moves."""
        if self.head_only:
            return self.shape.width_of_head
        if self.training is None:
            return 0
        head = self.shape.width_of_head if self.scalar else 0
        if self.training.rank is None:
            return self.num_own
        return self.training.num_trained(self.shape, head=head)

    def num_moments(self, distinct_tokens: float) -> int:
        """Trained parameters for which AdamW keeps moments: of an input embedding of its own the rows of the tokens
        that were read, unless they are most (``train/adam.py``)."""
        return self._num_dense(distinct_tokens) + self._num_in_rows(distinct_tokens)

    def num_moments_at_home(self, distinct_tokens: float) -> int:
        """Those of them whose moments wait in main memory (``train/moments.py``)."""
        return self._num_dense(distinct_tokens) if self.offloads_moments else 0

    def _num_dense(self, distinct_tokens: float) -> int:
        return self.num_trained - (self.shape.num_embedding if self._keeps_rows(distinct_tokens) else 0)

    def _num_in_rows(self, distinct_tokens: float) -> int:
        if not self._keeps_rows(distinct_tokens):
            return 0
        return self.shape.num_embedding - int((1 - distinct_tokens / self.shape.vocabulary) * self.shape.num_embedding)

    def _keeps_rows(self, distinct_tokens: float) -> bool:
        is_full = self.training is not None and self.training.rank is None and not self.frozen
        return is_full and (self.scalar or not self.shape.tied) and distinct_tokens <= self.shape.vocabulary / 2

    @property
    def held_bytes(self) -> int:
        """Weights; adapters are float32, as is a score head."""
        adapters = self.num_trained * FLOAT32 if self.training and self.training.rank is not None else 0
        return adapters + (0 if self.on_policy else self.num_own * self.weight_bytes - self.saved_bytes)

    @property
    def output_bytes(self) -> int:
        """Of one weight of the output layer."""
        return self.weight_bytes if self.shape.tied else self.product_bytes or self.weight_bytes

    @property
    def saved_bytes(self) -> int:
        """What few bits or the compute precision take off the weights of the model itself."""
        linears = list(self.shape.all_linears())
        output = 0 if self.scalar else self.shape.num_embedding * (self.weight_bytes - self.output_bytes)
        held = {
            "float": self.shape.num_linear_weights * (self.product_bytes or self.weight_bytes),
            "int8": sum(x.num_weights + 2 * x.outputs for x in linears),
            "nf4": sum(math.ceil(x.num_weights / 64) * (32 + 2) for x in linears),
        }
        return output + self.shape.num_linear_weights * self.weight_bytes - held[self.form]

    @property
    def cast_bytes(self) -> int:
        """Casts of fully trained float32 weights that a forward under autocast keeps until it ends."""
        is_cast = self.training is not None and self.training.rank is None
        return self.shape.num_linear_weights * 2 if is_cast else 0


@dataclass(frozen=True)
class Phase:
    """One phase of a stage: bytes by what they are for."""

    name: str
    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class StagePlan:
    """The phases of a stage."""

    stage: Stage
    phases: tuple[Phase, ...]
    disk_bytes: dict[str, int] = field(default_factory=dict)
    """Checkpoints while the stage runs; the model that it leaves"""
    main_memory_bytes: int = 0
    """Beside a GPU: models and moments that wait there, and the model that is saved"""

    @property
    def largest(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """Of the largest phase."""
        return self.largest.total_bytes
