"""The second run of a failing batch, with an eye on every module: where the first bad number comes from.

The same losses, streams and guards as in training, on the recorded answers and weights; nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from heedful.batches import ExperienceBatch, LossOut, TokenBatch, to_device
from heedful.errors import GuardError, NonFiniteError
from heedful.models.roles import Roles
from heedful.objectives import likelihood
from heedful.records import Rollout
from heedful.rollout.experience import build_experience
from heedful.runs.folder import StageFolder
from heedful.train import guard
from heedful.train.forensics import Recorder, Replay
from heedful.train.step import Optimisation, add_metrics
from heedful.train.update import Update, denominators, on_device


@dataclass
class Stream:
    """What one stream held, over the counted tokens of the batch."""

    name: str
    num_values: int = 0
    num_bad: int = 0
    """NaN or infinite"""
    minimum: float | None = None
    maximum: float | None = None
    total: float = 0.0
    """minimum, maximum and total of the finite values"""

    @property
    def mean(self) -> float | None:
        """None when no value is finite."""
        num_finite = self.num_values - self.num_bad
        return self.total / num_finite if num_finite else None

    def add(self, values: Tensor) -> None:
        """Count more values in."""
        good = values.detach().double()[torch.isfinite(values)]
        self.num_values += values.numel()
        self.num_bad += values.numel() - good.numel()
        if good.numel():
            low, high = float(good.min()), float(good.max())
            self.minimum = low if self.minimum is None else min(self.minimum, low)
            self.maximum = high if self.maximum is None else max(self.maximum, high)
            self.total += float(good.sum())


@dataclass
class Findings:
    """What the second run saw."""

    recorded: str
    """The error of the first run."""
    step: int
    phase: str
    streams: dict[str, Stream] = field(default_factory=dict)
    """In the order in which they are computed."""
    error: str | None = None
    """The error of this run; None when every proof held."""
    reproduced: bool = False
    """Whether this run failed at the same stream or proof."""
    samples: tuple[str, ...] = ()
    module: str | None = None
    """The first module, in the order of the forward pass, whose output is not finite."""
    module_cause: str = ""
    gradient: str | None = None
    """Where, going backwards, the gradient is first not finite."""
    bad_weights: list[str] = field(default_factory=list)

    def stream(self, name: str, values: Tensor) -> None:
        """Count more values of a stream in."""
        self.streams.setdefault(name, Stream(name)).add(values)


def rerun(record: Replay, roles: Roles) -> Findings:
    """Run the recorded batch again on ``roles``, which hold the recorded weights."""
    found = Findings(record.error["message"], record.step, record.phase)
    roles.offload.restore()
    found.bad_weights = [
        f"{who}: {name}" for who, model in _models(roles) for name, p in model.named_parameters()
        if not bool(torch.isfinite(p).all())
    ]  # fmt: skip
    again: GuardError | None = None
    with _watched(roles, found):
        try:
            (_score if record.phase == "scoring" else _update)(record, roles, found)
        except GuardError as error:
            again = error
    if again is not None:
        found.error = str(again)
        stream = again.stream if isinstance(again, NonFiniteError) else ""
        found.samples = tuple(again.ids) if isinstance(again, NonFiniteError) else ()
        found.reproduced = stream == record.error["stream"]
    return found


def _score(record: Replay, roles: Roles, found: Findings) -> None:
    """The streams of the micro-batch that was at work, or of the whole step when its sum was."""
    rollouts = [Rollout.from_json(row) for row in record.notes["rollouts"]]
    at_work = {id for batch in record.micro_batches for id in _tokens(batch).ids}
    chosen = [r for r in rollouts if not at_work or f"{r.completion.prompt_id}/{r.completion.sample_index}" in at_work]

    def check(name: str, values: Tensor, tokens: TokenBatch) -> None:
        mask_BT = tokens.loss_mask_BT if values.dim() == 2 else None
        found.stream(name, values if mask_BT is None else values[mask_BT])
        guard.finite(name, values, step=record.step, ids=tokens.ids, mask=mask_BT)

    experience = build_experience(
        chosen, roles, record.config, kl_coefficient=record.notes["kl_coefficient"], pad_id=roles.policy.pad_id,
        generator=torch.Generator().manual_seed(0), check=check,
    )  # fmt: skip
    if record.step == 0:
        tokens = experience.batch.tokens
        found.stream("KL", experience.kl_BT[tokens.loss_mask_BT])
        guard.reference_is_start(
            experience.kl_BT, tokens.loss_mask_BT, dtype=roles.policy.dtype, ids=tokens.ids,
            is_exact=roles.reference.is_exact,
        )  # fmt: skip


def _update(record: Replay, roles: Roles, found: Findings) -> None:
    """Losses and gradients of the minibatch, as far as it had come."""
    config, name = record.config, record.phase.removesuffix(" update")
    optimisations = {n: Optimisation(n, p.trainable_parameters(), config.optimizer, 1)
                     for n, p in (("policy", roles.policy), ("value", roles.value))}  # fmt: skip
    recorder = Recorder(StageFolder(record.run, "ppo", 3), roles, config)  # never entered, so it writes nothing
    recorder.begin(record.step)
    update = Update(roles, config, optimisations["policy"], optimisations["value"], None, recorder)
    experience = [b for b in record.micro_batches if isinstance(b, ExperienceBatch)]
    for stream in ("old_logprobs", "reference_logprobs", "old_values", "rewards", "advantages", "returns"):
        for batch in experience:
            shown = stream.replace("_", " ").replace("logprobs", "log-probs")
            found.stream(shown, getattr(batch, f"{stream}_BT")[batch.tokens.loss_mask_BT])
    divisors = iter(denominators(experience, config.loss_average))
    metrics: dict[str, Tensor] = {}
    for part in record.micro_batches:
        ratios: list[Tensor] = []
        if isinstance(part, TokenBatch):
            out = _mixed_loss(record, roles, part)
        elif name == "policy":
            out = update.policy_loss(part, next(divisors), ratios)
        else:
            out = update.value_loss(on_device(part, roles.value.device), next(divisors), None)
        for ratio in ratios:
            found.stream("ratio", ratio)
        found.stream(f"the {name} loss", out.loss)
        guard.finite(f"the {name} loss", out.loss, step=record.step, ids=_tokens(part).ids)
        out.loss.backward()
        add_metrics(metrics, out.metrics)
    if name == "policy" and record.minibatch == (0, 0):
        guard.first_minibatch(float(metrics["ratio_deviation_max"]), float(metrics["clip_fraction"]),
                              dtype=roles.policy.dtype, step=record.step)  # fmt: skip
    both = name == "policy" and roles.value.is_shared
    for optimisation in optimisations.values() if both else [optimisations[name]]:
        _check_gradients(record, optimisation, found)


def _check_gradients(record: Replay, optimisation: Optimisation, found: Findings) -> None:
    given = [p.grad for p in optimisation.parameters.values() if p.grad is not None]
    for gradient in given:
        found.stream(f"the {optimisation.name} gradient", gradient)
    ids = [id for batch in record.micro_batches for id in _tokens(batch).ids]
    norm = torch.nn.utils.get_total_norm(given)
    guard.gradients(optimisation.parameters, norm, model=optimisation.name, step=record.step, ids=ids)


def _mixed_loss(record: Replay, roles: Roles, batch: TokenBatch) -> LossOut:
    """Of demonstrations mixed in, as :meth:`heedful.train.ptx.PTX.loss`."""
    assert record.config.ptx is not None
    batch = to_device(batch, roles.policy.device)
    logprobs_BT, _ = roles.policy.logprobs(batch)
    out = likelihood.token_nll(logprobs_BT, batch.loss_mask_BT, denominator=batch.num_counted_tokens)
    return LossOut(record.config.ptx.coefficient * out.loss)


def _tokens(batch: TokenBatch | ExperienceBatch) -> TokenBatch:
    return batch if isinstance(batch, TokenBatch) else batch.tokens


def _models(roles: Roles) -> Iterator[tuple[str, nn.Module]]:
    """Every model once, under the name of the first role that it plays."""
    parts = {"policy": roles.policy, "reference": roles.reference.part, "value": roles.value.part}
    seen: set[int] = set()
    for who, part in parts.items():
        if id(part.model) not in seen:
            seen.add(id(part.model))
            yield who, part.model


@contextmanager
def _watched(roles: Roles, found: Findings) -> Iterator[None]:
    """Inside, the first bad output of a module and the first bad gradient are put into ``found``."""
    handles = []

    def after_forward(name: str, module: nn.Module, args: Any, named: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if found.module is None and not _is_finite(tensor):
                found.module, found.module_cause = name, _cause(module, [args, named])
            if tensor.requires_grad:
                tensor.register_hook(partial(after_backward, f"the output of {name}"))

    def after_backward(name: str, gradient: Tensor) -> None:
        if found.gradient is None and not _is_finite(gradient):
            found.gradient = name

    def after_weight(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        after_backward(f"the weight {name}", parameter.grad)

    for who, model in _models(roles):
        for name, module in model.named_modules():
            hook = partial(after_forward, f"{who}: {name or 'the whole model'}")
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(partial(after_weight, f"{who}: {name}")))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cause(module: nn.Module, given: Any) -> str:
    own = [name for name, p in module.named_parameters() if not _is_finite(p)]
    if own:
        return f"its {own[0]} is not finite"
    if all(_is_finite(x) for x in _tensors(given)):
        return "from finite inputs and weights: it overflows"
    return "from inputs that were bad already"


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in what a module takes or gives."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
