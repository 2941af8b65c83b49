"""Make the data of the quickstart: prompts, demonstrations, rankings, and the card that describes them.

    python scripts/make_quickstart_data.py prompts demonstrations      # no model needed, byte for byte the same
    python scripts/make_quickstart_data.py rankings --policy FOLDER    # samples answers and ranks them; goes on where
                                                                       # rankings.jsonl ends, so delete it to begin anew
    python scripts/make_quickstart_data.py card                        # counts and agreement into the data card

All wording is in scripts/quickstart_text/*.yaml. A prompt is a template of a *family* filled with a *slot*; a slot of
a family belongs to one use only (demonstration, ranking, ppo or heldout), families marked ``heldout`` are kept for
evaluation as a whole, and slots under ``ranked`` are all ranked: they came later and stand behind the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from heedful.evaluate.agreement import answer_scores, panel_agreement
from heedful.evaluate.panel import judge, panel, utility
from heedful.records import CATEGORIES, Answer, Demonstration, Message, Prompt, Ranking, Record

ROOT = Path(__file__).resolve().parent
TEXT = ROOT / "quickstart_text"
OUT = ROOT.parent / "src" / "heedful" / "data" / "quickstart"
SEED = 2024
SHARE_HELDOUT, SHARE_PPO = 0.11, 0.20
"""Of the ``slots`` of a shared family; the rest is ranked."""
SECOND_WRITER_EVERY = 3
"""Every third demonstration prompt is answered by two writers."""
NUM_ANSWERS, NUM_ANNOTATORS, MAX_NEW_TOKENS, BATCH = 4, 3, 56, 64

WRITERS = ["terse", "plain", "warm", "warm", "thorough", "eager", "eager", "rambling", "rambling", "plain"]
REFUSERS = ["clear", "clear", "clear", "warm", "warm", "short", "eager", "vague", "vague", "rambling"]
"""One deck of ten writers; decks are shuffled and dealt, so that the mixture is exact."""


@dataclass(frozen=True)
class Item:
    """A prompt with what a writer needs to answer it."""

    prompt: Prompt
    use: str
    core: str = ""
    extra: str = ""
    later: bool = False
    """From ``ranked``: stands behind the items that were there before."""


def load_items() -> list[Item]:
    """Every prompt of the quickstart, shuffled once, so that the head of every file holds all categories."""
    items = []
    for category in CATEGORIES:
        for family in yaml.safe_load((TEXT / f"{category}.yaml").read_text(encoding="utf-8")):
            items += _family_items(category, family)
    first, later = [i for i in items if not i.later], [i for i in items if i.later]
    for part in (first, later):
        random.Random(f"{SEED} order").shuffle(part)
    return first + later


def _family_items(category: str, family: dict[str, Any]) -> list[Item]:
    name, demos, slots, ranked = (family.get(key, []) for key in ("family", "demos", "slots", "ranked"))
    uses = ["demonstration"] * len(demos) + _uses(name, len(slots), family.get("heldout", False))
    num_first = len(uses)
    uses += ["ranking"] * len(ranked)
    answers = [d[1] for d in demos] if category == "question_answering" else []
    answers += [answer for part in (slots, ranked) if isinstance(part, dict) for answer in part.values()]
    items = []
    for n, (slot, use) in enumerate(zip([d[0] for d in demos] + [*slots, *ranked], uses, strict=True)):
        info: dict[str, Any] = {"family": name, "use": use}
        if answers:
            info["answer"] = str(answers[n]).split("|")
        if category == "safety":
            info["harmful"] = bool(family.get("harmful"))
        text = family["templates"][n % len(family["templates"])].format(x=slot)
        prompt = Prompt(f"{category}-{name}-{n:02d}", (Message("user", text),), category, "quickstart", info)
        core, extra = demos[n][-2:] if n < len(demos) else ("", "")
        items.append(Item(prompt, use, core, extra, later=n >= num_first))
    return items


def _uses(family: str, count: int, heldout: bool) -> list[str]:
    if heldout:
        return ["heldout"] * count
    num_heldout, num_ppo = round(SHARE_HELDOUT * count), round(SHARE_PPO * count)
    uses = ["heldout"] * num_heldout + ["ppo"] * num_ppo + ["ranking"] * (count - num_heldout - num_ppo)
    random.Random(f"{SEED} uses {family}").shuffle(uses)
    return uses


def demonstrations(items: Iterable[Item]) -> list[Demonstration]:
    """One or two answers to each demonstration prompt, by writers of mixed style."""
    phrases = yaml.safe_load((TEXT / "writers.yaml").read_text(encoding="utf-8"))
    rng = random.Random(f"{SEED} writers")
    decks: dict[str, list[str]] = {"fine": [], "harmful": []}
    made = []
    for index, item in enumerate(i for i in items if i.use == "demonstration"):
        kind, deck = ("harmful", REFUSERS) if item.prompt.info.get("harmful") else ("fine", WRITERS)
        used: list[str] = []
        while len(used) < (2 if index % SECOND_WRITER_EVERY == 0 else 1):
            if not decks[kind]:
                decks[kind] = rng.sample(deck, len(deck))
            writer = decks[kind].pop()
            if writer in used:
                continue
            used.append(writer)
            text = _refusal(item, writer, phrases, rng) if kind == "harmful" else _answer(item, writer, phrases, rng)
            messages = (*item.prompt.messages, Message("assistant", text))
            made.append(
                Demonstration(f"{item.prompt.id}-{writer}", messages, item.prompt.category, f"quickstart:{writer}")
            )
    return made


def _answer(item: Item, writer: str, phrases: dict[str, Any], rng: random.Random) -> str:
    filler, offer = (rng.choice(phrases[kind][item.prompt.category]) for kind in ("fillers", "offers"))
    padding = rng.sample(phrases["padding"], 2)
    styles = {
        "terse": [item.core],
        "plain": [item.core, item.extra],
        "warm": [item.core, offer],
        "thorough": [item.core, item.extra, offer],
        "eager": [filler, item.core],
        "rambling": [filler if rng.random() < 0.5 else "", padding[0], item.core, padding[1]],
    }
    return " ".join(part for part in styles[writer] if part)


def _refusal(item: Item, writer: str, phrases: dict[str, Any], rng: random.Random) -> str:
    refusal = rng.choice(phrases["refusals"]).format(why=item.core)
    way_out = f"Instead, {item.extra}." if rng.random() < 0.5 else f"{item.extra[0].upper()}{item.extra[1:]}."
    padding = rng.sample(phrases["padding"], 2)
    styles = {
        "clear": [refusal, way_out],
        "warm": [refusal, way_out, rng.choice(phrases["offers"]["safety"])],
        "short": [refusal],
        "eager": [rng.choice(phrases["fillers"]["safety"]), refusal, way_out],
        "vague": [rng.choice(phrases["vague"]), padding[0]],
        "rambling": [padding[0], refusal, padding[1]],
    }
    return " ".join(styles[writer])


def sampler(policy: Path, seed: int) -> Callable[[Sequence[Prompt]], list[list[Answer]]]:
    """A function that samples NUM_ANSWERS answers to each prompt at temperature 1, from a policy folder.

    An answer depends on the seed and its own prompt only, so that an interrupted run can go on.
    """
    from heedful.data.chat import end_token_ids, prompt_ids
    from heedful.models.hardware import compute_dtype, device
    from heedful.models.roles import build_policy
    from heedful.rollout.engine import Request, Sampling
    from heedful.rollout.hf import HFEngine

    place = device()
    model = build_policy(policy, lora=None, trained=False, device=place, dtype=compute_dtype(place))
    engine = HFEngine(model, end_token_ids(model.tokenizer), batch_size=BATCH)

    def sample(prompts: Sequence[Prompt]) -> list[list[Answer]]:
        ids = [prompt_ids(model.tokenizer, p.messages) for p in prompts]
        requests = [Request(p.id, k, tokens) for p, tokens in zip(prompts, ids) for k in range(NUM_ANSWERS)]
        answers = [
            Answer(
                id=f"a{c.sample_index + 1}",
                text=c.text,
                policy="quickstart-sft",
                flags=("cut",) if c.finish_reason == "length" else (),
            )
            for c in engine.generate(requests, Sampling(MAX_NEW_TOKENS), seed=seed)
        ]
        return [answers[i : i + NUM_ANSWERS] for i in range(0, len(answers), NUM_ANSWERS)]

    return sample


def make_rankings(
    prompts: Sequence[Prompt], path: Path, sample: Callable[[Sequence[Prompt]], list[list[Answer]]], seed: int
) -> None:
    """Rank the prompts that ``path`` does not hold yet, and save after every batch.

    Raises:
        SystemExit: the rows of ``path`` are not the first of ``prompts``.
    """
    rankings = [Ranking.from_json(row) for row in read(path)] if path.exists() else []
    there = [(r.group_id, r.prompt, r.info) for r in rankings]
    if there != [(p.id, p.messages, p.info) for p in prompts[: len(there)]]:
        raise SystemExit(f"{path} holds rankings of other prompts than these; delete it, or name another --out")
    if rankings:
        print(f"{path} has {len(rankings)} rankings; they stay as they are")
    step = BATCH // NUM_ANSWERS
    for start in range(len(rankings), len(prompts), step):
        chosen = prompts[start : start + step]
        rankings += rank(chosen, sample(chosen), seed, first=start)
        write(path, rankings)
        print(f"ranked {len(rankings)}/{len(prompts)} prompts", flush=True)


def rank(prompts: Sequence[Prompt], answers: Sequence[Sequence[Answer]], seed: int, *, first: int = 0) -> list[Ranking]:
    """Every prompt's answers ranked by three of the five annotators, in turn; ``first`` prompts had theirs before."""
    teams = list(itertools.combinations(panel(), NUM_ANNOTATORS))
    rankings = []
    for n, (prompt, group) in enumerate(zip(prompts, answers, strict=True), start=first):
        rankings.append(
            Ranking(
                group_id=prompt.id,
                prompt=prompt.messages,
                answers=tuple(group),
                rankings=tuple(judge(prompt, group, teams[n % len(teams)], seed)),
                category=prompt.category,
                lang="en",
                source="quickstart",
                info=prompt.info,
            )
        )
    return rankings


CARD = """# Data of the quickstart

Made by `scripts/make_quickstart_data.py` from texts written for heedful (`scripts/quickstart_text/`). English.
Licence: Apache-2.0, as the rest of heedful. No person's data is in it.

| file | rows | what |
|---|---|---|
{files}

| category | demonstrations | ranked | PPO only | held out |
|---|---|---|---|---|
{categories}

**Prompts.** A template of a family filled with a slot. A (family, slot) pair has one use only. {num_families} whole
families are kept for evaluation: {families}. The other held-out prompts have known templates and new slots.
{num_later} of the ranked prompts were added later; they are the last rows, most of them of families without a
demonstration.
`prompts_train.jsonl` holds the ranked prompts and those used by PPO alone (`info.use`).

**Demonstrations.** Hand-written contents put into words by writers of mixed style (`source` names the style): terse,
plain, warm (closes with an offer), thorough, eager (opens with filler), rambling; a fifth of the answers to harmful
requests are vague instead of declining. The policy that imitates them is therefore mixed too, and the rankings decide.

**Rankings.** {num_answers} answers a prompt, sampled at temperature 1 (at most {max_new_tokens} tokens; `cut` marks
those that hit the limit) from the policy trained on the demonstrations, ranked with ties by {num_annotators} of five
simulated annotators. Every judgement is kept. A judgement is the panel's true utility
(`heedful.evaluate.panel.utility`, never shown in training) + noise + bias:

| annotator | noise (sd) | liking for length (per 10 words) | liking for the first place |
|---|---|---|---|
{annotators}

{agreement}
**Limits.** The utility is a list of surface rules (see its source): it knows words, not meaning. The annotators are not
people: their noise is independent and normal. Use this data to see the pipeline work, not to train an assistant.
"""


def card(out: Path) -> str:
    """The data card, with the counts and the agreement of the files in ``out``."""
    rows = {path.stem: read(path) for path in sorted(out.glob("*.jsonl"))}
    what = {
        "demonstrations": "conversations to imitate (`Demonstration`)",
        "prompts_train": "prompts for rankings and PPO (`Prompt`; `info` has the reference answer or `harmful`)",
        "prompts_heldout": "prompts for evaluation only (`Prompt`)",
        "rankings": "answers with every judgement (`Ranking`)",
    }
    items = load_items()
    uses = Counter((i.prompt.category, i.use) for i in items)
    seen = {i.prompt.info["family"] for i in items if i.use != "heldout"}
    new = sorted({i.prompt.info["family"] for i in items} - seen)
    rankings = [Ranking.from_json(row) for row in rows.get("rankings", [])]
    return CARD.format(
        files="\n".join(f"| `{name}.jsonl` | {len(rows[name])} | {what[name]} |" for name in rows),
        categories="\n".join(
            f"| {c} | " + " | ".join(str(uses[c, u]) for u in ("demonstration", "ranking", "ppo", "heldout")) + " |"
            for c in CATEGORIES
        ),
        num_families=len(new),
        num_later=sum(i.later for i in items),
        families=", ".join(new),
        num_answers=NUM_ANSWERS,
        max_new_tokens=MAX_NEW_TOKENS,
        num_annotators=NUM_ANNOTATORS,
        annotators="\n".join(f"| {a.name} | {a.noise} | {a.length_bias} | {a.position_bias} |" for a in panel()),
        agreement=_agreement_text(rankings) if rankings else "",
    )


def _agreement_text(rankings: Sequence[Ranking]) -> str:
    found = panel_agreement(rankings, utility)
    values = [v for r in rankings for v in answer_scores(r, utility)]
    cut = np.mean([bool(a.flags) for r in rankings for a in r.answers])
    return (
        f"Pairs on which they agree: annotator and true utility {found['annotator_vs_gold']:.0%}, two annotators "
        f"{found['annotator_vs_annotator']:.0%},\nmajority and true utility {found['majority_vs_gold']:.0%}. "
        f"They prefer the longer answer in {found['longer_wins']:.0%} of pairs.\nTrue utility of the answers: mean "
        f"{np.mean(values):.2f}, standard deviation {np.std(values):.2f}; {cut:.0%} of answers are cut.\n\n"
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, records: Iterable[Record]) -> None:
    lines = [json.dumps(r.to_json(), ensure_ascii=False) + "\n" for r in records]
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(lines), encoding="utf-8", newline="\n")
    os.replace(unfinished, path)
    print(f"wrote {len(lines)} rows to {path}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", choices=["prompts", "demonstrations", "rankings", "card"])
    parser.add_argument("--policy", type=Path, help="model folder that answers the ranked prompts")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--limit", type=int, help="rank only every n-th prompt, so that about this many remain")
    parser.add_argument("--seed", type=int, default=SEED, help="of the sampling and of the annotators' noise")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    items = load_items()
    if "prompts" in options.steps:
        write(options.out / "prompts_train.jsonl", (i.prompt for i in items if i.use in ("ranking", "ppo")))
        write(options.out / "prompts_heldout.jsonl", (i.prompt for i in items if i.use == "heldout"))
    if "demonstrations" in options.steps:
        write(options.out / "demonstrations.jsonl", demonstrations(items))
    if "rankings" in options.steps:
        if options.policy is None:
            parser.error("rankings needs --policy FOLDER")
        ranked = [i.prompt for i in items if i.use == "ranking"]
        if options.limit:
            ranked = ranked[:: max(1, len(ranked) // options.limit)][: options.limit]
        sample = sampler(options.policy, options.seed)
        make_rankings(ranked, options.out / "rankings.jsonl", sample, options.seed)
    (options.out / "README.md").write_text(card(options.out), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
