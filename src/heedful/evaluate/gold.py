"""Gold scorers: any Python function that says how good an answer is, named ``module:function`` in a recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from heedful.config.functions import load_function
from heedful.errors import EngineError
from heedful.records import Prompt


class Scorer(Protocol):
    """How good an answer is; higher is better. ``finished`` is False for an answer cut by the length limit."""

    def __call__(self, prompt: Prompt, answer: str, *, finished: bool) -> float: ...


def load_scorer(name: str) -> Scorer:
    """The scorer that ``module:function`` names, for example ``heedful.evaluate.panel:utility``.

    Raises:
        ConfigError: the name has another form, the module cannot be imported, or the function is missing or cannot be
            called as ``function(prompt, answer, finished=...)``.
    """
    takes = "(prompt, answer, finished=...)"
    return load_function(name, "gold scorer", takes=takes, arguments=(None, ""), keywords={"finished": True})


def score_answers(
    scorer: Scorer, prompts: Sequence[Prompt], answers: Sequence[str], finished: Sequence[bool]
) -> list[float]:
    """The score of each answer.

    Raises:
        EngineError: the scorer failed or gave something other than a finite number; names the prompt.
    """
    scores = []
    for prompt, answer, done in zip(prompts, answers, finished, strict=True):
        try:
            score = float(scorer(prompt, answer, finished=done))
        except Exception as error:  # the user's function may raise anything
            raise EngineError(f"the gold scorer failed on prompt {prompt.id}: {error!r}") from error
        if not math.isfinite(score):
            raise EngineError(f"the gold scorer gave {score} for prompt {prompt.id}; it must give a finite number")
        scores.append(score)
    return scores
