"""Frozen weights held in few bits (``int8.py``, ``nf4.py``), and what that does to log-probs and scores, measured.

Only the matrix products of a trunk are held so; embedding, output layer, score head and adapters stay as they are.

Dimension letters: N sequences or tokens, T tokens, D hidden width, K outputs of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor

from heedful.batches import TokenBatch
from heedful.errors import ModelError
from heedful.models.frozen import FrozenLinear, is_frozen_product, is_quantised
from heedful.models.hardware import release_memory
from heedful.models.int8 import Int8Linear
from heedful.models.nf4 import Nf4Linear
from heedful.models.parts import LanguageModel, Part, ScalarModel
from heedful.records import Prompt
from heedful.runs.progress import tell

Form = Literal["int8", "nf4"]
Key = Literal["ppo.frozen_weights", "lora.base"]
_LAYERS: dict[Form, type[FrozenLinear]] = {"int8": Int8Linear, "nf4": Nf4Linear}

MEAN_BOUND_NATS, LARGEST_BOUND_NATS = 0.05, 2.0
"""What bfloat16 may do to a log-prob in the mean and at most (``train.proofs.SAMPLER_BOUNDS``); int8 must not do more.
Four bits are beyond it."""
TRAINED_BOUND_NATS = 1.0
"""Mean change of a log-prob of a base that adapters are trained on and make good; beyond it, it is another model."""
SCORE_BOUND = 0.2
"""Mean change of a score, in deviations of the scores, that a reward model may show."""
NUM_PROMPTS = 8
"""Prompts that are measured, from the shortest to the longest."""
ANSWERS = ("Yes.", "No, I would rather not say that today.", "It depends: some do, some do not; I do not know.")


def quantise(part: Part, form: Form) -> None:
    """Hold the frozen matrix products of the part's trunk in few bits, in place; once for parts on one trunk."""
    trunk = part.base.base_model
    for name, module in list(trunk.named_modules()):
        if is_frozen_product(module) and ".lora_" not in f".{name}":
            trunk.set_submodule(name, _LAYERS[form](module))
    release_memory()


@final
@dataclass
class Rounding:
    """Holds frozen weights in few bits and notes what that changes, on some of the run's prompts."""

    prompts: Sequence[tuple[Prompt, list[int]]] = ()
    """All prompts of the run with their ids; of none nothing is measured"""
    temperature: float = 1.0
    """That log-probs are taken at"""
    frozen: Literal["float", "int8"] = "float"
    """Form of frozen models of their own, and of a base under adapters that ``lora.base`` leaves in float"""
    found: dict[str, dict[str, float]] = field(default_factory=dict)
    """By part. Of a language model: mean and largest |change of a log-prob| over the prompts' tokens, and the mean KL
    from the rounded to the float model, in nats per token. Of a reward model: mean and largest |change of a score|, in
    deviations of the scores"""

    def hold(
        self, form: Form, parts: Mapping[str, Part | None], *, key: Key = "ppo.frozen_weights", trained: bool = False
    ) -> None:
        """Quantise these parts, which may share a trunk, and measure each by its name.

        Parts that are in few bits already stay as they are.

        Args:
            key: of the recipe, that asks for it.
            trained: adapters are trained on what is measured, so that it may be off by more, and scores by anything.

        Raises:
            ModelError: log-probs or scores move too far.
        """
        given = {name: part for name, part in parts.items() if part is not None and not is_quantised(part.model)}
        before = {name: self._read(part) for name, part in given.items()} if self.prompts else {}
        for part in given.values():
            quantise(part, form)
        for name, read in before.items():
            part = given[name]
            after = self._read(part)
            if isinstance(part, LanguageModel):
                says, is_near = self._compare_logprobs(name, part, read, after, trained)
            else:
                says, is_near = self._compare_scores(name, read[0], after[0], trained)
            says = f"{name} in {form}: {says}"
            if not is_near:
                forms = "int8 or float" if form == "nf4" else "float"
                apart = ", or ppo.roles to separate" if key == "lora.base" and isinstance(part, ScalarModel) else ""
                raise ModelError(f"{says} allowed; set {key} to {forms}{apart}")
            tell(says)

    @property
    def _some(self) -> list[tuple[Prompt, list[int]]]:
        by_length = sorted(self.prompts, key=lambda prompt: len(prompt[1]))
        num = min(NUM_PROMPTS, len(by_length))
        return [by_length[i * (len(by_length) - 1) // max(num - 1, 1)] for i in range(num)]

    def _batches(self, part: Part) -> list[TokenBatch]:
        """One prompt each, every token but the first a target."""
        found = []
        for _, ids in self._some:
            ids_1T = torch.tensor([ids if len(ids) > 1 else ids * 2], device=part.device)
            inputs_1T, targets_1T = ids_1T[:, :-1], ids_1T[:, 1:]
            ones_1T, positions_1T = torch.ones_like(inputs_1T), torch.arange(inputs_1T.shape[1], device=part.device)
            found.append(TokenBatch(inputs_1T, targets_1T, ones_1T.bool(), ones_1T, positions_1T[None]))
        return found

    @torch.no_grad()
    def _read(self, part: Part) -> list[Tensor]:
        """Of a language model the hidden states of every prompt, of a scalar model [N, K] its outputs."""
        with part.reference():
            if isinstance(part, LanguageModel):
                return [part.hidden(batch) for batch in self._batches(part)]
            assert isinstance(part, ScalarModel)
            asked = [(prompt.messages, answer) for prompt, _ in self._some for answer in ANSWERS]
            prompts, answers = [messages for messages, _ in asked], [answer for _, answer in asked]
            return [torch.tensor(part.output_texts(prompts, answers, micro_batch_tokens=1))]  # each row alone

    @torch.no_grad()
    def _compare_logprobs(
        self, name: str, part: LanguageModel, before: list[Tensor], after: list[Tensor], trained: bool
    ) -> tuple[str, bool]:
        changes, kls = [], []
        with part.reference():
            for batch, old_BTD, new_BTD in zip(self._batches(part), before, after, strict=True):
                old_BT, new_BT = (part.logprobs_of(x, batch, temperature=self.temperature)[0]
                                  for x in (old_BTD, new_BTD))  # fmt: skip
                changes.append((new_BT - old_BT).abs().flatten())
                kls.append(part.exact_kl_of(old_BTD, batch, new_BTD, part.head, temperature=self.temperature).flatten())
        change_N, kl_N = torch.cat(changes), torch.cat(kls)
        mean, largest, kl = float(change_N.mean()), float(change_N.max()), float(kl_N.mean())
        self.found[name] = {"logprob_error_mean_nats": mean, "logprob_error_max_nats": largest, "kl_mean_nats": kl}
        says = f"log-probs of {len(change_N)} prompt tokens move by {mean:.2g} nats in the mean, {largest:.2g} at most"
        says += f"; KL {kl:.2g} nats per token"
        if trained:
            return _judged(says, f"{TRAINED_BOUND_NATS:g} in the mean is", mean <= TRAINED_BOUND_NATS)
        bounds = f"at most {MEAN_BOUND_NATS:g} and {LARGEST_BOUND_NATS:g} are"
        return _judged(says, bounds, mean <= MEAN_BOUND_NATS and largest <= LARGEST_BOUND_NATS)

    def _compare_scores(self, name: str, before_NK: Tensor, after_NK: Tensor, trained: bool) -> tuple[str, bool]:
        change_NK = (after_NK - before_NK).abs() / before_NK.std(dim=0, correction=0).clamp(min=1e-12)
        mean, largest = float(change_NK.mean(dim=0).max()), float(change_NK.max())
        self.found[name] = {"score_error_mean": mean, "score_error_max": largest}
        says = f"scores of {len(change_NK)} answers move by {mean:.2g} of their deviation in the mean, "
        says += f"{largest:.2g} at most"
        return _judged(says, f"{SCORE_BOUND:g} is", mean <= SCORE_BOUND or (trained and math.isfinite(mean)))


def _judged(says: str, bounds: str, is_near: bool) -> tuple[str, bool]:
    return (says if is_near else f"{says}, where {bounds}"), is_near
