"""A world so small that everything about it can be counted: every answer, its reward, the best policy there is.

For each prompt, π*(y|x) ∝ π_ref(y|x) exp(r(x, y) / β) maximises J(π) = E_π[r] − β KL(π ‖ π_ref), and
J* − J(π) = β KL(π ‖ π*). Dimension letters: N answers (of all prompts), T places in an answer, V vocabulary.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.data.chat import prompt_ids
from heedful.data.collate import completion_batch
from heedful.models.parts import LanguageModel
from heedful.records import Message, Prompt

LETTERS = "ab"
END, PAD = "<end>", "<pad>"
PROMPTS = ("a", "bb")
"""Of different lengths, so that padding is at work on both sides."""
MAX_NEW_TOKENS = 3

AnswerReward = Callable[[str, tuple[str, ...]], float]
"""(prompt, the answer's tokens) → reward."""


def tokenizer() -> Any:
    """Four tokens: two letters, the end, and a pad that the policy may also say like any other token."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate([PAD, END, *LETTERS])}, merges=[]))
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD)
    made.chat_template = "{% for m in messages %}{{ m['content'] + '" + END + "' }}{% endfor %}"
    return made


def save_policy(folder: Path, seed: int = 0) -> Path:
    """A random Llama in float32; two layers: one stayed below 99 % even under the exact gradient of J."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=False, initializer_range=0.1,
        bos_token_id=None, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.5 / 64**0.5)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def prompts(words: Any) -> list[tuple[Prompt, list[int]]]:
    """The prompts with their ids."""
    made = [Prompt(text, (Message("user", text),)) for text in PROMPTS]
    return [(p, prompt_ids(words, p.messages)) for p in made]


def random_reward(seed: int = 0) -> AnswerReward:
    """A number from −1 to 1 for each answer to each prompt: nothing to generalise from."""

    def reward(prompt: str, answer: tuple[str, ...]) -> float:
        return random.Random(f"{seed}/{prompt}/{'/'.join(answer)}").uniform(-1, 1)

    return reward


def count_reward(prompt: str, answer: tuple[str, ...]) -> float:
    """One for each letter a: a sum over tokens."""
    return float(answer.count("a"))


def end_reward(prompt: str, answer: tuple[str, ...]) -> float:
    """Two for an answer that says something and ends before the limit cuts it."""
    return 2.0 * (len(answer) > 1 and answer[-1] == END)


def order_reward(prompt: str, answer: tuple[str, ...]) -> float:
    """One for each pair of neighbours in alphabetical order: what a token is worth depends on the one before."""
    said = [LETTERS.index(t) for t in answer if t in LETTERS]
    return float(sum(b > a for a, b in itertools.pairwise(said)))


TASKS: dict[str, AnswerReward] = {
    "random": random_reward(),
    "count": count_reward,
    "end": end_reward,
    "order": order_reward,
}


@dataclass(frozen=True)
class World:
    """Every answer to every prompt, in rows."""

    prompt_ids: list[list[int]]
    answer_ids: list[list[int]]
    prompt_N: Tensor
    """int64 [N]: number of the prompt"""
    rewards_N: Tensor
    """float64 [N]"""

    @property
    def num_prompts(self) -> int:
        return int(self.prompt_N.max()) + 1

    def per_prompt(self, x_N: Tensor) -> Tensor:
        """Sums over each prompt's answers."""
        return x_N.new_zeros(self.num_prompts).index_add(0, self.prompt_N, x_N)

    def expected(self, logprobs_N: Tensor, x_N: Tensor) -> float:
        """E over prompts (all alike) and answers."""
        return float(self.per_prompt(logprobs_N.exp() * x_N).mean())

    def objective(self, logprobs_N: Tensor, reference_N: Tensor, beta: float) -> float:
        """J(π) = E[r] − β KL(π ‖ π_ref)."""
        return self.expected(logprobs_N, self.rewards_N - beta * (logprobs_N - reference_N))

    def optimum(self, reference_N: Tensor, beta: float) -> Tensor:
        """log π* of every answer."""
        tilted_N = reference_N + self.rewards_N / beta
        totals = torch.stack([tilted_N[self.prompt_N == p].logsumexp(0) for p in range(self.num_prompts)])
        return tilted_N - totals[self.prompt_N]

    @torch.no_grad()
    def logprobs(self, policy: LanguageModel) -> Tensor:
        """log π(y|x) of every answer, float64 [N], by the product's forward.

        Raises:
            AssertionError: they do not sum to one, so this is not every answer.
        """
        batch = completion_batch(self.prompt_ids, self.answer_ids, policy.pad_id)
        logprobs_N = policy.logprobs(batch)[0].double().sum(dim=1)
        totals_P = self.per_prompt(logprobs_N.exp())
        torch.testing.assert_close(totals_P, torch.ones_like(totals_P), atol=1e-4, rtol=0)
        return logprobs_N


def every_answer(words: Any) -> list[list[int]]:
    """All sequences that end with the end token or are cut by the limit."""
    end, others = words.eos_token_id, [i for i in range(len(words)) if i != words.eos_token_id]
    cut = [list(ids) for ids in itertools.product(others, repeat=MAX_NEW_TOKENS)]
    return [[*ids, end] for n in range(MAX_NEW_TOKENS) for ids in itertools.product(others, repeat=n)] + cut


def world(words: Any, reward: AnswerReward) -> World:
    """The world of one reward."""
    answers, asked = every_answer(words), prompts(words)
    rows = [(p, answer) for p in range(len(asked)) for answer in answers]
    texts = [tuple(words.convert_ids_to_tokens(answer)) for answer in answers]
    rewards = [reward(prompt.id, text) for prompt, _ in asked for text in texts]
    return World(
        [asked[p][1] for p, _ in rows], [answer for _, answer in rows], torch.tensor([p for p, _ in rows]),
        torch.tensor(rewards, dtype=torch.float64),
    )  # fmt: skip


class Judge:
    """The reward of a world as a source of the product: it reads the ids that were sampled."""

    name, weight = "task", 1.0

    def __init__(self, words: Any, reward: AnswerReward) -> None:
        self._words, self._reward = words, reward

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Any]) -> list[float]:
        tokens = self._words.convert_ids_to_tokens
        return [self._reward(p.id, tuple(tokens(c.ids))) for p, c in zip(prompts, completions, strict=True)]
