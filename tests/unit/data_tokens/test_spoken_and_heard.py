"""What a policy says is scored by the ids that training gives that answer, whatever the template adds."""

from __future__ import annotations

import itertools
import random

import pytest
from toy_tokenizers import ANSWER_COLON, CHATML, LLAMA2, STRIPS_THINKING, THINK_OPEN

from heedful.data.chat import TEMPLATES, answer_ids, answer_text, prompt_ids, written_ids
from heedful.records import Message
from heedful.rollout.engine import Request
from heedful.rollout.hf import completion

EMPTY_THINKING = CHATML.replace("m['role'] + '\n' + m['content']", (
    "m['role'] + '\n' + ('<think>\n\n</think>\n\n' if m['role'] == 'assistant' and '</think>' not in m['content'] "
    "else '') + m['content']"
))  # fmt: skip
TAIL = CHATML.replace("m['content'] + '<|im_end|>", "m['content'] + '\n<|im_end|>")
BYTE_TEMPLATES = {
    **TEMPLATES, "think": THINK_OPEN, "strips": STRIPS_THINKING, "colon": ANSWER_COLON,
    "empty thinking": EMPTY_THINKING, "tail": TAIL,
}  # fmt: skip
PIECES = (
    "", " ", "  ", "\n", "\n\n", "\t", "a", "two words", "Yes, it is.", " it", "汉字", "，。", "🙂", "👩\u200d🔬",
    "é", "e\u0301", "\ufffd", "<think>", "<think>\n", "</think>", "<think>\n\n</think>\n\n", "User:", "Assistant:",
    "[/INST]", "\u00a0",
)  # fmt: skip


def answers(num):
    """Every piece, and random ones in a row."""
    rng = random.Random(0)
    return [*PIECES, *("".join(rng.choices(PIECES, k=rng.randint(2, 6))) for _ in range(num))]


def scored(tokenizer, text):
    """The ids under which the answer of a policy is scored that has spoken ``text`` as training taught it."""
    request = Request("p", 0, prompt_ids(tokenizer, [Message("user", "q")]))
    ids = answer_ids(tokenizer, text)
    said = completion(request, ids, [0.0] * len(ids), True, 0, tokenizer).text
    return ids, answer_ids(tokenizer, said), said


@pytest.mark.parametrize("name", BYTE_TEMPLATES)
def test_a_sampled_answer_is_scored_by_the_ids_of_training(byte_bpe, name):
    tokenizer = byte_bpe(BYTE_TEMPLATES[name])
    for text in answers(300):
        trained, read, said = scored(tokenizer, text)
        assert read == trained, (text, said)
        if name in ("plain", "chatml", "tail"):  # these say every text as it is
            assert said == text


def test_plain_answers_come_without_the_blank_that_the_template_writes(byte_bpe):
    tokenizer = byte_bpe(TEMPLATES["plain"])
    assert answer_text(tokenizer, answer_ids(tokenizer, "yes")) == "yes"
    assert answer_text(tokenizer, answer_ids(tokenizer, " yes")) == " yes"
    assert answer_text(tokenizer, tokenizer("yes")["input_ids"]) == "yes"  # a policy that leaves the blank out
    prompt, answer = prompt_ids(tokenizer, [Message("user", "q")]), answer_ids(tokenizer, "yes")
    assert written_ids(tokenizer, tokenizer.decode(prompt + answer), tokenizer.decode(prompt)) == prompt + answer


@pytest.mark.parametrize("template", [LLAMA2, TEMPLATES["plain"]], ids=["llama2", "plain"])
def test_decoders_that_take_a_blank_off_the_start(llama, template):
    tokenizer = llama(template)
    words = ("fine", "it is", " fine", "  it\nis ", "\nfine", "are you? I am", "")
    for text in (*words, *map("".join, itertools.product(words, repeat=2))):
        trained, read, said = scored(tokenizer, text)
        assert read == trained, (text, said)
