"""How long the data of a recipe are, in tokens, without torch: what a plan's batches are made of.

Counting every text of a large file would take longer than the plan is worth, so the longest texts by characters are
counted, and for the mean as many spread over the file.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from heedful.config.recipe import Recipe
from heedful.data.packing import (
    RankingShape,
    attention_tokens_of,
    padded_tokens,
    ranking_batches,
    ranking_rows,
    row_width,
)
from heedful.data.shipped import data_path
from heedful.errors import HeedfulError
from heedful.plan.activations import Batch
from heedful.plan.shape import ModelShape
from heedful.plan.workload import StageWork, Workload, of_limits, of_ppo, padded
from heedful.records import Demonstration, Message, Ranking

NUM_COUNTED = 256
"""Texts counted for the longest, and as many for the mean."""
T = TypeVar("T")


class TokenCounter:
    """Counts tokens as the model's own tokenizer and template make them."""

    def __init__(self, folder: Path) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        file = folder / "tokenizer_config.json"
        self._config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        template = folder / "chat_template.jinja"
        source = template.read_text(encoding="utf-8") if template.is_file() else self._config.get("chat_template")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(source) if isinstance(source, str) else None

    def text(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def messages(self, messages: Sequence[Message]) -> int:
        """Tokens of a conversation that waits for an answer."""
        if self._template is None:
            return sum(self.text(m.content) for m in messages)
        told = [{"role": m.role, "content": m.content} for m in messages]
        special = {name: _content(self._config.get(name)) for name in ("bos_token", "eos_token")}
        return self.text(self._template.render(messages=told, add_generation_prompt=True, **special))


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def of_data(recipe: Recipe, folder: Path, shape: ModelShape, *, in_pieces: bool = False) -> Workload:
    """The work of a recipe with the lengths of its own data; its limits where a file or the tokenizer cannot be read.

    Args:
        folder: of the model that everything starts from, whose tokenizer counts.
        in_pieces: rows are computed in pieces (``models/ragged.py``): without padding, attention never wider than the
            longest sequence.
    """
    limits = of_limits(recipe, shape.max_positions)
    try:
        count = TokenCounter(folder)
        data = recipe.data
        prompts = _prompt_lengths(recipe, data.prompts, count) if recipe.ppo else ([], [])
        questions = _prompt_lengths(recipe, data.heldout_prompts, count) if recipe.evaluate else ([], [])
        return Workload(
            sft=_sft(recipe, count, in_pieces=in_pieces),
            reward=_reward(recipe, count, shape, in_pieces=in_pieces),
            ppo=_ppo(recipe, prompts, in_pieces=in_pieces) or limits.ppo,
            prompt_tokens=max(prompts[0], default=limits.prompt_tokens),
            evaluate_prompt_tokens=max(questions[0], default=limits.evaluate_prompt_tokens),
            source="the data",
        )
    except (HeedfulError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return limits  # a plan must not stop what the stage itself will say better
    except Exception as error:  # tokenizers and jinja2 raise exceptions of their own
        if type(error).__module__.partition(".")[0] not in ("builtins", "tokenizers", "jinja2"):
            raise
        return limits


def _sft(recipe: Recipe, count: TokenCounter, *, in_pieces: bool) -> StageWork | None:
    from heedful.data.load import load_demonstrations

    config = recipe.sft
    if config is None or recipe.data.demonstrations is None:
        return None
    records = load_demonstrations(data_path(recipe.data.demonstrations), on_bad_row=recipe.data.on_bad_row)
    found = [
        (prompt + answer, answer)
        for record in _longest(records, lambda d: sum(len(m.content) for m in d.messages))
        for prompt, answer in [_demonstration(record, count)]
        if prompt + answer <= config.max_tokens or config.too_long == "cut"
    ]
    lengths = sorted((min(total, config.max_tokens) for total, _ in found), reverse=True)
    share = sum(answer for _, answer in found) / sum(total for total, _ in found)
    mean = sum(sum(_demonstration(r, count)) for r in _spread(records)) / len(_spread(records))
    num, budget = config.prompts_per_step, config.micro_batch_tokens
    if config.packing:
        width = max(budget, lengths[0])
        row_tokens = lengths[0] if in_pieces else width
        rows = math.ceil(width / row_tokens)
        largest = Batch(rows, row_tokens, round(width * share), max(1, round(num * mean / width)), packed=True)
    else:
        largest = padded(num, lengths[0] - 1, round(lengths[0] * share), budget)
        # longest first: the others of the step share what is left of the budget with their own lengths
        largest = Batch(largest.rows, largest.row_tokens, largest.counted_tokens, -(-round(num * mean) // budget))
    num_trained = len(records) * (1 - recipe.data.heldout_fraction / 2)
    return StageWork(largest, max(1, round(config.epochs * num_trained / num)), num * mean)


def _demonstration(record: Demonstration, count: TokenCounter) -> tuple[int, int]:
    """Tokens of the context and of the answer of a conversation."""
    return count.messages(record.messages[:-1]), count.text(record.messages[-1].content) + 1


def _reward(recipe: Recipe, count: TokenCounter, shape: ModelShape, *, in_pieces: bool) -> StageWork | None:
    from heedful.data.load import load_rankings

    config = recipe.reward
    if config is None or recipe.data.rankings is None:
        return None
    records = load_rankings(data_path(recipe.data.rankings), on_bad_row=recipe.data.on_bad_row)
    longest = (_ranking(r, count, config.max_tokens) for r in _longest(records, _num_characters))
    shapes = sorted((found for found in longest if found is not None), key=lambda found: -found.num_tokens)
    attention = None if not config.share_prompts else math.inf if in_pieces else attention_tokens(shape)
    sampled = (_ranking(r, count, config.max_tokens) for r in _spread(records))
    spread = [found for found in sampled if found is not None]
    num, budget = config.prompts_per_step, config.micro_batch_tokens
    # long rankings make wide rows; shorter ones fill the budget
    steps = [shapes[:num], *(spread[i : i + num] for i in range(0, len(spread), num))]
    batches = [[[step[i] for i in group] for group in ranking_batches(step, budget, attention)] for step in steps]
    if attention == math.inf:
        group = max(itertools.chain(*batches), key=lambda group: sum(found.num_tokens for found in group))
        row_tokens = max(found.longest for found in group)
        num_rows = math.ceil(sum(found.num_tokens for found in group) / row_tokens)
    else:
        kept_as = attention or attention_tokens(shape)
        each = [ranking_rows(group, attention) for group in itertools.chain(*batches)]
        rows = max(each, key=lambda rows: padded_tokens(rows) * (1 + row_width(rows) / kept_as))
        num_rows, row_tokens = len(rows), row_width(rows)
    largest = Batch(num_rows, row_tokens, 0, max(map(len, batches)), packed=attention is not None)
    mean = sum(found.num_tokens for found in spread) / max(1, len(spread))
    num_trained = len(records) * (1 if recipe.data.heldout_rankings else 1 - recipe.data.heldout_fraction)
    return StageWork(largest, max(1, round(config.epochs * num_trained / num)), num * mean)


def attention_tokens(shape: ModelShape) -> float:
    """As ``models.packing`` finds it for a model of this shape that can pack rankings."""
    return attention_tokens_of(shape.num_trunk - shape.num_embedding, shape.layers, shape.attention_width)


def _ranking(record: Ranking, count: TokenCounter, max_tokens: int) -> RankingShape | None:
    """The lengths of a ranking's prompt and of the answers that fit."""
    prompt = count.messages(record.prompt)
    answers = [count.text(answer.text) + 1 for answer in record.answers]
    kept = tuple(answer for answer in answers if prompt + answer <= max_tokens)
    return RankingShape(prompt, kept) if len(kept) > 1 else None


def _num_characters(record: Ranking) -> int:
    return sum(len(m.content) for m in record.prompt) + sum(len(a.text) for a in record.answers)


def _ppo(recipe: Recipe, prompts: tuple[list[int], list[int]], *, in_pieces: bool) -> StageWork | None:
    longest, spread = prompts
    if recipe.ppo is None or not longest:
        return None
    return of_ppo(recipe.ppo, max(longest), spread, in_pieces=in_pieces)


def _prompt_lengths(recipe: Recipe, name: str | None, count: TokenCounter) -> tuple[list[int], list[int]]:
    """Tokens of the longest prompts of a file, by default that of the rankings, and of some from all over it."""
    from heedful.data.load import load_prompts, load_rankings

    data = recipe.data
    source = name or data.rankings
    if source is None:
        return [], []
    load: Callable[..., Any] = load_rankings if name is None else load_prompts
    records = load(data_path(source), on_bad_row=data.on_bad_row)
    asked = [r.prompt if isinstance(r, Ranking) else r.messages for r in records]
    chosen = _longest(asked, lambda messages: sum(len(m.content) for m in messages)), _spread(asked)
    longest, spread = ([n for m in each if (n := count.messages(m)) <= data.max_prompt_tokens] for each in chosen)
    return longest or spread, spread


def _longest(records: Sequence[T], num_characters: Callable[[T], int]) -> list[T]:
    return sorted(records, key=num_characters, reverse=True)[:NUM_COUNTED]


def _spread(records: Sequence[T]) -> list[T]:
    return list(records[:: max(1, len(records) // NUM_COUNTED)])
