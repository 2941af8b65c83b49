"""Tokenizers made on the spot: byte-level BPE, and a Llama-2 like one that adds a space and a begin token.

Each maker takes a chat template. ``conftest.py`` hands the makers out as fixtures.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Hello there, how are you? I am fine. Answer: yes Answer: no",
    "user assistant system question reply foo bar baz one two three four five",
    "think about it\nand say it again\n\nthe sky is blue because of light",
] * 3

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant, no system') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
THINK_OPEN = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
STRIPS_THINKING = (
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# no special token between question and answer; the prompt ends with a space
ANSWER_COLON = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] + eos_token + '\n' }}"
    "{% else %}{{ 'Q: ' + m['content'] + '\nAnswer: ' }}{% endif %}{% endfor %}"
)


def byte_bpe_maker() -> Callable[..., PreTrainedTokenizerFast]:
    """Byte-level BPE, by default without a begin token and with pad = end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [word for line in CORPUS for word in (line, *line.split(" "), " yes", " no")], trainer
    )
    text = tokenizer.to_str()

    def make(template: str | None = CHATML, pad: str = "<|im_end|>", adds_bos: bool = False) -> PreTrainedTokenizerFast:
        inner = Tokenizer.from_str(text)
        if adds_bos:
            inner.post_processor = processors.TemplateProcessing(
                single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", inner.token_to_id("<bos>"))]
            )
        made = PreTrainedTokenizerFast(
            tokenizer_object=inner, eos_token="<|im_end|>", pad_token=pad, bos_token="<bos>" if adds_bos else None
        )
        made.chat_template = template
        return made

    return make


def llama_maker() -> Callable[..., PreTrainedTokenizerFast]:
    """BPE that puts a space in front of every text and adds ``<s>``; pad = eos = ``</s>``."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=list("[]/INST\n:."),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    text = tokenizer.to_str()

    def make(template: str = LLAMA2) -> PreTrainedTokenizerFast:
        made = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(text),
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
            pad_token="</s>",
        )
        made.chat_template = template
        return made

    return make
