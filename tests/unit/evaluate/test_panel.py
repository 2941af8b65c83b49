"""The panel's utility, its annotators and the data made with them."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import heedful
from heedful.errors import DataError
from heedful.evaluate.agreement import answer_scores, panel_agreement
from heedful.evaluate.panel import WEIGHTS, Annotator, judge, panel, utility, utility_parts
from heedful.records import CATEGORIES, Answer, Demonstration, Message, Prompt, Ranking

SHIPPED = Path(heedful.__file__).parent / "data" / "quickstart"
SCRIPT = Path(__file__).parents[3] / "scripts" / "make_quickstart_data.py"


def prompt(text: str, category: str = "chat", **info: object) -> Prompt:
    return Prompt("p", (Message("user", text),), category, info=info)


CHESS = prompt("I want to learn chess. Where should I start?")
GOOD = "Start with how each chess piece moves, then play short games with a friend. Would you like more ideas?"
FRANCE = prompt("What is the capital of France?", "question_answering", answer=["Paris"])
SPY = prompt("How can I read my partner's messages in secret?", "safety", harmful=True)
SAD = prompt("I feel hopeless lately.", "safety", harmful=False)


def test_utility_is_the_sum_of_its_named_parts() -> None:
    parts = utility_parts(CHESS, GOOD)
    assert list(parts) == list(WEIGHTS)
    assert utility(CHESS, GOOD) == pytest.approx(sum(parts.values()))
    assert all(abs(parts[name]) <= WEIGHTS[name] for name in parts)


@pytest.mark.parametrize(
    "worse",
    [
        "",
        "Chess.",
        "I want to learn chess. Where should I start?",
        "chess start learn pieces moves games rules openings endgames puzzles chess board king queen rook",
        "Play chess. " * 12,
        "What is chess to you? Do you like chess? Why chess? Where do you play chess? Would you like to start?",
        "Sorry, can I help with anything else?",
        "I'm sorry, but I can't help with that. Would you like more ideas about chess?",
        "Great question! " + GOOD,
        GOOD.split(" Would")[0],
        GOOD.rstrip("?"),
        GOOD + " There are of course many ways to look at this, and every person is different from the next one." * 2,
        "Start slowly and keep going every day, because small steps are what count. Would you like more ideas?",
    ],
    ids=[
        "empty", "scrap", "copy", "keywords", "repeated", "questions", "canned", "refusal", "filler", "no-offer",
        "no-end", "lecture", "off-topic",
    ],
)  # fmt: skip
def test_a_good_chat_answer_beats(worse: str) -> None:
    assert utility(CHESS, GOOD) > utility(CHESS, worse) + 0.3


def test_a_cut_answer_loses() -> None:
    assert utility(CHESS, GOOD) > utility(CHESS, GOOD, finished=False) + 0.5


def test_question_answering_wants_the_reference_answer_plainly() -> None:
    right = utility(FRANCE, "The capital of France is Paris.")
    assert right > utility(FRANCE, "The capital of France is Lyon.") + 1.0
    assert right > utility(FRANCE, "The capital of France is Paris. Would you like to know more about it?")
    assert right > utility(FRANCE, "What is the capital of France? Paris Paris Paris Paris.")
    assert utility(FRANCE, "It is Paris.") > utility(FRANCE, "The capital of France is a parish.")
    several = prompt("What is 4 plus 5?", "question_answering", answer=["9", "nine"])
    assert utility(several, "4 plus 5 is nine.") == utility(several, "4 plus 5 is 9.")


def test_safety_wants_a_refusal_with_a_way_out_only_where_it_is_due() -> None:
    refusal = "I can't help with that, because reading messages in secret breaks trust."
    way_out = " You could tell your partner what worries you."
    assert utility(SPY, refusal + way_out) > utility(SPY, refusal) > utility(SPY, way_out) + 0.5
    assert utility(SPY, "I’m sorry, but I can’t help you read messages.") > utility(SPY, "Reading messages is easy.")
    support = "Feeling hopeless is heavy, and you are not alone with it. Please talk to a doctor or a friend you trust."
    assert utility(SAD, support) > utility(SAD, "I can't help with that. You feel hopeless, so talk to a doctor.") + 0.8
    assert utility_parts(CHESS, "I can't help with chess.")["safe"] < 0


def shipped(name: str) -> list[dict]:
    return [json.loads(line) for line in (SHIPPED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_quickstart_data", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_quickstart_data"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def demonstrated(script: ModuleType) -> dict[str, list[tuple[Prompt, str]]]:
    """Prompts and answers of the demonstrations by writer."""
    prompts = {item.prompt.id: item.prompt for item in script.load_items()}
    found: dict[str, list[tuple[Prompt, str]]] = {}
    for row in shipped("demonstrations"):
        demonstration = Demonstration.from_json(row)
        writer = demonstration.source.split(":")[1]
        pair = (prompts[demonstration.id.removesuffix(f"-{writer}")], demonstration.messages[-1].content)
        found.setdefault(writer, []).append(pair)
    return found


@pytest.mark.parametrize(
    "canned",
    [
        "Sorry, can I help with anything else?",
        "I'm sorry, but I can't help with that. You could talk to someone you trust. Would you like more ideas?",
        "That depends on what you need. Start small, keep going and ask for advice. Would you like more help with it?",
        "Would you like more ideas? " * 5,
        "Paris, nine, water, cold and Tuesday are good answers to many questions that people ask every single day.",
    ],
)
def test_no_answer_fits_every_prompt(canned: str, demonstrated: dict[str, list[tuple[Prompt, str]]]) -> None:
    prompts = [Prompt.from_json(row) for row in shipped("prompts_heldout") + shipped("prompts_train")]
    written = np.mean([utility(p, text) for pairs in demonstrated.values() for p, text in pairs])
    assert np.mean([utility(p, canned) for p in prompts]) < written - 0.9


def test_writers_differ_and_the_panel_can_tell(demonstrated: dict[str, list[tuple[Prompt, str]]]) -> None:
    mean = {w: np.mean([utility(p, t) for p, t in pairs]) for w, pairs in demonstrated.items()}
    assert mean["warm"] > mean["terse"] > mean["eager"] > mean["rambling"] > mean["vague"]
    values = [utility(p, t) for pairs in demonstrated.values() for p, t in pairs]
    assert 0.5 < np.std(values) < 1.5
    wrong = [p.id for pairs in demonstrated.values() for p, t in pairs if utility_parts(p, t)["correct"] < 0]
    assert not wrong


def answers(texts: list[str]) -> list[Answer]:
    return [Answer(f"a{n}", text) for n, text in enumerate(texts)]


GROUP = answers([GOOD, GOOD.split(" Would")[0], "Great question! Chess is a game.", "Chess."])


def test_annotators_do_not_depend_on_order_or_company() -> None:
    members = [*panel(), Annotator("top", noise=0.1, position_bias=1.0)]
    straight = {j.annotator: j.ranks for j in judge(CHESS, GROUP, members, 1)}
    for shuffled in itertools.permutations(GROUP):
        assert {j.annotator: j.ranks for j in judge(CHESS, shuffled, members[::-1], 1)} == straight
    assert judge(CHESS, GROUP, members[2:3], 1)[0].ranks == straight["chi"]
    noisy = [Annotator("noisy", noise=2.0)]
    other = dataclasses.replace(CHESS, id="q")
    assert len({str(judge(CHESS, GROUP, noisy, seed)) for seed in range(20)}) > 5
    assert any(judge(CHESS, GROUP, noisy, s) != judge(other, GROUP, noisy, s) for s in range(5))


def test_ranks_follow_the_utility_without_noise_and_tie_when_close() -> None:
    (judgement,) = judge(CHESS, GROUP, [Annotator("exact", noise=0.0)], 0)
    value = {a.id: utility(CHESS, a.text) for a in GROUP}
    assert judgement.ranks["a0"] == 1
    for i, j in itertools.permutations(value, 2):
        if value[i] > value[j] + 0.15:
            assert judgement.ranks[i] < judgement.ranks[j]
    (tied,) = judge(CHESS, answers([GOOD, GOOD, "Chess."]), [Annotator("exact", noise=0.0)], 0)
    assert tied.ranks == {"a0": 1, "a1": 1, "a2": 2}


def test_biases_pull_where_they_say() -> None:
    pair = answers([GOOD, GOOD + " Take all the time that you need, as there is no hurry at all about it."])
    assert judge(CHESS, pair, [Annotator("x", noise=0.0)], 0)[0].ranks["a0"] == 1
    assert judge(CHESS, pair, [Annotator("x", noise=0.0, length_bias=2.0)], 0)[0].ranks == {"a0": 2, "a1": 1}
    same = answers([GOOD, GOOD])
    tops = [judge(CHESS, same, [Annotator("x", noise=0.0, position_bias=1.0)], s)[0].ranks["a0"] for s in range(200)]
    assert 70 < tops.count(1) < 130  # the place shown is random, so neither answer gains on average
    cut = [GROUP[0], dataclasses.replace(GROUP[0], id="a9", flags=("cut",))]
    assert judge(CHESS, cut, [Annotator("x", noise=0.0)], 0)[0].ranks == {"a0": 1, "a9": 2}


def test_judge_refuses_a_group_it_cannot_rank() -> None:
    with pytest.raises(DataError, match="two or more answers"):
        judge(CHESS, GROUP[:1], panel(), 0)
    with pytest.raises(DataError, match="different ids"):
        judge(CHESS, [GROUP[0], GROUP[0]], panel(), 0)


def test_panel_agreement_is_that_of_careful_people(script: ModuleType) -> None:
    """Four answers by different writers stand in for four samples of the policy they train."""
    phrases = script.yaml.safe_load((script.TEXT / "writers.yaml").read_text(encoding="utf-8"))
    items = [i for i in script.load_items() if i.use == "demonstration" and not i.prompt.info.get("harmful")]
    rng = script.random.Random(5)
    groups = [answers([script._answer(i, w, phrases, rng) for w in rng.sample(script.WRITERS, 4)]) for i in items]
    rankings = script.rank([i.prompt for i in items], groups, seed=7)
    assert all(len(r.rankings) == 3 and r.consensus is None for r in rankings)
    found = panel_agreement(rankings, utility)
    assert 0.80 <= found["annotator_vs_gold"] <= 0.90
    assert 0.85 <= found["majority_vs_gold"] <= 0.97
    assert found["majority_vs_gold"] > found["annotator_vs_gold"] > found["annotator_vs_annotator"] > 0.7


def test_regenerating_gives_the_files_on_disk(script: ModuleType, tmp_path: Path) -> None:
    script.main(["prompts", "demonstrations", "--out", str(tmp_path)])
    for name in ("prompts_train", "prompts_heldout", "demonstrations"):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (SHIPPED / f"{name}.jsonl").read_bytes(), name
    assert script.card(SHIPPED) == (SHIPPED / "README.md").read_text(encoding="utf-8")
    assert sum(path.stat().st_size for path in SHIPPED.glob("*.jsonl")) < 2_000_000


def test_DAT_10_no_prompt_is_in_two_splits(script: ModuleType) -> None:
    demos = {row["messages"][0]["content"] for row in shipped("demonstrations")}
    train = [Prompt.from_json(row) for row in shipped("prompts_train")]
    heldout = [Prompt.from_json(row) for row in shipped("prompts_heldout")]
    texts = [{p.messages[0].content for p in side} for side in (train, heldout)]
    assert len(texts[0]) == len(train) and len(texts[1]) == len(heldout)
    assert not (demos & texts[0] or demos & texts[1] or texts[0] & texts[1])
    assert len(train) >= 850 and len(heldout) >= 100
    assert max(len(t.split()) for side in (demos, *texts) for t in side) <= 25
    for side in (train, heldout):
        assert {p.category for p in side} == {p.category for p in side[:40]} == set(CATEGORIES)
    known = {p.info["family"] for p in train}
    new = sum(p.info["family"] not in known for p in heldout)
    assert 0.5 < new / len(heldout) < 0.8
    words = [{frozenset(t.lower().replace("?", "").split()) for t in side} for side in texts]
    assert max(len(a & b) / len(a | b) for a in words[0] for b in words[1]) < 0.85  # one template, another slot


def test_the_ranked_prompts_are_many_of_every_kind(script: ModuleType) -> None:
    items = script.load_items()
    ranked = [i.prompt for i in items if i.use == "ranking"]
    count = Counter(p.category for p in ranked)
    assert set(count) == set(CATEGORIES) and min(count.values()) >= 150
    harmful = sum(p.info["harmful"] for p in ranked if p.category == "safety")
    assert 0.4 < harmful / count["safety"] < 0.6
    assert len({i.prompt.id for i in items}) == len(items)
    questions = [p for p in ranked if p.category == "question_answering"]
    given_away = [p.id for p in questions if utility_parts(p, p.messages[0].content)["correct"] > 0]
    assert all(p.info["answer"] for p in questions) and not given_away


def test_slots_that_came_later_move_nothing(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids, texts, uses and places of the other items are those without any ``ranked`` slot."""
    items = script.load_items()
    load = script.yaml.safe_load
    monkeypatch.setattr(script.yaml, "safe_load", lambda text: [{**f, "ranked": []} for f in load(text)])
    assert script.load_items() == [i for i in items if not i.later] == items[: sum(not i.later for i in items)]
    assert {i.use for i in items if i.later} == {"ranking"}


def test_shipped_rankings_are_what_the_panel_says(script: ModuleType) -> None:
    rankings = [Ranking.from_json(row) for row in shipped("rankings")]
    wanted = [item.prompt for item in script.load_items() if item.use == "ranking"][: len(rankings)]
    assert len(rankings) > 100 and [r.group_id for r in rankings] == [p.id for p in wanted]
    assert script.rank(wanted, [r.answers for r in rankings], script.SEED) == rankings
    assert len({round(v, 3) for r in rankings for v in answer_scores(r, utility)}) > 100


def test_rankings_go_on_where_they_stopped(script: ModuleType, toy_model: Path, tmp_path: Path) -> None:
    """Cut after its first batch, the step ends with the file that it makes in one go, with the answers of the model."""
    ranked = [item.prompt for item in script.load_items() if item.use == "ranking"][:36]
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    sample = script.sampler(toy_model, 3)
    script.make_rankings(ranked, whole, sample, seed=3)
    rankings = [Ranking.from_json(row) for row in script.read(whole)]
    assert [r.group_id for r in rankings] == [p.id for p in ranked]
    assert all([a.id for a in r.answers] == ["a1", "a2", "a3", "a4"] for r in rankings)
    texts = [a.text for r in rankings for a in r.answers]
    assert len(set(texts)) > len(texts) / 2

    def dies(prompts: list[Prompt]) -> list[list[Answer]]:
        if cut.exists():
            raise KeyboardInterrupt
        return sample(prompts)

    with pytest.raises(KeyboardInterrupt):
        script.make_rankings(ranked, cut, dies, seed=3)
    assert 0 < len(script.read(cut)) < len(ranked)
    script.make_rankings(ranked, cut, sample, seed=3)
    assert cut.read_bytes() == whole.read_bytes()
    with pytest.raises(SystemExit, match="other prompts"):
        script.make_rankings(ranked[1:], cut, sample, seed=3)
