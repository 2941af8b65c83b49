"""Model folders in other hands: what tools around transformers read in them, older releases of it too."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from heedful.errors import DataError
from heedful.records import Message

_TURNS = [Message("user", "QUESTION"), Message("assistant", "ANSWERTEXT")]


def for_transformers_4(folder: Path) -> None:
    """Say in a folder what transformers 4 looks for elsewhere, beside what 5 has written; both then read the same.

    The base and the scaling of rotary positions (a release that finds none takes 10 000 and scores other positions
    without a word), the class of the tokenizer, its inputs and its special tokens.
    """
    config = _read(folder / "config.json")
    rope = config.get("rope_parameters") or {}
    if isinstance(rope.get("rope_theta"), (int, float)):  # else by kind of layer, which had no common name
        config["rope_theta"] = rope["rope_theta"]
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope["partial_rotary_factor"]
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
        _write(folder / "config.json", config)
    settings = _read(folder / "tokenizer_config.json")
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # its name in 4, which 5 knows too
        settings.setdefault("model_input_names", ["input_ids", "attention_mask"])  # 4 would add token_type_ids
    if isinstance(settings.get("extra_special_tokens"), list):  # a table in 4
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if settings:
        _write(folder / "tokenizer_config.json", settings)


def ending_at_the_score(tokenizer: Any) -> Any:
    """The tokenizer, or a copy whose chat template ends a finished conversation with the token that is scored.

    Tools that score what the template prints (RewardBench, vLLM's chat, a pipeline) read its last token: after ChatML's
    ``<|im_end|>`` a newline, which the reward model was never asked at. Prompts, and turns before the last, stay as
    they were; a template of which that cannot be shown is left alone.
    """
    from heedful.data.chat import render
    from heedful.data.template import template_of

    if not isinstance(tokenizer.chat_template, str):
        return tokenizer
    spoken = template_of(tokenizer)
    after = render(tokenizer, _TURNS, add_generation_prompt=False).rpartition(_TURNS[1].content)[2]
    after = after.removeprefix(spoken.tail + spoken.end_text)
    if not after and spoken.end_text:
        return tokenizer
    tests = ["not add_generation_prompt", "messages[-1]['role'] == 'assistant'"]
    shown = "chat"
    if after:
        tests.append(f"chat[-{len(after)}:] == {json.dumps(after)}")
        shown = f"chat[:-{len(after)}]"
    if not spoken.end_text:
        shown += " + eos_token"
    own = tokenizer.chat_template.removesuffix("\n")  # which jinja drops at the end of a template, and only there
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = (
        "{% set chat %}" + own + "{% endset %}{{ " + f"{shown} if {' and '.join(tests)} else chat" + " }}"
    )
    return changed if _reads_the_same(tokenizer, changed) else tokenizer


def _reads_the_same(tokenizer: Any, changed: Any) -> bool:
    """Prompts and answers have the same ids as before, and a finished conversation ends with the end token."""
    from heedful.data.chat import answer_ids, end_token_ids, prompt_ids, render

    def ids(which: Any, messages: list[Message]) -> Any:
        try:
            return prompt_ids(which, messages), answer_ids(which, " Yes.\n")
        except DataError as error:  # both may refuse a system message, say
            return str(error)

    question = _TURNS[:1]
    for prompt in (question, [Message("system", "RULE"), *question], _TURNS + question):
        if ids(tokenizer, prompt) != ids(changed, prompt):
            return False
    text = render(changed, _TURNS, add_generation_prompt=False)
    return bool(changed(text, add_special_tokens=False)["input_ids"][-1] == end_token_ids(tokenizer)[0])


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
