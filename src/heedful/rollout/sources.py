"""Rewards from outside the model: a Python function, or a server that is asked over HTTP."""

from __future__ import annotations

import http.client
import json
import math
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import redirect_stdout
from typing import Any, final
from urllib.parse import urlsplit

from heedful.config.functions import load_function
from heedful.errors import ConfigError, EngineError
from heedful.records import Completion, Prompt
from heedful.rollout.ahead import Ahead
from heedful.rollout.line import Line
from heedful.rollout.score import as_numbers
from heedful.runs.progress import tell

ANSWERS_PER_REQUEST = 64
LONGEST_PAUSE_SECONDS = 60.0
PASSING = (408, 425, 429)
"""Statuses below 500 after which a server may answer the same request well."""


@final
class FunctionReward:
    """A Python function, called with (prompts, answers): a list of Prompt and one of str; one number per answer, as
    :func:`~heedful.rollout.score.as_numbers` takes it."""

    def __init__(self, name: str, function: str, *, weight: float = 1.0) -> None:
        """Raises ConfigError when ``function`` (module:function) is not there or cannot be called so."""
        self.name, self.weight, self._spec = name, weight, function
        self._function = load_reward_function(name, function)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Sequence[float]:
        """Raises EngineError when the function does."""
        given: Sequence[float] = ask_function(
            self._function, f"reward {self.name!r}: {self._spec}", list(prompts), [c.text for c in completions]
        )
        return given


def ask_function(function: Callable[..., Any], who: str, prompts: list[Prompt], answers: list[str]) -> Any:
    """What a user's function gives; what it prints goes to standard error, where it spoils no output.

    Raises:
        EngineError: in the name of ``who`` when it fails.
    """
    try:
        with redirect_stdout(sys.stderr):
            return function(prompts, answers)
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        raise EngineError(f"{who} failed: {error!r}") from error


def load_reward_function(name: str, function: str) -> Callable[..., Any]:
    """The function of a part of the reward; raises ConfigError as :func:`load_function`."""
    return load_function(function, f"reward {name!r}: function", takes="(prompts, answers)", arguments=([], []))


class _Passing(Exception):
    """A failure that another try may mend."""


@final
class HTTPReward:
    """A reward server that speaks OpenRLHF's protocol.

    POST {"query": [prompt + answer], "prompts": [prompt], "labels": [label]} → {"rewards": [number]}, with "scores" and
    a list of one number in place of a number taken too. Texts are the policy's tokens decoded with their special
    tokens, as the chat template wrote them; the label is the prompt's extra column ``label``, "" where there is none.
    """

    def __init__(
        self,
        name: str,
        url: str,
        tokenizer: Any,
        *,
        weight: float = 1.0,
        timeout_seconds: float = 60.0,
        retries: int = 3,
        pause_seconds: float = 1.0,
        say: Callable[[str], None] = tell,
    ) -> None:
        """
        Args:
            tokenizer: the policy's.
            timeout_seconds: for each request of at most 64 answers, each try anew.
            retries: further tries after a failed one.
            pause_seconds: before the second try; doubles with each, up to a minute.
            say: takes the line about a try that failed.

        Raises:
            ConfigError: the url has no http(s) scheme or no host.
        """
        self.name, self.weight, self.url = name, weight, reward_url(url)
        self._tokenizer, self._timeout_seconds, self._retries = tokenizer, timeout_seconds, retries
        self._pause_seconds, self._say = pause_seconds, say
        self._turn, self._line = threading.Lock(), Line()
        self._ahead: Ahead | None = None

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        """What was begun is collected, or dropped where it is not asked for; the rest is asked now.

        Raises EngineError when the server fails for good: never a score of 0 instead.
        """
        ahead, self._ahead = self._ahead, None
        scores = ahead.collect(completions) if ahead is not None else {}
        rest = [i for i in range(len(completions)) if i not in scores]
        texts = self._texts([completions[i] for i in rest])
        scores |= zip(rest, self.score_texts(*texts, [prompts[i] for i in rest]), strict=True)
        return [scores[i] for i in range(len(completions))]

    def begin(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> None:
        """Ask about these answers in the background, behind those that were begun before."""
        queries, texts = self._texts(completions)  # here: not every tokenizer may be used by two threads at once
        if self._ahead is None:
            self._ahead = Ahead(f"reward {self.name}")
        self._ahead.begin(completions, lambda line: self.score_texts(queries, texts, prompts, line=line))

    def drop(self) -> None:
        """Forget what was begun, its errors too; a request that is under way is broken off."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.drop()

    def score_texts(
        self, queries: Sequence[str], texts: Sequence[str], prompts: Sequence[Prompt], *,
        line: Line | None = None,
    ) -> list[float]:  # fmt: skip
        """The server's scores of texts as they are; ``texts`` are the prompts' own.

        Args:
            line: to ask over; None = its own, which is never broken off.

        Raises:
            EngineError: the server fails for good.
            CancelledError: the line was broken off.
        """
        line = line or self._line
        labels = [p.info.get("label", "") for p in prompts]
        scores: list[float] = []
        for start in range(0, len(queries), ANSWERS_PER_REQUEST):
            part = slice(start, start + ANSWERS_PER_REQUEST)
            request = {"query": list(queries[part]), "prompts": list(texts[part]), "labels": labels[part]}
            scores += self._ask(json.dumps(request, default=str).encode(), len(queries[part]), line)
        return scores

    def _texts(self, completions: Sequence[Completion]) -> tuple[list[str], list[str]]:
        """Every answer behind its prompt, and the prompts."""
        return [self._text(c.prompt_ids + c.ids) for c in completions], [self._text(c.prompt_ids) for c in completions]

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _ask(self, body: bytes, num_answers: int, line: Line) -> list[float]:
        pause = self._pause_seconds
        for tries in range(1, self._retries + 2):
            try:
                with self._turn:
                    if line.is_set():
                        raise CancelledError
                    answer = self._post(body, line)
                return self._numbers(answer, num_answers)
            except _Passing as error:
                if line.is_set():
                    raise CancelledError from error
                if tries > self._retries:
                    raise EngineError(
                        f"reward {self.name!r}: {self.url} gave no scores in {tries} tries ({error}); see whether the "
                        f"server runs, or raise timeout_seconds or retries"
                    ) from error
                self._say(f"reward {self.name}: {self.url}: {error}; next try in {pause:g} s")
                line.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise AssertionError("unreachable")

    def _post(self, body: bytes, line: Line) -> bytes:
        """What the server answers to one try."""
        deadline = time.monotonic() + self._timeout_seconds
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        try:
            with line.open(request, timeout=self._timeout_seconds) as response:
                return _read(response, deadline)
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(300).decode("utf-8", "replace").split())
            problem = f"HTTP {error.code} {error.reason}" + (f": {said}" if said else "")
            if error.code >= 500 or error.code in PASSING:
                raise _Passing(problem) from error
            raise self._wrong(problem) from error
        except TimeoutError as error:
            raise _Passing(f"no answer within {self._timeout_seconds:g} s") from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise _Passing(f"no answer within {self._timeout_seconds:g} s") from error
            raise _Passing(str(error.reason)) from error
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(str(error) or type(error).__name__) from error

    def _numbers(self, answer: bytes, num_answers: int) -> list[float]:
        """The scores in a server's answer."""
        try:
            found = json.loads(answer)
        except (ValueError, RecursionError):
            raise self._wrong(f"the answer is no JSON ({answer[:80]!r})") from None
        key = next((k for k in ("rewards", "scores") if isinstance(found, dict) and k in found), None)
        if key is None:
            keys = f"the keys {', '.join(found) or 'none'}" if isinstance(found, dict) else type(found).__name__
            raise self._wrong(f'the answer has no "rewards" (it has {keys})')
        values = found[key] if isinstance(found[key], list) else [found[key]]
        values = [v[0] if isinstance(v, list) and len(v) == 1 else v for v in values]
        numbers = as_numbers(f"reward {self.name!r}: {self.url}", values, num_answers)
        for number in numbers:
            if not math.isfinite(number):
                raise self._wrong(f"a score of {json.dumps(number)}; it must be a finite number")
        return numbers

    def _wrong(self, problem: str) -> EngineError:
        return EngineError(f"reward {self.name!r}: {self.url}: {problem}")


def _read(response: Any, deadline: float) -> bytes:
    """The whole body; a server that sends it drop by drop does not get more time than any other."""
    chunks = []
    while chunk := response.read1():
        chunks.append(chunk)
        if time.monotonic() > deadline:
            raise TimeoutError
    if response.length:
        raise ConnectionError("the answer broke off")
    return b"".join(chunks)


def reward_url(url: str) -> str:
    """The address to ask: ``url`` itself, or its /get_reward where it has no path.

    Raises:
        ConfigError: no http(s) scheme or no host.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"reward server {url!r}: write it as http://host:port or https://host/path")
    return parts._replace(path="/get_reward").geturl() if parts.path in ("", "/") else url
