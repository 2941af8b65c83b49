"""What a rollout engine is: prompts in, completions out, weights updated by version."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from heedful.models.parts import LanguageModel
from heedful.records import Completion


@dataclass(frozen=True)
class Request:
    """One answer that is wanted."""

    prompt_id: str
    sample_index: int
    prompt_ids: list[int]


@dataclass(frozen=True)
class Sampling:
    """How to sample. Log-probs of completions refer to exactly this distribution: softmax(logits / temperature)."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""


class Engine(Protocol):
    """Anything that can speak for the policy."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        seed: int,
        on_done: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """One completion per request, in order. Same seed and request → same answer, whatever else is in the batch
        (up to rounding). ``on_done(n)`` is told whenever n more are complete."""
        ...

    def sync(self, policy: LanguageModel, *, version: int) -> None:
        """From now on speak with the weights of ``policy``; completions carry ``version``.

        Two calls with the same version may bring different weights (an average that is measured, then the policy)."""
        ...

    def rest(self) -> None:
        """Nothing is asked before the next ``sync``: what that brings anew need not be held until then."""
        ...


def sample_seed(seed: int, prompt_id: str, sample_index: int) -> int:
    """The seed of one answer: depends on the run's seed, the prompt and the sample, never on rank or batch (ROL-07)."""
    digest = hashlib.sha256(f"{seed}\x00{prompt_id}\x00{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
