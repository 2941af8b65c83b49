"""What is audited: any function from prompts and answers to numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from heedful.records import Prompt

Scorer = Callable[[Sequence[Prompt], Sequence[str]], Sequence[float]]
"""One number per (prompt, answer), in order; higher is better. May give NaN or infinity: that is a finding."""

Text = tuple[Prompt, str]
"""A prompt and an answer to it."""


class Scores:
    """Scores of texts, each asked for once, in pieces of bearable size."""

    def __init__(
        self,
        scorer: Scorer,
        *,
        piece: int = 256,
        fits: Callable[[Prompt, str], bool] | None = None,
        on_scored: Callable[[int, int], None] | None = None,
    ) -> None:
        """
        Args:
            fits: False for a text that is too long for the scorer: it is left out and has the score NaN.
            on_scored: hears (texts scored, texts asked for) after every piece.
        """
        self._scorer, self._piece, self._fits, self._on_scored = scorer, piece, fits, on_scored
        self._known: dict[tuple[str, str], float] = {}
        self._num_asked = 0

    def ask(self, texts: Sequence[Text]) -> None:
        """Score those of ``texts`` that are new."""
        new: dict[tuple[str, str], Text] = {}
        for prompt, answer in texts:
            if _key(prompt, answer) not in self._known and (self._fits is None or self._fits(prompt, answer)):
                new.setdefault(_key(prompt, answer), (prompt, answer))
        keys = list(new)
        self._num_asked += len(keys)
        for start in range(0, len(keys), self._piece):
            part = keys[start : start + self._piece]
            values = self._scorer([new[k][0] for k in part], [new[k][1] for k in part])
            self._known.update(zip(part, map(float, values), strict=True))
            if self._on_scored:
                self._on_scored(len(self._known), self._num_asked)

    def __getitem__(self, text: Text) -> float:
        """The score of a text; NaN where it was not scored."""
        return self._known.get(_key(*text), math.nan)

    def __contains__(self, text: Text) -> bool:
        """Whether the text was scored."""
        return _key(*text) in self._known

    @property
    def all(self) -> dict[tuple[str, str], float]:
        """Every score by (prompt id, answer)."""
        return dict(self._known)


def _key(prompt: Prompt, answer: str) -> tuple[str, str]:
    return prompt.id, answer
