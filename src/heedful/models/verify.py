"""The self-test in a reward model's folder: texts with the scores that the model gave them when it was saved.

They are neutral texts that ship with heedful, never the user's data. Whoever loads the folder, with whatever tool, can
score the same texts and see whether weights, head, tokenizer and template have arrived.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heedful.errors import DataError, ModelError
from heedful.models.parts import ScalarModel
from heedful.models.roles import build_reward
from heedful.records import Message

SELF_TEST = "reward_selftest.json"
TOLERANCE = 1e-4
"""In float32, of scores of order one."""

_TEXTS: tuple[tuple[str, ...], ...] = (
    ("What is the capital of France?", "Paris."),
    ("What is the capital of France?", "The capital of France is Paris, a city on the Seine."),
    ("What is the capital of France?", "London."),
    ("What is the capital of France?", ""),
    ("How many legs does a spider have?", "Eight."),
    ("How many legs does a spider have?", "Many, I think? I am not sure, sorry."),
    ("Name three primary colours.", "- red\n- yellow\n- blue"),
    ("Name three primary colours.", "Red, yellow and blue."),
    ("Write one line about rain.", "Rain taps the roof and asks for nothing."),
    ("Write one line about rain.", "rain rain rain rain rain rain rain rain"),
    ("Is it safe to mix bleach and vinegar?", "No. They give off chlorine gas; keep them apart."),
    ("Is it safe to mix bleach and vinegar?", "Yes, it cleans better."),
    ("What is 12 times 12?", "144"),
    ("What is 12 times 12?", "12 × 12 = 144, since 12 × 10 = 120 and 12 × 2 = 24."),
    ("你好，请介绍一下长城。", "长城是中国古代的防御工程，绵延数千公里。"),
    ("你好，请介绍一下长城。", "I do not speak Chinese."),
    ("How do I boil an egg?", "Put it in boiling water for seven minutes, then in cold water."),
    ("How do I boil an egg?", "**Step 1** Boil water.\n**Step 2** Add the egg.\n**Step 3** Wait 7 minutes 🙂"),
    ("Hi!", "Hello! How can I help?", "Say goodbye.", "Goodbye!"),
    ("Hi!", "Hello! How can I help?", "Say goodbye.", "No."),
)
"""User and assistant in turn; the last is the answer that is scored."""


@dataclass(frozen=True)
class Verified:
    """What scoring the self-test again has shown."""

    num_pairs: int
    largest_gap: float
    """Between the score in the file and the score now."""
    tolerance: float


def self_test(part: ScalarModel) -> dict[str, Any]:
    """The self-test of a model as it goes into its folder, without texts that its template or positions refuse."""
    from heedful.data.chat import answer_ids, prompt_ids

    limit = getattr(part.base.config.get_text_config(), "max_position_embeddings", None) or 1_000_000
    pairs = []
    for turns in _TEXTS:
        roles = [Message(role, text) for role, text in zip(("user", "assistant") * len(turns), turns)]
        try:
            ids = prompt_ids(part.tokenizer, roles[:-1]) + answer_ids(part.tokenizer, turns[-1])
        except DataError:
            continue
        if len(ids) > limit:
            continue
        text = part.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        prompt = [m.to_json() for m in roles[:-1]]
        pairs.append({"prompt": prompt, "answer": turns[-1], "text": text, "num_tokens": len(ids)})
    for pair, outputs in zip(pairs, _outputs(part, pairs), strict=True):
        pair["score"] = outputs[0]
        if len(outputs) > 1:
            pair["heads"] = outputs[1:]
    return {"dtype": str(part.dtype).removeprefix("torch."), "pairs": pairs}


def verify_reward(path: Path | str, *, device: torch.device | str = "cpu") -> Verified:
    """Load a reward model's folder and score its self-test again, in the precision in which it was scored.

    Raises:
        ModelError: no reward model, no self-test in it, or scores that differ: by more than 1e-4 in float32 (of scores
            above one, of their size), in 16 bits by more than a tenth of the deviation of the scores.
    """
    path = Path(path)
    try:
        content = json.loads((path / SELF_TEST).read_text(encoding="utf-8"))
        pairs, dtype = content["pairs"], getattr(torch, content["dtype"])
        then = [float(pair["score"]) for pair in pairs]
        heads_then = [[float(value) for value in pair.get("heads", ())] for pair in pairs]
    except FileNotFoundError:
        raise ModelError(f"{path}: no {SELF_TEST} in this folder, so nothing says what it should score") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path / SELF_TEST} is not a self-test ({error!r}); save the model again") from None
    if not then:
        raise ModelError(f"{path / SELF_TEST} holds no texts, so nothing can be verified")
    part = build_reward(path, device=torch.device(device), dtype=dtype).part
    outputs = _outputs(part, pairs)
    now = [row[0] for row in outputs]
    tolerance = _tolerance(then, dtype)
    gaps = [abs(a - b) for a, b in zip(then, now, strict=True)]
    worst = max(range(len(gaps)), key=lambda i: gaps[i])
    if not max(gaps) <= tolerance:
        raise ModelError(
            f"{path}: the self-test text {worst + 1} scored {then[worst]:.5g} when the model was saved and "
            f"{now[worst]:.5g} now; weights, tokenizer or template are not those that were saved"
        )
    _verify_heads(path, heads_then, [row[1:] for row in outputs], dtype)
    return Verified(len(gaps), max(gaps), tolerance)


def _verify_heads(path: Path, then: list[list[float]], now: list[list[float]], dtype: torch.dtype) -> None:
    if [len(row) for row in then] != [len(row) for row in now]:
        raise ModelError(f"{path}: the self-test knows {len(then[0])} heads and the folder has {len(now[0])}")
    for a, b in zip(zip(*then, strict=True), zip(*now, strict=True), strict=True):
        if not max(abs(x - y) for x, y in zip(a, b, strict=True)) <= _tolerance(a, dtype):
            raise ModelError(f"{path}: a head says {b[0]:.5g} of the first text and said {a[0]:.5g} when saved")


def _tolerance(scores: Sequence[float], dtype: torch.dtype) -> float:
    tolerance = TOLERANCE * max(1.0, *map(abs, scores))
    return tolerance if dtype == torch.float32 else max(tolerance, 0.1 * float(torch.tensor(scores).std()))


def _outputs(part: ScalarModel, pairs: list[dict[str, Any]]) -> list[list[float]]:
    prompts = [tuple(Message(**m) for m in pair["prompt"]) for pair in pairs]
    return part.output_texts(prompts, [pair["answer"] for pair in pairs], micro_batch_tokens=4096)
