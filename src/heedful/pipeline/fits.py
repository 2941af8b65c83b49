"""Which texts the reward model in a folder cannot read: too long, or refused by its template."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from heedful.errors import DataError, EngineError, HeedfulError, ModelError
from heedful.pipeline.scorer import kind_of
from heedful.records import Prompt


def why_unfit(model: str) -> Callable[[Prompt, str], str | None] | None:
    """What keeps a folder's model from reading a prompt and answer; servers and functions see to that themselves."""
    if kind_of(model) != "folder":
        return None
    from transformers import AutoConfig

    from heedful.data.chat import RefusedConversation, scored_ids
    from heedful.models.load import load_tokenizer, resolve

    path = resolve(model)
    limit = getattr(AutoConfig.from_pretrained(path).get_text_config(), "max_position_embeddings", None)
    tokenizer = load_tokenizer(path)

    def why(prompt: Prompt, answer: str) -> str | None:
        try:
            num_tokens = len(scored_ids(tokenizer, prompt.messages, answer))
        except RefusedConversation as error:
            return str(error)
        if limit is None or num_tokens <= limit:
            return None
        return f"{num_tokens:,} tokens with its answer {answer[:30]!r}…, the model has {limit:,} positions"

    return why


def explained(
    error: HeedfulError, where: str, model: str, prompts: Sequence[Prompt], answers: Sequence[str], end: str = ""
) -> HeedfulError:
    """The error again with the place, and with the first text that the model cannot read where that is the reason."""
    said = str(error)
    why = why_unfit(model) if isinstance(error, DataError | ModelError) else None
    if why is not None:
        for prompt, answer in zip(prompts, answers, strict=True):
            if found := why(prompt, answer):
                said = f"{prompt.id!r}: {found}; leave it out of the file"
                break
    kinds = (DataError, ModelError, EngineError, HeedfulError)  # subclasses may take more than a message
    return next(kind for kind in kinds if isinstance(error, kind))(f"{where}: {said}{end}")
