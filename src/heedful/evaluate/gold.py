"""Gold scorers: any Python function that says how good an answer is, named ``module:function`` in a recipe."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Sequence
from typing import Protocol

from heedful.errors import ConfigError, EngineError
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
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"gold scorer {name!r}: write it as module:function, for example my_package.gold:score")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(
            f"gold scorer {name!r}: cannot import {module_name}: {error}; a module of your own must be on PYTHONPATH"
        ) from error
    scorer = getattr(module, attribute, None)
    if not callable(scorer):
        raise ConfigError(f"gold scorer {name!r}: {module_name} has no function {attribute!r}")
    try:
        inspect.signature(scorer).bind(None, "", finished=True)
    except TypeError as error:
        raise ConfigError(f"gold scorer {name!r}: must accept (prompt, answer, finished=...): {error}") from error
    return scorer  # type: ignore[no-any-return]


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
