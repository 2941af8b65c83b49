"""Chat templates: a conversation becomes token ids, and which of them the assistant spoke.

The template is the tokenizer's own. What the rest of heedful relies on:

* ``prompt_ids(m)`` is what the policy sees at rollout, and ``prompt_ids(m) + answer_ids(a)`` is what SFT, the reward
  model and DPO train on: the answer is tokenised on its own, exactly as it is when the policy speaks it, so no token
  ever straddles the border between prompt and answer.
* The prompt of a later turn starts with the ids of the earlier turns, answers included.
* One begin-of-sequence token, whoever prints it; one end token after each answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from heedful.data.template import TEMPLATES as TEMPLATES
from heedful.data.template import RefusedConversation as RefusedConversation
from heedful.data.template import (
    decode_continuation,
    encode_context,
    encode_continuation,
    read_context,
    read_continuation,
    template_of,
)
from heedful.data.template import render as render
from heedful.data.template import set_template as set_template
from heedful.errors import DataError
from heedful.records import Message, TokenSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["assistant", "last"]


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
    template = template_of(tokenizer)
    ids = encode_continuation(tokenizer, template.spoken(text))
    if template.end_text:
        ids = ids[:-1]
    if not set(ids).isdisjoint(template.end_ids):
        raise RefusedConversation("control_token_in_text", "the answer's text holds the token that ends a turn")
    return [*ids, template.end_ids[0]]


def scored_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], answer: str) -> list[int]:
    """Token ids of a prompt and an answer as a reward model reads them.

    An end token that is spelled out inside the answer is left out: it would end the answer early.

    Raises:
        ModelError, RefusedConversation: as :func:`prompt_ids`.
    """
    for end in end_token_ids(tokenizer):
        answer = answer.replace(str(tokenizer.convert_ids_to_tokens(end)), "")
    return prompt_ids(tokenizer, messages) + answer_ids(tokenizer, answer)


def answer_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """What the assistant said with these ids: of what :func:`answer_ids` gives, the text that it was given.

    Special tokens are left out (REW-10), and so is what the template itself puts around every answer.
    """
    return template_of(tokenizer).heard(decode_continuation(tokenizer, ids, skip_special=True))


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end an assistant's turn: first the one the template prints, then the tokenizer's eos."""
    return template_of(tokenizer).end_ids


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
        if template_of(tokenizer).end_text:
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


def written_ids(tokenizer: PreTrainedTokenizerBase, query: str, prompt: str | None = None) -> list[int]:
    """The ids that :func:`prompt_ids` and :func:`answer_ids` give for a conversation, from its text.

    What the assistant said earlier is found by the text that the template puts before it. Special tokens inside the
    last answer are left out, as they are where a policy's answer is read.

    Args:
        query: prompt and answer as a policy with this template writes them, with or without the end token. A prompt
            in which nothing is of this template's structure is taken as the text of one user message.
        prompt: the beginning of ``query`` up to the answer; None looks for the last place where an answer begins.

    Raises:
        DataError: ``prompt`` does not open ``query``, there is no place where the answer begins, the tokenizer would
            show other tokens by the same text, or the template may have rewritten an earlier answer.
    """
    template = template_of(tokenizer)
    header = template.header
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
        ids += read_context(tokenizer, template, context + header, first=not ids)
        ids += [*read_continuation(tokenizer, said + end)[:-1], template.end_ids[0]]
        context = after
    ids += read_context(tokenizer, template, context + header, first=not ids)
    with_earlier = context != prompt.removesuffix(header)
    # a rewritten answer was encoded with the text around it, and nothing tells whether it was rewritten
    if with_earlier and _rewrites(tokenizer) and ids != read_context(tokenizer, template, prompt, first=True):
        raise DataError("the chat template rewrites earlier answers, so the prompt does not tell which tokens it was")
    return ids + answer_ids(tokenizer, template.heard(answer))


def _rewrites(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template prints an earlier answer otherwise than it was spoken: without its thinking."""
    thought = Message("assistant", "<think>\nthought\n</think>\n\nsaid")
    question = Message("user", "question")
    return len(_pieces(tokenizer, [question, thought, question])) == 1


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
    template = template_of(tokenizer)
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
        pieces.append(_Piece(encode_context(tokenizer, template, text[start : len(before)], first=start == 0)))
        pieces.append(_Piece(answer_ids(tokenizer, message.content), index))
        start = len(before) + len(spoken)
    pieces.append(_Piece(encode_context(tokenizer, template, text[start:], first=start == 0)))
    return pieces
