"""The lengths that a plan reads from the data are those that the stages train on."""

from __future__ import annotations

import json
import math

import pytest

from heedful.config.read import load_recipe
from heedful.data import tokenise
from heedful.data.chat import answer_ids, prompt_ids
from heedful.data.load import load_demonstrations, load_prompts, load_rankings
from heedful.data.pairs import training_ranks
from heedful.models.load import load_scalar, load_tokenizer
from heedful.models.packing import attention_tokens as attention_tokens_of_model
from heedful.models.parts import ScalarModel
from heedful.pipeline.lengths import TokenCounter, attention_tokens, of_data
from heedful.plan.shape import read_shape
from heedful.plan.workload import of_limits


@pytest.fixture()
def recipe(toy_recipe, tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(toy_recipe)
    return load_recipe(path, ["--data.max_prompt_tokens", "200"])


def test_tokens_are_counted_as_the_template_makes_them(recipe, toy_model):
    tokenizer, count = load_tokenizer(toy_model), TokenCounter(toy_model)
    for prompt in load_prompts(recipe.data.prompts):
        assert count.messages(prompt.messages) == len(prompt_ids(tokenizer, prompt.messages))
    for ranking in load_rankings(recipe.data.rankings):
        for answer in ranking.answers:
            assert count.text(answer.text) + 1 == len(answer_ids(tokenizer, answer.text))


def test_the_largest_batches_are_those_of_the_stages(recipe, toy_model):
    from heedful.train.reward import micro_batches as reward_batches
    from heedful.train.sft import micro_batches as sft_batches

    tokenizer, shape = load_tokenizer(toy_model), read_shape(toy_model)
    work = of_data(recipe, toy_model, shape)
    assert work.source == "the data" and work.sft and work.reward and work.ppo
    samples = tokenise.demonstrations(
        load_demonstrations(recipe.data.demonstrations),
        tokenizer,
        max_tokens=128,
        too_long="drop",
        train_on="assistant",
    ).samples
    longest = sorted(samples, key=lambda sample: -len(sample.ids))[: recipe.sft.prompts_per_step]
    first = sft_batches(longest, recipe.sft, 0)[0]
    assert (work.sft.largest.rows, work.sft.largest.row_tokens) == tuple(first.inputs_BT.shape)
    assert work.sft.largest.counted_tokens == pytest.approx(first.num_counted_tokens, rel=0.1)
    records = load_rankings(recipe.data.rankings)
    rankings = tokenise.rankings(records, [training_ranks(r) for r in records], tokenizer, max_tokens=128).samples
    widest = sorted(rankings, key=lambda r: -sum(map(len, r.sequences)))[: recipe.reward.prompts_per_step]
    batches = reward_batches(widest, recipe.reward, 0, attention_tokens=attention_tokens(shape))
    sizes = [tuple(batch.ids_RT.shape) for batch in batches]
    largest = work.reward.largest
    assert largest.num_per_step == len(sizes)
    assert largest.rows * largest.row_tokens == pytest.approx(max(r * t for r, t in sizes), rel=0.1)
    assert work.prompt_tokens == max(len(prompt_ids(tokenizer, p.messages)) for p in load_prompts(recipe.data.prompts))


def test_in_pieces_real_tokens_count_and_no_row_is_wider_than_its_longest_sequence(recipe, toy_model):
    from heedful.train.reward import micro_batches as reward_batches

    recipe = recipe.model_copy(update={"sft": recipe.sft.model_copy(update={"packing": True})})
    work = of_data(recipe, toy_model, read_shape(toy_model), in_pieces=True)
    records = load_rankings(recipe.data.rankings)
    tokenizer = load_tokenizer(toy_model)
    rankings = tokenise.rankings(records, [training_ranks(r) for r in records], tokenizer, max_tokens=128).samples
    widest = sorted(rankings, key=lambda r: -sum(map(len, r.sequences)))[: recipe.reward.prompts_per_step]
    batches = reward_batches(widest, recipe.reward, 0, attention_tokens=math.inf)
    largest = work.reward.largest
    most = max(int((batch.attention_mask_RT > 0).sum()) for batch in batches)
    assert 0.9 * most <= largest.rows * largest.row_tokens < 1.1 * most + largest.row_tokens
    assert largest.row_tokens <= max(len(ids) for r in rankings for ids in r.sequences)
    whole = of_data(recipe, toy_model, read_shape(toy_model)).sft.largest
    assert whole.rows == 1 and work.sft.largest.row_tokens < whole.row_tokens <= work.sft.largest.tokens


def test_in_pieces_ppo_computes_the_tokens_that_are_there(recipe, toy_model, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(n), "prompt": "a b c " * n}) + "\n" for n in range(1, 9)))
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"prompts": str(prompts)})})
    shape, tokenizer = read_shape(toy_model), load_tokenizer(toy_model)
    asked = [len(prompt_ids(tokenizer, p.messages)) for p in load_prompts(recipe.data.prompts)]
    answer = recipe.ppo.sampling.max_new_tokens - 1
    num = recipe.ppo.samples_per_minibatch
    padded, pieces = (of_data(recipe, toy_model, shape, in_pieces=x).ppo for x in (False, True))
    assert padded.largest.tokens == num * (max(asked) + answer)
    lengths = [n + answer for n in asked]
    assert len(set(lengths)) > 1
    assert pieces.largest.row_tokens == math.ceil(sum(n * n for n in lengths) / sum(lengths))
    assert num * sum(lengths) / len(lengths) < pieces.largest.tokens < padded.largest.tokens
    assert pieces.largest.counted_tokens == padded.largest.counted_tokens == num * (answer + 1)
    assert pieces.tokens_per_step == padded.tokens_per_step


def test_wide_rows_weigh_as_they_do_on_the_model(toy_model):
    import torch

    device, dtype = torch.device("cpu"), torch.float32
    model = load_scalar(toy_model, dtype=dtype, device=device, head="new", attention="sdpa")
    part = ScalarModel(model, load_tokenizer(toy_model), device, dtype)
    assert attention_tokens(read_shape(toy_model)) == pytest.approx(attention_tokens_of_model(part), rel=0.01)


@pytest.mark.parametrize("broken", ["no such file", "no tokenizer", "a bad row"])
def test_what_cannot_be_read_leaves_the_recipes_limits(recipe, toy_model, tmp_path, broken):
    folder, shape = toy_model, read_shape(toy_model)
    if broken == "no tokenizer":
        folder = tmp_path
    else:
        rows = tmp_path / "rows.jsonl"
        if broken == "a bad row":
            rows.write_text(json.dumps({"nothing": "known"}) + "\n")
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"demonstrations": str(rows)})})
    assert of_data(recipe, folder, shape) == of_limits(recipe, shape.max_positions)
