"""Chat templates: a conversation becomes token ids, and which of them the assistant spoke.

The template is the tokenizer's own. What the rest of heedful relies on:

* ``prompt_ids(m)`` is what the policy sees at rollout, and ``prompt_ids(m) + answer_ids(a)`` is what SFT, the reward
  model and DPO train on: the answer is tokenised on its own, exactly as it is when the policy speaks it, so no token
  ever straddles the border between prompt and answer.
* The prompt of a later turn starts with the ids of the earlier turns, answers included.
* One begin-of-sequence token, whoever prints it; one end token after each answer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from heedful.errors import DataError, ModelError
from heedful.records import Message, TokenSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["assistant", "last"]

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


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation that waits for the assistant's answer; the same in training and at rollout.

    Raises:
        ModelError: the tokenizer has no usable template.
        RefusedConversation: the template refuses or drops a message, or a text holds a control token.
    """
    return [token for piece in _pieces(tokenizer, messages) for token in piece.ids]


def answer_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of an answer as the assistant speaks it after ``prompt_ids``, its one end token included.

    Raises:
        RefusedConversation: the text itself holds an end token.
    """
    template = _template(tokenizer)
    ids = _encode_continuation(tokenizer, template.spoken(text))
    if template.end_text:
        ids = ids[:-1]
    if not set(ids).isdisjoint(template.end_ids):
        raise RefusedConversation("control_token_in_text", "the answer's text holds the token that ends a turn")
    return [*ids, template.end_ids[0]]


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end an assistant's turn: first the one the template prints, then the tokenizer's eos."""
    return _template(tokenizer).end_ids


def conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    train_on: TrainOn = "assistant",
    sample_id: str = "",
) -> TokenSample:
    """One training sample up to the last assistant turn; the loss mask covers answers and their end tokens only.

    An assistant turn that opens the conversation answers nothing and is context.

    Args:
        train_on: "assistant" trains every assistant turn, "last" only the last.
        sample_id: carried into the sample, for messages.

    Raises:
        RefusedConversation: no assistant turn to train, or the template rewrites earlier turns (train_on="assistant").
    """
    answered = [index for index, message in enumerate(messages) if message.role == "assistant" and index > 0]
    if not answered:
        raise RefusedConversation("no_supervised_token", "the conversation has no assistant turn to train on")
    last = answered[-1]
    pieces = _pieces(tokenizer, messages[:last])
    kept = {piece.message for piece in pieces}
    if train_on == "assistant" and (lost := [index for index in answered[:-1] if index not in kept]):
        if _template(tokenizer).end_text:
            why = f"rewrites an earlier assistant turn (message {lost[0] + 1}) once later turns follow"
        else:
            why = "prints no end token after an assistant turn"
        raise RefusedConversation(
            "rewritten_by_template",
            f"the chat template {why}, so not every turn can be trained as it was spoken; set train_on to 'last'",
        )
    pieces.append(_Piece(answer_ids(tokenizer, messages[last].content), last))
    ids: list[int] = []
    loss_mask: list[bool] = []
    for piece in pieces:
        counts = piece.message == last if train_on == "last" else piece.message is not None
        ids += piece.ids
        loss_mask += [counts] * len(piece.ids)
    return TokenSample(ids, loss_mask, sample_id)


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


def written_ids(tokenizer: PreTrainedTokenizerBase, query: str, prompt: str | None = None) -> list[int]:
    """The ids that :func:`prompt_ids` and :func:`answer_ids` give for a conversation, from its text.

    What the assistant said earlier is found by the text that the template puts before it; what the template has
    rewritten there counts as spoken so, and may then differ in the tokens at its border. Special tokens inside the last
    answer are left out, as they are where a policy's answer is read.

    Args:
        query: prompt and answer as a policy with this template writes them, with or without the end token. A prompt
            in which nothing is of this template's structure is taken as the text of one user message.
        prompt: the beginning of ``query`` up to the answer; None looks for the last place where an answer begins.

    Raises:
        DataError: ``prompt`` does not open ``query``, or there is no place where the answer begins.
    """
    template = _template(tokenizer)
    header = render(tokenizer, [Message("user", _PROBE)], add_generation_prompt=True).split(_PROBE)[1]
    if prompt is None:
        before, _, _ = query.rpartition(header)
        prompt = before + header if header in query else ""
    if not query.startswith(prompt) or not prompt:
        raise DataError("the query does not begin with its prompt, so nothing tells where the answer begins")
    answer = query[len(prompt) :]
    marked = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    for special in marked.union(tokenizer.all_special_tokens):
        answer = answer.replace(special, "")
    if not prompt.endswith(header):
        if template.control_tokens.search(prompt):
            raise DataError(f"the prompt does not end with {header!r}, as this model's chat template writes it")
        return prompt_ids(tokenizer, [Message("user", prompt)]) + answer_ids(tokenizer, answer.lstrip())
    ids: list[int] = []
    context, *rest = prompt.removesuffix(header).split(header)
    for piece in rest:
        said, end, after = piece.partition(template.end_text) if template.end_text else ("", "", "")
        if not end:  # the same words in somebody's message
            context += header + piece
            continue
        ids += _encode_context(tokenizer, template, context + header, first=not ids)
        ids += [*_encode_continuation(tokenizer, said + end)[:-1], template.end_ids[0]]
        context = after
    ids += _encode_context(tokenizer, template, context + header, first=not ids)
    return ids + answer_ids(tokenizer, answer)


@dataclass(frozen=True, slots=True)
class _Piece:
    ids: list[int]
    message: int | None = None
    """Index of the assistant message that these ids are, as it was spoken; None = context."""


def _pieces(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[_Piece]:
    """The prompt cut where the assistant spoke.

    An earlier answer becomes a piece of its own when the template still prints it as it was spoken; where the template
    rewrites it (drops the thinking, say) it stays inside the context around it, as at rollout.
    """
    template = _template(tokenizer)
    text = render(tokenizer, messages, add_generation_prompt=True)
    for number, message in enumerate(messages, start=1):
        if token := template.control_tokens.search(message.content):
            raise RefusedConversation(
                "control_token_in_text", f"message {number} holds the control token {token.group()!r} in its text"
            )
        if message.role != "assistant" and message.content.strip() not in text:
            raise RefusedConversation(
                "dropped_by_template", f"the chat template drops message {number}, whose role is {message.role!r}"
            )
    pieces: list[_Piece] = []
    start = 0
    for index, message in enumerate(messages):
        if message.role != "assistant" or index == 0 or not template.end_text:
            continue
        before = render(tokenizer, messages[:index], add_generation_prompt=True)
        spoken = template.spoken(message.content)
        if len(before) < start or not text.startswith(before + spoken):
            continue
        pieces.append(_Piece(_encode_context(tokenizer, template, text[start : len(before)], first=start == 0)))
        pieces.append(_Piece(answer_ids(tokenizer, message.content), index))
        start = len(before) + len(spoken)
    pieces.append(_Piece(_encode_context(tokenizer, template, text[start:], first=start == 0)))
    return pieces


@dataclass(frozen=True)
class _Template:
    """What is known of a tokenizer's template, found by rendering small conversations."""

    source: tuple[str, int | None]
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
        lead = self.lead
        if tags := re.findall(r"</\w+>|\[/\w+\]", lead):
            # an empty thinking block belongs before an answer without thinking only
            lead = "" if tags[-1] in text else lead
        return lead + text + self.tail + self.end_text


_known: WeakKeyDictionary[PreTrainedTokenizerBase, _Template] = WeakKeyDictionary()


def _template(tokenizer: PreTrainedTokenizerBase) -> _Template:
    source = (str(tokenizer.chat_template), tokenizer.eos_token_id)
    known = _known.get(tokenizer)
    if known is None or known.source != source:
        known = _known[tokenizer] = _probe(tokenizer, source)
    return known


def _probe(tokenizer: PreTrainedTokenizerBase, source: tuple[str, int | None]) -> _Template:
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
    return _Template(
        source=source,
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


def _encode_context(tokenizer: PreTrainedTokenizerBase, template: _Template, text: str, *, first: bool) -> list[int]:
    """Ids of text that the template wrote; ``first`` = it opens the sequence, else it follows an end token."""
    if not first:
        # with the end token in front, because some end tokens swallow the blanks that follow them
        return _encode(tokenizer, template.end_text + text)[1:]
    ids = _encode(tokenizer, text)
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:1] != [bos] and _encode(tokenizer, "a", add_special_tokens=True)[0] == bos:
        ids = [bos, *ids]
    return ids


def _encode_continuation(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of text that follows other text: without the space that some tokenizers put in front of everything."""
    ids = _encode(tokenizer, text)
    if not str(tokenizer.convert_ids_to_tokens(_encode(tokenizer, "a"))[0]).startswith("\u2581"):
        return ids
    newline = _encode(tokenizer, "\n")
    joined = _encode(tokenizer, "\n" + text)
    return joined[len(newline) :] if joined[: len(newline)] == newline else ids
