"""Text that a template wrote is read back to the ids that made it: merges, begin tokens, thinking and all."""

from __future__ import annotations

import pytest
from toy_tokenizers import ANSWER_COLON, CHATML, STRIPS_THINKING, THINK_OPEN

from heedful.data.chat import answer_ids, prompt_ids, written_ids
from heedful.errors import DataError
from heedful.records import Message

CONVERSATIONS = [
    ["Hello there"],
    ["Hello", "\nyes", "how are you? "],
    ["Hello", "I am fine.", "how are you? "],
    ["foo", "<think>\nabout it\n</think>\n\nthe sky", "bar", " no", "baz"],
]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", [CHATML, THINK_OPEN, STRIPS_THINKING, ANSWER_COLON])
def test_text_is_read_back_to_the_ids_that_made_it(byte_bpe, template, adds_bos):
    tokenizer = byte_bpe(template, adds_bos=adds_bos)

    def text(ids):
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    for turns in CONVERSATIONS:
        prompt = prompt_ids(tokenizer, [Message(("user", "assistant")[n % 2], said) for n, said in enumerate(turns)])
        assert prompt.count(tokenizer.bos_token_id) == adds_bos
        for said in ("yes", "", "  two\n\nlines ", "one two three"):
            answer = answer_ids(tokenizer, said)
            if template == STRIPS_THINKING and turns[1:2] in (["\nyes"], CONVERSATIONS[3][1:2]):
                with pytest.raises(DataError, match="rewrites earlier answers"):  # either may have been so, or be left
                    written_ids(tokenizer, text(prompt + answer), text(prompt))
            else:
                assert written_ids(tokenizer, text(prompt + answer), text(prompt)) == prompt + answer
