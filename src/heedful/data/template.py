"""What is known of a tokenizer's chat template, and how the text around an answer, and the answer, are encoded."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from heedful.errors import DataError, ModelError
from heedful.records import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES = {
    "plain": (
        "{% for message in messages %}"
        "{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token + '\\n\\n' }}"
        "{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
        "{% else %}{{ 'User: ' + message['content'] + '\\n\\nAssistant:' }}{% endif %}"
        "{% endfor %}"
    ),
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
}
"""Built-in templates by name. ``plain`` works with every tokenizer that has an end token."""

_PROBE = "ANSWERTEXT"
_OPENED_TAG = re.compile(r"(<\w+>|\[\w+\])(\s*)$")


class RefusedConversation(DataError):
    """A conversation that cannot be trained on; ``reason`` is the word under which it is counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def set_template(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Give the tokenizer a chat template: the name of a built-in one, or jinja text.

    Raises:
        ModelError: an unknown name, or a built-in template whose special tokens the tokenizer lacks.
    """
    if "{" not in template and template not in TEMPLATES:
        raise ModelError(f"no chat template is called {template!r}; give one of {', '.join(TEMPLATES)}, or jinja text")
    if template == "chatml":
        vocabulary = tokenizer.get_vocab()
        for token in ("<|im_start|>", "<|im_end|>"):
            if token not in vocabulary:
                raise ModelError(f"template 'chatml' needs the token {token}, which this tokenizer lacks; use 'plain'")
    tokenizer.chat_template = TEMPLATES.get(template, template)


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    """The conversation as text, by the tokenizer's template.

    Raises:
        ModelError: the tokenizer has no template.
        RefusedConversation: the template refuses the conversation, for a role or an order of roles.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template; name a built-in one "
            f"({', '.join(TEMPLATES)}) or give jinja text, see heedful.data.chat.set_template"
        )
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        roles = ", ".join(message.role for message in messages)
        raise RefusedConversation(
            "refused_by_template", f"the chat template refuses a conversation with the roles {roles}: {error.message}"
        ) from None
    return str(text)


@dataclass(frozen=True)
class Template:
    """What is known of a tokenizer's template, found by rendering small conversations."""

    source: tuple[str, int | None]
    header: str
    """Text between a question and the answer to it."""
    lead: str
    """Text between the generation prompt and the answer (Llama 2: a space; Qwen 3: an empty thinking block)."""
    tail: str
    """Text between the answer and the end token."""
    end_text: str
    """The end token as the template prints it; empty when it prints none and eos alone ends an answer."""
    end_ids: tuple[int, ...]
    opened: re.Match[str] | None
    """A tag that the generation prompt opens at its end, such as ``<think>``."""
    trim_left: str
    trim_right: str
    control_tokens: re.Pattern[str]
    """Special tokens that give the conversation its structure and so must not occur in a message."""

    def spoken(self, text: str) -> str:
        """What follows the generation prompt when the assistant says ``text``."""
        text = text.lstrip(self.trim_left).rstrip(self.trim_right)
        if self.opened and text.startswith(self.opened[1]):
            text = text.removeprefix(self.opened[1]).removeprefix(self.opened[2])
        return self._lead_before(text) + text + self.tail + self.end_text

    def heard(self, text: str) -> str:
        """What the assistant says when ``text``, without its end token, follows the generation prompt: undoes
        :meth:`spoken` as far as ``text`` is what that writes."""
        text = text.removesuffix(self.tail)
        rest = text.removeprefix(self.lead)
        if self._lead_before(rest) == self.lead:
            text = rest
        if self.opened and text.startswith(self.opened[1]):  # opened once more, which ``spoken`` takes for the first
            text = self.opened[0] + text
        return text

    def _lead_before(self, text: str) -> str:
        """An empty thinking block belongs before an answer without thinking only."""
        tags = re.findall(r"</\w+>|\[/\w+\]", self.lead)
        return "" if tags and tags[-1] in text else self.lead


_known: WeakKeyDictionary[PreTrainedTokenizerBase, Template] = WeakKeyDictionary()


def template_of(tokenizer: PreTrainedTokenizerBase) -> Template:
    """What is known of the tokenizer's template; a changed one is noticed."""
    source = (str(tokenizer.chat_template), tokenizer.eos_token_id)
    known = _known.get(tokenizer)
    if known is None or known.source != source:
        known = _known[tokenizer] = _probe(tokenizer, source)
    return known


def _probe(tokenizer: PreTrainedTokenizerBase, source: tuple[str, int | None]) -> Template:
    question = Message("user", "QUESTION")

    def after(answer: str) -> str:
        return render(tokenizer, [question, Message("assistant", answer)], add_generation_prompt=False)

    prompt = render(tokenizer, [question], add_generation_prompt=True)
    text = after(_PROBE)
    if _PROBE not in text:
        raise ModelError("the chat template does not print the assistant's text, so it cannot be trained with")
    before, suffix = text.split(_PROBE, 1)
    shared = os.path.commonprefix([prompt, before])
    special = _special_tokens(tokenizer)
    end_ids = [token for token in _encode(tokenizer, suffix) if token in special][:1]
    end_text = special[end_ids[0]] if end_ids else ""
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in end_ids:
        end_ids.append(tokenizer.eos_token_id)
    if not end_ids:
        raise ModelError("neither the chat template nor the tokenizer (eos_token) has a token that ends an answer")
    # a tag that the prompt opens for thinking is the assistant's to close, not structure
    opened = _OPENED_TAG.search(prompt)
    header = shared.removesuffix(opened[0]) if opened else shared
    structure = {special[token] for token in _encode(tokenizer, header + suffix) if token in special}
    structure |= {str(tokenizer.convert_ids_to_tokens(token)) for token in end_ids}
    structure |= {str(tokenizer.bos_token)} if tokenizer.bos_token else set()
    return Template(
        source=source,
        header=prompt.rpartition(question.content)[2],
        lead=before[len(shared) :] if shared == prompt else "",
        tail=suffix[: suffix.index(end_text)] if end_text else "",
        end_text=end_text,
        end_ids=tuple(end_ids),
        opened=opened,
        trim_left=_blanks(lambda blank: after(blank + _PROBE) != before + blank + _PROBE + suffix),
        trim_right=_blanks(lambda blank: after(_PROBE + blank) != before + _PROBE + blank + suffix),
        control_tokens=re.compile("|".join(re.escape(token) for token in sorted(structure))),
    )


def _blanks(trims: Callable[[str], bool]) -> str:
    """Which blanks the template trims, asked with two of each."""
    return "".join(blank for blank in (" ", "\n", "\t") if trims(blank * 2))


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Tokens that may give a conversation its structure: id → text. Unknown text is no structure."""
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens))
    special.pop(tokenizer.unk_token_id if tokenizer.unk_token_id is not None else -1, None)
    return special


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = False) -> list[int]:
    # verbose=False: whether a sequence is too long is decided, and reported, by tokenise.py
    return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])


def encode_context(tokenizer: PreTrainedTokenizerBase, template: Template, text: str, *, first: bool) -> list[int]:
    """Ids of text that the template wrote; ``first`` = it opens the sequence, else it follows an end token."""
    if not first:
        # with the end token in front, because some end tokens swallow the blanks that follow them
        return _encode(tokenizer, template.end_text + text)[1:]
    ids = _encode(tokenizer, text)
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:1] != [bos] and _encode(tokenizer, "a", add_special_tokens=True)[0] == bos:
        ids = [bos, *ids]
    return ids


def encode_continuation(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of text that follows other text: without the space that some tokenizers put in front of everything."""
    ids = _encode(tokenizer, text)
    if not str(tokenizer.convert_ids_to_tokens(_encode(tokenizer, "a"))[0]).startswith("\u2581"):
        return ids
    newline = _encode(tokenizer, "\n")
    joined = _encode(tokenizer, "\n" + text)
    return joined[len(newline) :] if joined[: len(newline)] == newline else ids


def read_context(tokenizer: PreTrainedTokenizerBase, template: Template, text: str, *, first: bool) -> list[int]:
    """The ids that :func:`encode_context` had made where their text is ``text``.

    Some decoders show a blank behind a special token where none was encoded, so both are tried.

    Raises:
        DataError: no ids have this text, or several.
    """
    marks = "|".join(re.escape(token) for token in _special_tokens(tokenizer).values())
    before, end = ([], "") if first else ([template.end_ids[0]], template.end_text)
    texts = (text, re.sub(f"({marks}) ", r"\1", end + text).removeprefix(end))
    tried = {tuple(encode_context(tokenizer, template, t, first=first)) for t in texts}
    shown = _decode(tokenizer, before) + text
    found = [list(ids) for ids in tried if _decode(tokenizer, [*before, *ids]) == shown]
    if len(found) != 1:
        raise DataError(f"{_short(text)} does not tell which tokens it was, as this model's tokenizer shows them")
    return found[0]


def read_continuation(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids that :func:`encode_continuation` had made where their text is ``text``.

    Raises:
        DataError: no ids have this text.
    """
    ids = encode_continuation(tokenizer, text)
    if decode_continuation(tokenizer, ids) != text:
        raise DataError(f"{_short(text)} is no text that this model's tokenizer gives back")
    return ids


def decode_continuation(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, skip_special: bool = False) -> str:
    """The text that ids add to a text before them: with a blank at its start that a decoder would take off alone."""
    before = _encode(tokenizer, "\n")
    alone, joined = (_decode(tokenizer, shown, skip_special) for shown in (before, [*before, *ids]))
    return joined.removeprefix(alone) if alone and joined.startswith(alone) else _decode(tokenizer, ids, skip_special)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], skip_special: bool = False) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:40]} … {text[-39:]}")
