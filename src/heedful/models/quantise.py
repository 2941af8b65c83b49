"""Frozen parts held in int8 (see ``models/int8.py``), and what that does to log-probs and scores, measured.

Only the matrix products of a trunk are held so; embedding, output layer, score head and adapters stay as they are.

Dimension letters: N sequences or tokens, T tokens, D hidden width, K outputs of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from heedful.batches import TokenBatch
from heedful.errors import ModelError
from heedful.models.hardware import release_memory
from heedful.models.int8 import Int8Linear
from heedful.models.parts import LanguageModel, Part, ScalarModel
from heedful.records import Prompt
from heedful.runs.progress import tell

MEAN_BOUND_NATS, LARGEST_BOUND_NATS = 0.05, 2.0
"""What bfloat16 may do to a log-prob in the mean and at most (``train.proofs.SAMPLER_BOUNDS``); int8 must not do more.
Four bits are beyond it."""
SCORE_BOUND = 0.2
"""Mean change of a score, in deviations of the scores, that a reward model may show."""
NUM_PROMPTS = 8
"""Prompts that are measured, from the shortest to the longest."""
ANSWERS = ("Yes.", "No, I would rather not say that today.", "It depends: some do, some do not; I do not know.")


def quantise(part: Part) -> None:
    """Hold the frozen matrix products of the part's trunk in int8, in place; once for parts on one trunk."""
    from transformers.pytorch_utils import Conv1D

    trunk = part.base.base_model
    for name, module in list(trunk.named_modules()):
        # type, not isinstance: what derives from a linear layer may do more than a product
        if type(module) not in (nn.Linear, Conv1D) or module.weight.requires_grad or ".lora_" in f".{name}":
            continue
        trunk.set_submodule(name, Int8Linear(module))
    release_memory()


@final
@dataclass
class Int8:
    """Holds parts in int8 and notes what that changes, on some of the run's prompts."""

    prompts: Sequence[tuple[Prompt, list[int]]] = ()
    """All prompts of the run with their ids; of none nothing is measured"""
    temperature: float = 1.0
    """That log-probs are taken at"""
    found: dict[str, dict[str, float]] = field(default_factory=dict)
    """By part. Of a language model: mean and largest |change of a log-prob| over the prompts' tokens, and the mean KL
    from the int8 to the float model, in nats per token. Of a reward model: mean and largest |change of a score|, in
    deviations of the scores"""

    def hold(self, **parts: Part | None) -> None:
        """Quantise these parts, which may share a trunk, and measure each by the name it is given under.

        Raises:
            ModelError: int8 moves log-probs or scores too far.
        """
        given = {name: part for name, part in parts.items() if part is not None}
        before = {name: self._read(part) for name, part in given.items()} if self.prompts else {}
        for part in given.values():
            quantise(part)
        for name, read in before.items():
            part = given[name]
            after = self._read(part)
            if isinstance(part, LanguageModel):
                self._compare_logprobs(name, part, read, after)
            else:
                self._compare_scores(name, read[0], after[0])

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
    def _compare_logprobs(self, name: str, part: LanguageModel, before: list[Tensor], after: list[Tensor]) -> None:
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
        says = f"{name} in int8: log-probs of {len(change_N)} prompt tokens move by {mean:.2g} nats in the mean, "
        says += f"{largest:.2g} at most; KL {kl:.2g} nats per token"
        if not (mean <= MEAN_BOUND_NATS and largest <= LARGEST_BOUND_NATS):
            raise ModelError(
                f"{says}, where at most {MEAN_BOUND_NATS:g} and {LARGEST_BOUND_NATS:g} are allowed; set "
                f"ppo.frozen_weights to float"
            )
        tell(says)

    def _compare_scores(self, name: str, before_NK: Tensor, after_NK: Tensor) -> None:
        change_NK = (after_NK - before_NK).abs() / before_NK.std(dim=0, correction=0).clamp(min=1e-12)
        mean, largest = float(change_NK.mean(dim=0).max()), float(change_NK.max())
        self.found[name] = {"score_error_mean": mean, "score_error_max": largest}
        says = f"{name} in int8: scores of {len(change_NK)} answers move by {mean:.2g} of their deviation in the mean, "
        says += f"{largest:.2g} at most"
        if not mean <= SCORE_BOUND:
            raise ModelError(f"{says}, where {SCORE_BOUND:g} is allowed; set ppo.frozen_weights to float")
        tell(says)
