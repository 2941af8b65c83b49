"""Every row is accounted for: kept, or dropped under a name; and splits never share a prompt."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from heedful.data.duplicates import group
from heedful.data.files import write_jsonl
from heedful.data.load import load, load_demonstrations, load_prompts, load_rankings
from heedful.data.prompts import prompt_text
from heedful.data.splits import split
from heedful.errors import DataError
from heedful.records import Demonstration, Message, PreferencePair, Prompt, Ranking


def pair(i: int, prompt: str | None = None) -> dict[str, Any]:
    return {"prompt": prompt or f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    write_jsonl(path, rows)
    return path


def test_DAT_03_bad_rows_stop_or_are_counted(tmp_path: Path) -> None:
    rows = [pair(1), pair(2) | {"rejected": None}, pair(3) | {"rejected": ""}, pair(4), pair(5) | {"chosen": 7}]
    del rows[3]["rejected"]
    path = write(tmp_path / "a.jsonl", *rows)
    with pytest.raises(DataError, match=r"a\.jsonl line 2: field 'rejected' is null; correct the row, or drop"):
        load(path)
    loaded = load(path, on_bad_row="skip")
    assert (loaded.num_read, loaded.num_kept, loaded.num_dropped) == (5, 1, 4)
    assert loaded.dropped == {"empty_answer": 1, "missing_field": 1, "null_field": 1, "wrong_type": 1}
    assert loaded.examples["missing_field"].endswith("line 4: field 'rejected' is missing")
    assert loaded.examples["wrong_type"].endswith("line 5: field 'chosen' must be text, not int 7")
    for line, row in enumerate(rows[2:], 3):
        with pytest.raises(DataError, match=f"line 2: field '{'chosen' if line == 5 else 'rejected'}'"):
            load(write(tmp_path / "b.jsonl", rows[0], row))


def test_DAT_07_identical_answers_are_dropped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pair(1), pair(2) | {"chosen": "x", "rejected": "x"})
    loaded = load(path)
    assert (loaded.num_read, loaded.num_kept, loaded.dropped) == (2, 1, {"identical_answers": 1})
    talk = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    path = write(tmp_path / "a.jsonl", {"chosen": talk, "rejected": talk})
    with pytest.raises(DataError, match=r"1 rows read, 0 kept, all dropped \(identical_answers 1\)"):
        load(path)


def test_CLI_04_nothing_left_says_read_kept_and_reasons(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        load(path)
    path.write_text("\n \n\r\n")
    with pytest.raises(DataError, match="0 rows read, 0 kept: the file holds nothing but blank lines"):
        load(path)
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(DataError, match="0 rows read, 0 kept"):
        load(tmp_path / "a.json")
    write(path, *(pair(i) | {"chosen": " "} for i in range(3)))
    with pytest.raises(DataError, match=r"3 rows read, 0 kept, all dropped \(empty_answer 3\); the first: .* line 1"):
        load(path, on_bad_row="skip")
    path.write_text("7\n8\n")
    with pytest.raises(DataError, match=r"2 rows read, 0 kept, all dropped \(not_an_object 2\)"):
        load(path, on_bad_row="skip")


def test_ids_own_twice_refused_and_equal_content_numbered(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pair(1) | {"id": "x"}, pair(2) | {"id": "y"}, pair(3) | {"id": "x"})
    with pytest.raises(DataError, match="line 3: the id 'x' was used in line 1 already"):
        load(path)
    assert load(path, on_bad_row="skip").dropped == {"duplicate_id": 1}
    first, second = load_rankings(write(tmp_path / "b.jsonl", pair(1), pair(1)))
    assert second.group_id == f"{first.group_id}-2"
    other = load_rankings(write(tmp_path / "c.jsonl", pair(9), pair(1)))
    assert other[1].group_id == first.group_id  # an id does not depend on the file or the place in it


def test_broken_lines_are_counted_with_the_bad_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pair(1))
    path.write_bytes(path.read_bytes() + b'{"prompt": \n[]\n\xff\xfe\n')
    loaded = load(path, on_bad_row="skip")
    assert (loaded.num_read, loaded.num_kept) == (4, 1)
    assert loaded.dropped == {"invalid_json": 1, "not_an_object": 1, "not_utf8": 1}
    assert loaded.summary().startswith("4 rows read as trl, 1 kept, 3 dropped (invalid_json 1, ")


def test_the_wrong_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"instruction": "Q", "output": "A"})
    with pytest.raises(DataError, match=r"holds demonstrations \(format alpaca\), but rankings are needed"):
        load_rankings(path)
    path = write(tmp_path / "b.jsonl", {"prompt": "Q"})
    with pytest.raises(DataError, match="holds prompts"):
        load_demonstrations(path)
    with pytest.raises(DataError, match="on_bad_row"):
        load(path, on_bad_row="ignore")
    with pytest.raises(DataError, match="kind"):
        load(path, kind="pairs")


@pytest.mark.parametrize(("column", "value"), [("label", "42"), ("label", 42), ("topic", "sums")])
def test_extra_columns_of_prompts_reach_the_rewards(tmp_path: Path, column: str, value: object) -> None:
    """A reward server is sent the column ``label`` (page 6)."""
    (prompt,) = load_prompts(write(tmp_path / "a.jsonl", {"prompt": "6 · 7?", column: value}))
    assert prompt.info == {column: value}


@pytest.mark.parametrize("row", [{"label": True}, {"answer": "42", "label": 1}, {"completion": "42", "label": "good"}])
def test_a_label_that_judges_an_answer_makes_no_prompt(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="no known format fits"):
        load_prompts(write(tmp_path / "a.jsonl", {"prompt": "6 · 7?"} | row))


def test_prompts_of_rankings_come_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pair(1, "Q"), pair(2, "Q"), pair(3, "R"))
    loaded = load(path, kind="prompts")
    assert [prompt_text(r) for r in loaded.records] == ["Q", "R"] and loaded.kind == "prompts"
    assert loaded.dropped == {"duplicate_prompt": 1}
    assert [p.messages[0].content for p in load_prompts(path)] == ["Q", "R"]


def test_no_torch_and_no_pandas_for_the_text_side(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pair(1), pair(2))
    code = (
        "import sys; from heedful.data.inspect import inspect; from heedful.data import export, splits; "
        f"inspect({str(path)!r}); assert not {{'torch', 'transformers', 'datasets'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Splits: DAT-10.

WORDS = [f"word{i}" for i in range(500)]


def pairs_of(num_prompts: int, each: int) -> list[PreferencePair]:
    rng = random.Random(1)
    texts = [" ".join(rng.sample(WORDS, 12)) for _ in range(num_prompts)]
    prompts = [(p, (Message("user", text),)) for p, text in enumerate(texts)]
    return [PreferencePair(f"{p}-{i}", prompt, f"c{i}", "r") for p, prompt in prompts for i in range(each)]


def test_DAT_10_no_prompt_on_both_sides() -> None:
    records = pairs_of(25, 4)
    train, held_out = split(records, 0.2, seed=3)
    assert (len(train), len(held_out)) == (80, 20)
    assert not {prompt_text(r) for r in train} & {prompt_text(r) for r in held_out}
    assert split(records, 0.2, seed=3) == (train, held_out)
    shuffled = random.Random(0).sample(records, len(records))
    assert {r.group_id for r in split(shuffled, 0.2, seed=3)[1]} == {r.group_id for r in held_out}
    assert split(records, 0.2, seed=4) != (train, held_out)


def test_DAT_10_near_duplicates_stay_together() -> None:
    records = pairs_of(20, 1)
    like = [
        PreferencePair(f"like-{r.group_id}", (Message("user", prompt_text(r).upper() + " ?"),), "c", "r")
        for r in records
    ]
    for seed in range(5):
        _, held_out = split([*records, *like], 0.25, seed)
        names = {r.group_id for r in held_out}
        assert len(names) == 10
        assert all(f"like-{n}" in names for n in names if not n.startswith("like-"))


def test_split_that_cannot_be_made_is_refused() -> None:
    same = [PreferencePair(str(i), (Message("user", "Q"),), "c", "r") for i in range(10)]
    with pytest.raises(DataError, match="their prompts form 1 groups"):
        split(same, 0.2, 0)
    with pytest.raises(DataError, match="between 0 and 1"):
        split(same, 1.0, 0)
    with pytest.raises(DataError, match="cannot split 1 record"):
        split(same[:1], 0.5, 0)


def test_prompts_of_one_template_can_be_split_with_threshold_1() -> None:
    texts = [f"What is {i} plus {i + 1}, as a number, please?" for i in range(20)] * 2
    records = [PreferencePair(str(i), (Message("user", t),), "c", "r") for i, t in enumerate(texts)]
    train, held_out = split(records, 0.2, 0, threshold=1)
    assert (len(train), len(held_out)) == (32, 8)
    assert not {prompt_text(r) for r in train} & {prompt_text(r) for r in held_out}


def test_split_takes_every_kind_of_record() -> None:
    messages = (Message("user", "Q"), Message("assistant", "A"))
    assert prompt_text(Demonstration("d", messages)) == prompt_text(Prompt("p", messages[:1])) == "Q"
    assert prompt_text(Ranking("g", (Message("system", "S"), *messages[:1]), ())) == "Q"


def test_near_duplicates_in_english_and_chinese() -> None:
    texts = [
        "Please write a short story about a lonely lighthouse keeper.",
        "please write a short story about a lonely lighthouse keeper!",
        "Explain how a lighthouse works.",
        "请写一篇关于孤独的灯塔守护人的短篇小说，要求情节动人，语言优美。",
        "请写一篇关于孤独的灯塔守护人的短篇小说，要求情节动人，语言优美！",
        "请解释灯塔的工作原理。",
        "",
        "  ",
    ]
    assert group(texts) == [0, 0, 1, 2, 2, 3, 4, 4]
    backwards = group(texts[::-1])[::-1]
    assert [backwards.index(g) for g in backwards] == [0, 0, 2, 3, 3, 5, 6, 6]
    assert group([]) == []


def test_groups_follow_the_exact_overlap() -> None:
    base = "abcdefghijklmnopqrstuvwxyz0123456789"
    assert group([base, base[:-3] + "XYZ"], threshold=0.8) == [0, 0]  # 30 of 36 runs in common: 0.83
    assert group([base, base[:-4] + "WXYZ"], threshold=0.8) == [0, 1]  # 29 of 37: 0.78
