from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from heedful.data import chat
from heedful.data.pairs import judged_answers, training_ranks
from heedful.data.tokenise import demonstrations, prompts, rankings
from heedful.errors import DataError
from heedful.records import Answer, Demonstration, Judgement, Message, Prompt, Ranking

FLAT = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture
def letters(byte_bpe):
    """One token per letter of "x", "z", "j", "k": lengths here are lengths of strings, plus the end token."""
    tokenizer = byte_bpe(FLAT)
    assert len(tokenizer("xxxzzzjjjkkk", add_special_tokens=False)["input_ids"]) == 12
    return tokenizer


def demonstration(name: str, prompt: str, answer: str) -> Demonstration:
    return Demonstration(name, (Message("user", prompt), Message("assistant", answer)))


def ranking(name: str, prompt: str, *texts: str) -> Ranking:
    answers = tuple(Answer(f"a{number}", text) for number, text in enumerate(texts, start=1))
    return Ranking(name, (Message("user", prompt),), answers, category="chat")


def test_SFT_02_a_limit_that_cuts_nothing_changes_nothing(letters):
    record = demonstration("d", "xxxxx", "zzzzz")
    runs = [
        demonstrations([record], letters, max_tokens=limit, too_long=how).samples
        for limit in (11, 8192)
        for how in ("drop", "cut")
    ]
    assert len(runs[0][0].ids) == 11
    assert all(run == runs[0] for run in runs)
    assert runs[0][0].loss_mask == [False] * 5 + [True] * 6


THREE = [demonstration("five", "x", "zzz"), demonstration("ten", "xx", "z" * 7), demonstration("long", "xx", "z" * 27)]


def test_SFT_03_drop_is_the_default_and_exact_length_stays(letters):
    result = demonstrations(THREE, letters, max_tokens=10)
    assert [len(sample.ids) for sample in result.samples] == [5, 10]
    assert all(sample.ids[-1] == letters.eos_token_id and sample.loss_mask[-1] for sample in result.samples)
    assert (result.num_read, result.num_kept, result.dropped, result.num_truncated) == (3, 2, {"too_long": 1}, 0)
    assert result.refused[0].id == "long" and result.refused[0].message == "30 tokens, the limit is 10"


def test_SFT_03_cut_puts_no_end_token_at_the_cut(letters):
    result = demonstrations(THREE, letters, max_tokens=10, too_long="cut")
    assert [len(sample.ids) for sample in result.samples] == [5, 10, 10]
    assert (result.num_kept, result.dropped, result.num_truncated) == (3, {}, 1)
    assert letters.eos_token_id not in result.samples[2].ids
    assert result.samples[1].ids[-1] == letters.eos_token_id
    assert result.samples[2].loss_mask == [False] * 2 + [True] * 8


def test_SFT_05_row_whose_answer_is_cut_away_is_dropped_with_a_count(letters):
    rows = [demonstration("long", "x" * 30, "zz"), demonstration("ok", "x", "zz")]
    result = demonstrations(rows, letters, max_tokens=10, too_long="cut")
    assert [sample.id for sample in result.samples] == ["ok"]
    assert result.dropped == {"no_supervised_token": 1}
    with pytest.raises(DataError, match="no demonstrations left.*kept 0.*no_supervised_token 1"):
        demonstrations(rows[:1], letters, max_tokens=10, too_long="cut")


def test_CLI_04_nothing_left_is_an_error_with_counts(letters):
    rows = [demonstration(name, "xx", "z" * 20) for name in "abc"]
    with pytest.raises(DataError, match=r"read 3, kept 0, dropped 3 \(too_long 3\); 'a': 23 tokens, the limit is 10"):
        demonstrations(rows, letters, max_tokens=10)
    with pytest.raises(DataError, match="no demonstrations left to work with: read 0, kept 0"):
        demonstrations([], letters, max_tokens=10)
    with pytest.raises(DataError, match="no prompts left"):
        prompts([], letters, max_prompt_tokens=10)
    with pytest.raises(DataError, match="no rankings left"):
        rankings([], [], letters, max_tokens=10)


def test_refused_rows_are_counted_by_reason(llama):
    system = Demonstration("s", (Message("system", "be kind"), Message("user", "hi"), Message("assistant", "yes")))
    rows = [system, demonstration("c", "hi", "yes</s>"), demonstration("ok", "hi", "yes")]
    result = demonstrations(rows, llama(), max_tokens=50)
    assert [sample.id for sample in result.samples] == ["ok"]
    assert result.dropped == {"refused_by_template": 1, "control_token_in_text": 1}
    assert result.summary() == "read 3, kept 1, dropped 2 (refused_by_template 1, control_token_in_text 1)"


def test_prompts_come_with_the_ids_of_rollout_and_long_ones_are_named(letters):
    rows = [Prompt("p1", (Message("user", "x" * 8),)), Prompt("p2", (Message("user", "x" * 9),))]
    result = prompts(rows, letters, max_prompt_tokens=8)
    assert result.samples == [(rows[0], chat.prompt_ids(letters, rows[0].messages))]
    assert [(row.id, row.reason) for row in result.refused] == [("p2", "prompt_too_long")]
    assert "9 tokens" in result.refused[0].message


def test_rankings_are_prompt_answer_end(letters):
    record = ranking("g", "xxx", "z", "jj", "kkk", "zk")
    result = rankings([record], [{"a1": 2, "a2": 1, "a4": 2}], letters, max_tokens=20)
    sample = result.samples[0]
    assert [letters.decode(ids) for ids in sample.sequences] == ["xxxz<|im_end|>", "xxxjj<|im_end|>", "xxxzk<|im_end|>"]
    assert (sample.ranks, sample.answer_ids, sample.num_prompt_tokens) == ([2, 1, 2], ["a1", "a2", "a4"], 3)
    assert (sample.num_answer_chars, sample.group_id, sample.category) == ([1, 2, 2], "g", "chat")
    prompt = chat.prompt_ids(letters, record.prompt)
    assert all(ids[:3] == prompt for ids in sample.sequences)


def test_DAT_09_one_prompt_for_both_sides_within_the_budget(letters):
    prompt = "xzjk" * 5
    record = ranking("g", prompt, "zz", "j" * 12)
    ranks = [{"a1": 1, "a2": 2}]
    sample = rankings([record], ranks, letters, max_tokens=16, too_long="cut").samples[0]
    assert all(len(ids) <= 16 for ids in sample.sequences)
    heads = {tuple(ids[: sample.num_prompt_tokens]) for ids in sample.sequences}
    assert len(heads) == 1 and prompt.endswith(letters.decode(heads.pop()))
    assert sample.num_prompt_tokens == 8
    with pytest.raises(DataError, match="prompt_too_long 1.*prompt of 20 tokens, the limit is 15"):
        rankings([record], ranks, letters, max_tokens=16)


def test_DAT_09_left_cut_keeps_the_begin_token_and_the_end_of_the_prompt(byte_bpe):
    tokenizer = byte_bpe(FLAT, adds_bos=True)
    record = ranking("g", "xzjk" * 5, "zz", "jj")
    ranks = [{"a1": 1, "a2": 2}]
    result = rankings([record], ranks, tokenizer, max_tokens=16, max_prompt_tokens=5, too_long="cut")
    sample = result.samples[0]
    assert [tokenizer.decode(ids) for ids in sample.sequences] == ["<bos>xzjkzz<|im_end|>", "<bos>xzjkjj<|im_end|>"]
    assert result.num_truncated == 1


def test_long_answers_are_dropped_or_cut_without_end(letters):
    record = ranking("g", "xxx", "z", "j", "k" * 20)
    ranks = [{"a1": 1, "a2": 2, "a3": 3}]
    dropped = rankings([record], ranks, letters, max_tokens=10)
    assert dropped.samples[0].answer_ids == ["a1", "a2"]
    assert dropped.num_answers_dropped == {"answer_too_long": 1} and dropped.num_truncated == 0
    assert dropped.summary() == "read 1, kept 1, dropped 0; answers dropped: answer_too_long 1"
    with pytest.raises(DataError, match=r"dropped 1 \(answer_too_long 1\)"):
        rankings([record], [{"a1": 1, "a3": 2}], letters, max_tokens=10)
    cut = rankings([record], ranks, letters, max_tokens=10, too_long="cut")
    assert letters.decode(cut.samples[0].sequences[2]) == "xxx" + "k" * 7
    assert cut.num_truncated == 1


def test_DAT_07_identical_after_truncation_is_dropped_and_reported(letters):
    pair = ranking("pair", "xxxxxx", "zzzzzzx", "zzzzzzk")
    other = ranking("other", "xxx", "z", "k")
    ranks = [{"a1": 1, "a2": 2}] * 2
    result = rankings([pair, other], ranks, letters, max_tokens=10, too_long="cut")
    assert [sample.group_id for sample in result.samples] == ["other"]
    assert result.dropped == {"identical_after_truncation": 1}


def test_DAT_07_the_cut_leaves_the_difference_where_it_can(letters):
    pair = ranking("pair", "xxxxxx", "zzzzx", "zzzzk")
    sample = rankings([pair], [{"a1": 1, "a2": 2}], letters, max_tokens=10, too_long="cut").samples[0]
    assert [letters.decode(ids) for ids in sample.sequences] == ["xxxxxzzzzx", "xxxxxzzzzk"]


def test_DAT_07_identical_texts(letters):
    with pytest.raises(DataError, match="identical_answers 1"):
        rankings([ranking("g", "xx", "zz", "zz")], [{"a1": 1, "a2": 2}], letters, max_tokens=10)
    four = ranking("g", "xx", "zz", "zz", "kk", "jj")
    agree = rankings([four], [{"a1": 1, "a2": 1, "a3": 2, "a4": 3}], letters, max_tokens=10)
    assert agree.samples[0].answer_ids == ["a1", "a3", "a4"]
    disagree = rankings([four], [{"a1": 1, "a2": 2, "a3": 3, "a4": 4}], letters, max_tokens=10)
    assert disagree.samples[0].answer_ids == ["a3", "a4"]
    assert disagree.num_answers_dropped == {"identical_answers": 2}


def test_the_card_judges_the_answers_that_training_learns_from(letters):
    rng, texts = random.Random(0), ["zz", "kk", "jj", "zzz"]
    for n in range(60):
        answers = tuple(Answer(f"a{k}", rng.choice(texts), kind=rng.choice(["sampled", "bait"])) for k in range(5))
        judged = rng.sample(answers, rng.randint(2, 5))
        consensus = {answer.id: rng.randint(1, 3) for answer in judged}
        record = Ranking(f"g{n}", (Message("user", "xx"),), answers, consensus=consensus)
        num_dropped = Counter()
        judged_ids = [answer.id for answer in judged_answers(record, num_dropped)]
        assert len(judged_ids) + num_dropped.total() == 5 and 0 not in num_dropped.values()
        ranks = training_ranks(record)
        try:
            trained = rankings([record], [ranks], letters, max_tokens=10, keep_all_tied=True)
        except DataError:
            assert len(judged_ids) < 2
        else:
            assert trained.samples[0].answer_ids == judged_ids
            assert trained.num_answers_dropped["identical_answers"] == num_dropped["identical_answers"]


def test_rankings_that_order_nothing_are_dropped(letters):
    rows = [ranking(name, "xx", "zz", "kk") for name in ("tie", "one", "none", "ok")]
    ranks = [{"a1": 1, "a2": 1}, {"a1": 1}, {}, {"a1": 2, "a2": 1}]
    result = rankings(rows, ranks, letters, max_tokens=10)
    assert result.dropped == {"all_tied": 1, "fewer_than_two_answers": 2}
    assert result.samples[0].group_id == "ok"
    with pytest.raises(DataError, match="4 rankings came with the ranks of 3"):
        rankings(rows, ranks[:3], letters, max_tokens=10)


def test_DAT_13_rankings_share_the_prompt_that_opens_a_tag(byte_bpe):
    from toy_tokenizers import THINK_OPEN

    tokenizer = byte_bpe(THINK_OPEN)
    record = ranking("g", "foo", "<think>\nbar</think>baz", "one")
    sample = rankings([record], [{"a1": 1, "a2": 2}], tokenizer, max_tokens=100).samples[0]
    prompt = chat.prompt_ids(tokenizer, record.prompt)
    assert all(ids[: sample.num_prompt_tokens] == prompt for ids in sample.sequences)
    prompt_text = tokenizer.decode(prompt)
    texts = [tokenizer.decode(ids) for ids in sample.sequences]
    assert texts == [prompt_text + "bar</think>baz<|im_end|>", prompt_text + "one<|im_end|>"]


def test_labels_follow_the_answers_that_are_left(letters):
    """The second answer is too long: matrices and control pairs speak of the first and the third."""
    votes = (Judgement("r", {"a1": 1, "a2": 2, "a3": 3}), Judgement("s", {"a1": 2, "a2": 3, "a3": 1}))
    record = ranking("g", "xx", "zz", "zzzzzzzzzzzz", "kk")
    record = dataclasses.replace(record, rankings=votes, gold=(("a2", "a3"), ("a3", "a1")), source="here")
    ranks = {"a1": 1, "a2": 2, "a3": 3}
    (sample,) = rankings([record], [ranks], letters, max_tokens=10, labels="votes", margins=True).samples
    assert sample.answer_ids == ["a1", "a3"] and sample.source == "here"
    assert sample.targets == [[0.5, 0.5], [0.5, 0.5]] and sample.strengths == [[0, 2], [2, 0]]
    assert sample.gold == ((1, 0),)
    (plain,) = rankings([record], [ranks], letters, max_tokens=10).samples
    assert plain.targets is None and plain.strengths is None
    tied = [ranking("t", "xx", "zz", "kk"), ranking("one", "xx", "zz")]
    kept = rankings(tied, [{"a1": 1, "a2": 1}, {"a1": 1}], letters, max_tokens=10, keep_all_tied=True)
    assert [s.ranks for s in kept.samples] == [[1, 1]] and kept.dropped == {"fewer_than_two_answers": 1}
