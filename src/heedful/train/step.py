"""One optimizer step, the same for every loop: micro-batches, one global denominator, guarded, clipped, scheduled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from heedful.batches import LossOut
from heedful.config.section import OptimizerConfig
from heedful.control.schedule import factor
from heedful.train import guard
from heedful.train.adam import AdamW

M = TypeVar("M")


@dataclass
class Optimisation:
    """A model's trained parameters with their AdamW and learning-rate schedule.

    ``num_steps`` counts optimizer steps done; the rate of the next step is a function of it alone, so that a resumed
    run has the rate of an uninterrupted one (PPO-20).
    """

    name: str
    parameters: Mapping[str, nn.Parameter]
    config: OptimizerConfig
    total_steps: int
    num_steps: int = 0
    adam: AdamW = field(init=False)

    def __post_init__(self) -> None:
        c = self.config
        matrices = [p for p in self.parameters.values() if p.dim() >= 2]
        vectors = [p for p in self.parameters.values() if p.dim() < 2]  # norms and biases are not decayed
        self.adam = AdamW(
            [{"params": matrices, "weight_decay": c.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=c.learning_rate, betas=(c.beta1, c.beta2), eps=c.epsilon, offload=c.offload,
        )  # fmt: skip

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        warmup = round(self.config.warmup_fraction * self.total_steps)
        return self.config.learning_rate * factor(
            self.num_steps, total_steps=self.total_steps, warmup_steps=warmup, kind=self.config.schedule
        )

    def state_dict(self) -> dict[str, Any]:
        """Weights, moments and the step count."""
        return {
            "weights": {name: p.detach().cpu() for name, p in self.parameters.items()},
            "adam": self.adam.state_dict(),
            "adam_rows": self.adam.seen_state(self.parameters),
            "num_steps": self.num_steps,
        }

    def make_dense(self) -> None:
        """Of a tied embedding that no output layer has added its gradient to (values on a trunk alone)."""
        for parameter in self.parameters.values():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    def move(self) -> None:
        """One step of AdamW with the gradients that are there, at the scheduled rate."""
        for group in self.adam.param_groups:
            group["lr"] = self.learning_rate
        self.adam.step()
        self.num_steps += 1

    def skip(self, num_steps: int = 1) -> None:
        """Count planned steps that were left out, so that the schedule still ends where the run ends."""
        self.num_steps += num_steps

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["weights"][name])
        self.adam.load_state_dict(state["adam"])
        self.adam.load_seen_state(self.parameters, state.get("adam_rows", {}))  # older versions kept all rows
        self.num_steps = state["num_steps"]


@dataclass(frozen=True)
class StepOut:
    """What one optimizer step did."""

    metrics: dict[str, float]
    loss: float
    moved: bool
    """False when ``before_update`` held the optimizer back."""
    learning_rates: dict[str, float]
    """By the name of the optimisation, as are the norms."""
    gradient_norms: dict[str, float]
    """Before clipping, of the whole step (PPO-21); empty when nothing moved."""


def optimise(
    optimisations: Sequence[Optimisation],
    micro_batches: Iterable[M],
    loss_of: Callable[[M], LossOut],
    *,
    step: int,
    ids_of: Callable[[M], Sequence[str]] = lambda _: (),
    before_update: Callable[[dict[str, float]], bool] = lambda _: True,
) -> StepOut:
    """Accumulate the gradient of every micro-batch, check it, clip it and move once.

    Every loss is already divided by the step's own denominator, so that the sum over micro-batches is the loss of the
    step however it is cut (SFT-07, PPO-10). Several optimisations share the backward passes and are clipped apart.

    Args:
        before_update: sees the summed metrics before an optimizer moves; False leaves the step out.

    Raises:
        GuardError: a loss or gradient is not finite; no weight has moved then.
    """
    total = 0.0
    metrics: dict[str, Tensor] = {}
    name = optimisations[0].name
    for optimisation in optimisations:
        optimisation.adam.zero_grad(set_to_none=True)
    ids: list[str] = []
    for micro_batch in micro_batches:
        ids += ids_of(micro_batch)
        out = loss_of(micro_batch)
        guard.finite(f"the {name} loss", out.loss, step=step, ids=ids_of(micro_batch))
        out.loss.backward()
        total += float(out.loss.detach())
        add_metrics(metrics, out.metrics)
    for optimisation in optimisations:
        optimisation.make_dense()
    numbers = {name: float(value) for name, value in metrics.items()}
    moved = before_update(numbers)
    rates = {o.name: o.learning_rate for o in optimisations}
    norms = {}
    if moved:
        norms = {o.name: _clipped_norm(o, step, ids) for o in optimisations}  # all are checked before any moves
    for optimisation in optimisations:
        if moved:
            optimisation.move()
        else:
            optimisation.skip()
        optimisation.adam.zero_grad(set_to_none=True)
    return StepOut(numbers, total, moved, rates, norms)


def add_metrics(total: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Metrics of one more micro-batch: means are already divided by the step's denominator, maxima stay maxima."""
    for name, value in more.items():
        if name not in total:
            total[name] = value
        elif name.endswith("_max"):
            total[name] = torch.maximum(total[name], value)
        else:
            total[name] = total[name] + value


def _clipped_norm(optimisation: Optimisation, step: int, ids: Sequence[str]) -> float:
    """The norm of the whole gradient, which is then scaled down to the limit; a bad one is named before that."""
    parameters = optimisation.parameters
    norm = nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None])
    guard.gradients(parameters, norm, model=optimisation.name, step=step, ids=ids)
    nn.utils.clip_grads_with_norm_(parameters.values(), optimisation.config.max_gradient_norm, norm)
    return float(norm)
