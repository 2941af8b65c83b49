"""README.md of a reward folder: what was measured and nothing else, whatever is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from heedful.config.recipe import Recipe
from heedful.errors import ModelError
from heedful.evaluate.reward_card import ScoredRanking, build_card
from heedful.pipeline.model_card import data_facts, model_card, write_model_card
from heedful.records import Answer, Judgement, Message, ProbeResult, Ranking
from heedful.runs.files import write_json


def ranking(i, *annotators):
    answers = tuple(Answer(f"a{k}", "secret " * (k + 1)) for k in range(3))
    ranks = {"a0": 1, "a1": 2, "a2": 3}
    given = tuple(Judgement(name, ranks if name != "contrary" else {"a0": 3, "a1": 2, "a2": 1}) for name in annotators)
    return Ranking(f"r{i}", (Message("user", f"secret {i}"),), answers, given, category="cat|egory", lang="en")


def card(**changes):
    scored = [ScoredRanking([2.0, 1.0, i % 2], [1, 2, 3], [9, 5, 7], category="chat") for i in range(8)]
    return replace(build_card(scored), **changes)


def test_facts_count_raters_and_hold_no_text(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("")
    recipe = Recipe(name="x", model={"name": str(tmp_path)}, data={"rankings": str(file)}, reward={})
    train = [ranking(i, "ann", "bob") for i in range(4)] + [ranking(4, "ann", "contrary")]
    facts = data_facts(recipe, train, [ranking(9, "ann")])
    assert facts["num_judgements"] == 11 and facts["num_annotators"] == 3 and facts["num_heldout_rankings"] == 1
    assert facts["agreement"] == 12 / 15 and facts["num_agreement_comparisons"] == 15
    assert facts["rankings"] == "mine.jsonl" and str(tmp_path.parent) not in str(facts) and "secret" not in str(facts)
    assert data_facts(recipe, train[:4], [])["rankings_sha256"] != facts["rankings_sha256"]
    assert data_facts(recipe, [ranking(0)], [])["agreement"] is None
    text = model_card(card(data=facts))
    assert "11 judgements by 3 raters" in text and "80.0% of 15 comparisons" in text and "cat\\|egory 6" in text


def test_front_matter_is_what_the_hub_reads():
    facts = {"base_model": "owner/model", "num_rankings": 1, "languages": {"en": 3, "zh": 1}}
    head = yaml.safe_load(model_card(card(data=facts)).split("---")[1])
    assert head == {"base_model": "owner/model", "library_name": "transformers", "pipeline_tag": "text-classification",
                    "tags": ["reward-model", "heedful"], "language": ["en", "zh"]}  # fmt: skip
    assert "base_model" not in yaml.safe_load(model_card(card()).split("---")[1])


def test_accuracy_bias_and_limits_are_the_cards():
    found = card()
    text = model_card(found)
    value, low, high = (f"{100 * x:.1f}" for x in (found.accuracy, found.accuracy_low, found.accuracy_high))
    assert f"| all | {value} [{low}, {high}] | 8 | 24 |" in text and "| category chat |" in text
    assert f"{1 - found.accuracy:.0%} of held-out pairs" in text
    assert "Not recorded" in text and "Not audited" in text and "Length: the scores prefer" in text
    probe = ProbeResult("length", "padding", "fail", "likes length", sign="+")
    passed = replace(probe, name="thanks", verdict="ok")
    audited = model_card(replace(found, probes=(probe, passed), audit_verdict="failed"))
    assert "Audit: failed, 2 probes" in audited and "FAIL length: likes length" in audited and "thanks" not in audited


def test_it_is_written_from_the_card_in_the_folder(tmp_path):
    with pytest.raises(ModelError, match="no reward card"):
        write_model_card(tmp_path)
    write_json(tmp_path / "reward_card.json", card().to_json())
    write_model_card(tmp_path)
    assert (tmp_path / "README.md").read_text() == model_card(card())


def test_heads_are_told_where_there_are_some():
    plain = card()
    rated = replace(plain, attributes={"kind": plain.by_category["chat"], "long": plain.by_category["chat"]})
    assert "heads" not in model_card(plain)
    assert "several heads, attributes (kind, long); `heads.json` holds them" in model_card(rated)
    assert "several heads, an ensemble; `heads.json`" in model_card(replace(plain, disagreement=0.2))
