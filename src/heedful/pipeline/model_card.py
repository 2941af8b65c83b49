"""The model card of a reward model: README.md in its folder, for whoever is handed that folder and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heedful.config.recipe import Recipe
from heedful.data.export import record_row
from heedful.data.pairs import agreement, judgements_once
from heedful.errors import ModelError
from heedful.evaluate.card_text import parts, percent, sentences
from heedful.models.export import load_reward_card
from heedful.records import Ranking, RewardCard
from heedful.runs.files import write_bytes

README = "README.md"
USE = """```python
import json
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained(".").eval()
tokenizer = AutoTokenizer.from_pretrained(".")
for pair in json.load(open("reward_selftest.json"))["pairs"]:
    ids = tokenizer(pair["text"], add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        print(float(model(**ids).logits[0, 0]), pair["score"])      # equal to 1e-4 in float32
```"""


def data_facts(recipe: Recipe, train: Sequence[Ranking], heldout: Sequence[Ranking]) -> dict[str, Any]:
    """What a reward model was trained on and by whom it was judged, for ``RewardCard.data``; no text of the data."""
    everything = [*train, *heldout]
    judged = [j for ranking in everything for j in judgements_once(ranking)]
    agreed = agreement(everything)
    digest = hashlib.sha256()
    for ranking in train:
        digest.update(json.dumps(record_row(ranking), sort_keys=True, default=str).encode())
    return {
        "base_model": _name(recipe.model.name),
        "rankings": _name(recipe.data.rankings or ""),
        "rankings_sha256": digest.hexdigest(),
        "num_rankings": len(train),
        "num_heldout_rankings": len(heldout),
        "num_answers": sum(len(r.answers) for r in everything),
        "num_judgements": len(judged),
        "num_annotators": len({j.annotator for j in judged}),
        "agreement": agreed.observed if agreed else None,
        "num_agreement_comparisons": agreed.num_comparisons if agreed else 0,
        "categories": dict(Counter(r.category for r in everything if r.category).most_common()),
        "languages": dict(Counter(r.lang for r in everything if r.lang).most_common()),
        "sources": dict(Counter(r.source for r in everything if r.source).most_common()),
        "rounds": sorted({r.round for r in everything}),
    }


def write_model_card(path: Path) -> None:
    """Write README.md into a reward model's folder from the card that lies there.

    Raises:
        ModelError: no reward card in the folder.
    """
    card = load_reward_card(path)
    if card is None:
        raise ModelError(f"{path} has no reward card, so nothing can be said about the model")
    write_bytes(path / README, model_card(card).encode("utf-8", "backslashreplace"))


def model_card(card: RewardCard) -> str:
    """The text of the model card."""
    sections = [
        _front_matter(card), "# Reward model", _about(card), "## How to use it", _use(card), "## How good it is",
        _accuracy(card), "## Data and raters", _data(card), "## Known biases", _biases(card), "## Limits",
        _limits(card),
    ]  # fmt: skip
    return "\n\n".join(sections) + "\n"


def _front_matter(card: RewardCard) -> str:
    lines = ["---"]
    base = str(card.data.get("base_model", ""))
    if "/" in base:  # a hub id; names of local folders mean nothing to others
        lines.append(f"base_model: {base}")
    lines += ["library_name: transformers", "pipeline_tag: text-classification", "tags: [reward-model, heedful]"]
    languages = [name for name in card.data.get("languages", {}) if name.isalpha()]
    return "\n".join([*lines, *([f"language: [{', '.join(languages)}]"] if languages else []), "---"])


def _about(card: RewardCard) -> str:
    base = card.data.get("base_model")
    return (
        f"Gives one number to a prompt and an answer; higher is better. Trained with heedful on ranked answers"
        f"{f', starting from {base}' if base else ''}. Scores mean something only relative to other answers to the "
        f"same prompt: the difference of two is the log odds that people prefer one to the other."
    )


def _use(card: RewardCard) -> str:
    kind = f"attributes ({', '.join(map(_cell, card.attributes))})" if card.attributes else "an ensemble"
    heads = (
        f"\n\nThe score is made of several heads, {kind}; `heads.json` holds them, `heedful score` shows each."
        if card.attributes or card.disagreement is not None
        else ""
    )
    return (
        f"{USE}\n\nThe score is read at the token that ends the answer, so a text must end there, as the folder's "
        f"own chat template ends it; a newline that another prints behind it is to be cut off. Over held-out answers "
        f"the scores have mean {card.score_mean:.4g} and deviation {card.score_std:.4g} (`reward_norm.json`). The same "
        f"numbers come from `heedful score`, and over HTTP in OpenRLHF's protocol from `heedful serve-reward`.{heads}"
    )


def _accuracy(card: RewardCard) -> str:
    rows = [("all", card.accuracy, card.accuracy_low, card.accuracy_high, card.num_prompts, card.num_pairs)]
    rows += [(name, a.value, a.low, a.high, a.num_prompts, a.num_pairs) for name, a in parts(card)]
    table = ["| held-out pairs | ordered as people did, % [95 % interval] | prompts | pairs |", "|---|---|---|---|"]
    table += [f"| {_cell(name)} | {percent(v, low, high)} | {p:,} | {n:,} |" for name, v, low, high, p, n in rows]
    return "\n".join(table)


def _data(card: RewardCard) -> str:
    data = card.data
    if "num_rankings" not in data:
        return "Not recorded."
    lines = [
        f"- Trained on {data['num_rankings']:,} rankings of `{data.get('rankings', '')}` (SHA-256 of the records "
        f"`{str(data.get('rankings_sha256', ''))[:16]}…`), measured on {data.get('num_heldout_rankings', 0):,} others.",
        f"- {data.get('num_judgements', 0):,} judgements by {data.get('num_annotators', 0):,} raters (a file "
        f"that names none counts as one).",
    ]
    if data.get("agreement") is None:
        lines.append("- Agreement of the raters: unknown, no two of them judged the same answers.")
    else:
        count = data.get("num_agreement_comparisons", 0)
        lines.append(f"- Two raters agree on a pair of answers in {data['agreement']:.1%} of {count:,} comparisons.")
    for name in ("categories", "languages", "sources"):
        if data.get(name):
            shown = ", ".join(f"{_cell(key)} {count:,}" for key, count in list(data[name].items())[:12])
            lines.append(f"- {name.capitalize()}: {shown}.")
    return "\n".join(lines)


def _biases(card: RewardCard) -> str:
    lines = [f"- {sentence}" for sentence in sentences(card)]
    if card.audit_verdict is None:
        lines.append("- Not audited: nothing is known of style, flattery, repetition and the like (`heedful audit`).")
    else:
        lines.append(f"- Audit: {card.audit_verdict}, {len(card.probes)} probes.")
        lines += [f"- {p.verdict.upper()} {p.name}: {p.says}" for p in card.probes if p.verdict in ("warn", "fail")]
    return "\n".join(lines)


def _limits(card: RewardCard) -> str:
    missed = f"{1 - card.accuracy:.0%}"
    return (
        f"- It orders {missed} of held-out pairs otherwise than people did; a policy trained against it finds where.\n"
        f"- It knows the prompts, languages and raters above; elsewhere its scores are guesses.\n"
        f"- It is no measure of truth or safety by itself, and no filter."
    )


def _name(name: str) -> str:
    """A hub id or package name as it is, of a path the last part: where it lay is nobody's business."""
    return Path(name).name if Path(name).is_absolute() or Path(name).exists() or name.startswith(".") else name


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
