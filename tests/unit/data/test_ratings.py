"""Ratings by attribute: every form that carries them, what is refused, and what a head is taught."""

from __future__ import annotations

from pathlib import Path

import pytest

from heedful.data.export import convert
from heedful.data.files import write_jsonl
from heedful.data.heads import require_attributes, with_attributes
from heedful.data.inspect import inspect
from heedful.data.load import load_rankings
from heedful.data.tokenise import RankingSample
from heedful.errors import DataError
from heedful.records import Ranking

ANSWERS = [{"text": "one", "ratings": {"helpful": 4, "safe": None}}, {"text": "two", "ratings": {"helpful": "2"}}]
MASTER = {"group_id": "g", "prompt": "Q", "answers": [{"id": "x", "text": "one"}, {"id": "y", "text": "two"}],
          "consensus": {"x": 1, "y": 2}}  # fmt: skip
PKU = {"prompt": "Q", "response_0": "one", "response_1": "two", "better_response_id": 0, "safer_response_id": 1}
STEER = {"prompt": "Q", "correctness": 3, "coherence": None, "complexity": 1, "verbosity": 2}
FINE = {"fine-grained_score": 4.0}
CASES = {
    "in the answer": ([{"prompt": "Q", "answers": ANSWERS}], {"helpful": {"a1": 4.0, "a2": 2.0}}),
    "beside the answers": (
        [{"prompt": "Q", "answers": ["one", "two"], "ratings": {"safe": [0, None], "kind": [1, 2], "none": None}}],
        {"safe": {"a1": 0.0}, "kind": {"a1": 1.0, "a2": 2.0}},
    ),
    "master": (
        [{**MASTER, "ratings": {"helpful": {"x": 4, "y": None}, "safe": {"x": 0.5, "y": 1}, "old": None}}],
        {"helpful": {"x": 4.0}, "safe": {"x": 0.5, "y": 1.0}},
    ),
    "pku": ([PKU], {"helpful": {"a1": 1.0, "a2": 0.0}, "safe": {"a1": 0.0, "a2": 1.0}}),
    "helpsteer": (
        [{**STEER, "response": "one", "helpfulness": 4}, {**STEER, "response": "two", "helpfulness": 1}],
        {"helpfulness": {"a1": 4.0, "a2": 1.0}, "correctness": {"a1": 3.0, "a2": 3.0},
         "complexity": {"a1": 1.0, "a2": 1.0}, "verbosity": {"a1": 2.0, "a2": 2.0}},
    ),
    "ultrafeedback": (
        [{"instruction": "Q", "completions": [
            {"response": "one", **FINE, "annotations": {"honesty": {"Rating": "4"}, "truthfulness": {"Rating": "N/A"}}},
            {"response": "two", "fine-grained_score": 2, "annotations": {"honesty": {"Rating": "5"}}}]}],
        {"honesty": {"a1": 4.0, "a2": 5.0}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ratings_are_read_and_come_back_from_the_master_file(tmp_path: Path, name: str) -> None:
    rows, expected = CASES[name]
    write_jsonl(tmp_path / "a.jsonl", rows)
    (record,) = load_rankings(tmp_path / "a.jsonl")
    assert record.ratings == expected
    assert Ranking.from_json(record.to_json()) == record
    for out in ("b.jsonl", "b.parquet"):  # Parquet fills every object with the fields of all others
        convert(tmp_path / "a.jsonl", tmp_path / out, "master")
        assert load_rankings(tmp_path / out) == [record]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Q", "answers": [{"text": "one", "ratings": 4}, "two"]}, r"'answers\[0\].ratings' must be"),
        ({"prompt": "Q", "answers": [{"text": "one", "ratings": {"safe": "high"}}, "two"]}, "ratings.safe' must be a"),
        ({"prompt": "Q", "answers": ["one", "two"], "ratings": {"safe": [1]}}, "'ratings.safe' must hold one number"),
        ({**MASTER, "ratings": {"safe": {"z": 1}}}, "'ratings' rates 'z', which is no answer's id"),
        ({**MASTER, "ratings": [1, 2]}, "'ratings' must be an object"),
        ({**PKU, "safer_response_id": 3}, "'safer_response_id' must be one of 0, 1"),
    ],
)
def test_ratings_that_cannot_be_meant_are_refused(tmp_path: Path, row: dict, message: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError, match=f"line 1: .*{message}"):
        load_rankings(tmp_path / "a.jsonl")


def test_inspect_counts_the_ratings(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [PKU, {**PKU, "prompt": "R"}, {**PKU, "prompt": "S", "safer_response_id": None}])
    found = inspect(tmp_path / "a.jsonl").preferences
    assert found is not None
    safe = found.attributes["safe"]
    assert (safe.num_rankings, safe.num_answers, safe.num_pairs, safe.lowest, safe.highest) == (2, 4, 2, 0.0, 1.0)
    assert found.attributes["helpful"].num_rankings == 3


def sample(ratings: dict, ranks: list[int] | None = None) -> RankingSample:
    ids = ["a", "b", "c", "d"]
    return RankingSample("g", "", [[1, 2]] * 4, ranks or [1, 2, 2, 3], ids, 1, [1] * 4, ratings=ratings)


def test_ranks_of_an_attribute_are_those_of_its_ratings() -> None:
    (found,) = with_attributes([sample({"safe": {"a": 1, "c": 5, "d": 1, "gone": 9}})], ["overall", "safe", "kind"])
    assert [head.ranks for head in found.heads] == [[1, 2, 2, 3], [2, 0, 1, 2], [0, 0, 0, 0]]
    assert {head.weight for head in found.heads} == {1.0}


def test_an_attribute_that_nothing_rates_is_named_with_those_there_are() -> None:
    rated = [sample({"safe": {"a": 1, "b": 2}, "kind": {"a": 3, "b": 3}}), sample({"safe": {"a": 1}}, [1, 1, 1, 1])]
    require_attributes(rated, ["overall", "safe"])
    with pytest.raises(DataError, match=r"of 'kind'; rated .* are safe \(2\), kind \(1\), and overall"):
        require_attributes(rated, ["safe", "kind"])
    with pytest.raises(DataError, match="different ratings of 'tone'; rated in the rankings are none"):
        require_attributes([sample({})], ["tone"])
    with pytest.raises(DataError, match="'overall'"):
        require_attributes([rated[1]], ["overall"])
