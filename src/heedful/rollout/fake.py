"""A scripted engine for tests and for trying a loop without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from heedful.models.parts import LanguageModel
from heedful.records import Completion
from heedful.rollout.engine import Request, Sampling
from heedful.rollout.hf import completion


class FakeEngine:
    """Answers with ``script(request) -> token ids``; an answer that ends with an end token counts as finished."""

    def __init__(self, script: Callable[[Request], list[int]], end_ids: Sequence[int], tokenizer: Any) -> None:
        self._script, self._end_ids, self._tokenizer, self._version = script, set(end_ids), tokenizer, 0

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        seed: int,
        on_done: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Scripted ids, cut at the limit; log-probs are 0 since nothing was sampled."""
        answers = [self._script(r)[: sampling.max_new_tokens] for r in requests]
        return [
            completion(r, ids, [0.0] * len(ids), ids[-1] in self._end_ids, self._version, self._tokenizer)
            for r, ids in zip(requests, answers, strict=True)
        ]

    def sync(self, policy: LanguageModel, *, version: int) -> None:
        """Only the version moves."""
        self._version = version

    def rest(self) -> None:
        """It holds nothing."""
