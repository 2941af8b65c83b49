"""Any reward model as one plain function of prompts and answers: a folder, a server or a Python function."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from heedful.errors import EngineError
from heedful.records import Completion, Prompt
from heedful.runs.progress import tell

if TYPE_CHECKING:
    from heedful.models.heads import Heads
    from heedful.rollout.cache import ScoreCache

Scorer = Callable[[Sequence[Prompt], Sequence[str]], list[float]]
"""One number per (prompt, answer), in order; higher is better."""
Outputs = Callable[[Sequence[Prompt], Sequence[str]], list[list[float]]]
"""The score of each (prompt, answer) and what the model's heads say, if it has several."""


def open_scorer(model: str, **options: Any) -> Scorer:
    """The scores of :func:`open_outputs` alone, with the same options."""
    outputs = open_outputs(model, **options)

    def scorer(prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float]:
        return [row[0] for row in outputs(prompts, answers)]

    return scorer


def open_outputs(
    model: str,
    *,
    template: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    micro_batch_tokens: int = 4096,
    timeout_seconds: float = 60.0,
    retries: int = 3,
    finite: bool = True,
    cache: ScoreCache | None = None,
    say: Callable[[str], None] = tell,
) -> Outputs:
    """The scorer that a name on the command line means; only a reward model's folder needs torch.

    Args:
        model: a reward model (folder, hub id or alias), http(s)://server (OpenRLHF's protocol, see
            :class:`~heedful.rollout.sources.HTTPReward`) or module:function, called with (prompts, answers).
        template: for a server: the model whose tokenizer and chat template write the texts it is sent; None sends
            the messages and the answer as plain text with blank lines between.
        device, dtype, attention, micro_batch_tokens: for a reward model's folder; of several outputs the first is the
            score, and what comes after it is told too.
        timeout_seconds, retries: for a server.
        finite: False lets NaN and infinities of a function or a folder pass, for callers that count them.
        cache: holds the scores of a folder; servers and functions may change behind their names.
        say: takes the lines on what goes on.

    Raises:
        ConfigError: no such function, or a url that is none.
        ModelError: no such model, or one without a score head.

    The scorer raises EngineError, with the prompt's id where there is one, when the function or server fails, or gives
    anything but one plain number per answer, as :func:`~heedful.rollout.score.as_numbers` takes it.
    """
    kind = kind_of(model)
    if kind == "server":
        ask = _server(model, template, timeout_seconds, retries, say)
    elif kind == "function":
        ask = _function(model)
    else:
        ask = _folder(model, device, dtype, attention, micro_batch_tokens, cache)

    def outputs(prompts: Sequence[Prompt], answers: Sequence[str]) -> list[list[float]]:
        if len(prompts) != len(answers):
            raise ValueError(f"{len(prompts)} prompts but {len(answers)} answers")
        if not answers:
            return []
        found = ask(list(prompts), list(answers))
        scores = _numbers(model, [row[0] for row in found] if kind == "folder" else found, prompts, finite)
        return found if kind == "folder" else [[score] for score in scores]

    return outputs


def kind_of(model: str) -> Literal["server", "function", "folder"]:
    """What a name means, whether or not it is there."""
    if re.match(r"https?:", model):
        return "server"
    return "function" if re.fullmatch(r"[\w.]+:[\w.]+", model) and not Path(model).exists() else "folder"


def heads_of(model: str) -> Heads | None:
    """The heads in a model's folder; None where there are none, and for servers and functions.

    Raises:
        ModelError: no such model, or damaged heads.
    """
    if kind_of(model) != "folder":
        return None
    import torch

    from heedful.models.heads import load_heads
    from heedful.models.load import resolve

    return load_heads(resolve(model), torch.device("cpu"))


def _folder(
    model: str, device: str, dtype: str, attention: str, micro_batch_tokens: int, cache: ScoreCache | None
) -> Callable[..., Any]:
    from heedful.models import hardware
    from heedful.models.load import resolve
    from heedful.models.roles import build_reward
    from heedful.rollout.cache import cached

    path, place = resolve(model), hardware.device(device)
    precision = hardware.compute_dtype(place, dtype)
    reward = cached(build_reward(path, device=place, dtype=precision, attention=attention), path, precision, cache)

    def ask(prompts: list[Prompt], answers: list[str]) -> list[list[float]]:
        messages = [p.messages for p in prompts]
        return reward.output_texts(messages, answers, micro_batch_tokens=micro_batch_tokens)

    return ask


def _function(model: str) -> Callable[..., Any]:
    from heedful.config.functions import load_function
    from heedful.rollout.sources import ask_function

    with redirect_stdout(sys.stderr):  # as ask_function: a module that prints as it is imported
        function = load_function(model, "MODEL", takes="(prompts, answers)", arguments=([], []))
    return partial(ask_function, function, model)


def _server(
    url: str, template: str | None, timeout_seconds: float, retries: int, say: Callable[[str], None]
) -> Callable[..., Any]:
    from heedful.rollout.sources import HTTPReward

    tokenizer: Any = None
    if template is not None:
        from heedful.models.load import load_tokenizer, resolve

        tokenizer = load_tokenizer(resolve(template))
    server = HTTPReward("MODEL", url, tokenizer, timeout_seconds=timeout_seconds, retries=retries, say=say)

    def ask(prompts: list[Prompt], answers: list[str]) -> list[float]:
        if tokenizer is not None:
            from heedful.data.chat import answer_ids, prompt_ids

            return server(prompts, [
                Completion(p.id, 0, prompt_ids(tokenizer, p.messages), answer_ids(tokenizer, a), [], "stop", 0, a)
                for p, a in zip(prompts, answers, strict=True)
            ])  # fmt: skip
        texts = ["\n\n".join(m.content for m in p.messages) for p in prompts]
        return server.score_texts([f"{t}\n\n{a}" for t, a in zip(texts, answers, strict=True)], texts, prompts)

    return ask


def _numbers(model: str, values: Any, prompts: Sequence[Prompt], finite: bool) -> list[float]:
    """What a scorer gave as floats, one per answer."""
    from heedful.rollout.score import as_numbers

    numbers = as_numbers(model, values, len(prompts))
    for value, prompt in zip(numbers, prompts, strict=True):
        if finite and not math.isfinite(value):
            raise EngineError(f"{model} gave {value} for an answer to prompt {prompt.id!r}; a score must be finite")
    return numbers
