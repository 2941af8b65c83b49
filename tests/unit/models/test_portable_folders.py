"""Facts in a saved folder that tools with another release of transformers, or with the chat template alone, rely on."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from heedful.config.section import LoraConfig
from heedful.data.chat import answer_ids, prompt_ids, render
from heedful.models.export import save_policy, save_reward, verify_reward
from heedful.models.portable import ending_at_the_score, for_transformers_4
from heedful.models.roles import build_policy, build_scalar
from heedful.records import Message
from toy_parts import CHATML, CPU, disturb, model_folder, toy_tokenizer

F32 = torch.float32
TURNS = [Message("user", "Hi"), Message("assistant", "Yes?"), Message("user", "Why?\n"), Message("assistant", " So. ")]

NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TWO_AFTER = CHATML.replace("'<|im_end|>\n'", "'<|im_end|>\n\n'")
TRIMS = CHATML.replace("m['content']", "m['content'] | trim")
SETS = "{% set messages = messages[0:] %}{% if messages[0].role == 'x' %}{% set y = 1 %}{% endif %}\n" + CHATML + "\n"
LAST_BARE = CHATML.replace("'<|im_end|>\n'", "'<|im_end|>' + ('' if loop.last else '\n')")


def saved_reward(path, *, rope=None, lora=None, kind="Llama", template=CHATML):
    torch.manual_seed(3)
    model_folder(path / "base", kind=kind)
    if rope:
        config = json.loads((path / "base" / "config.json").read_text())
        config["rope_parameters"] = rope
        (path / "base" / "config.json").write_text(json.dumps(config))
    part = build_scalar(path / "base", lora=lora, device=CPU, dtype=F32, new_head=True)
    part.tokenizer.chat_template = template
    disturb(part, scale=0.05)
    save_reward(part.model, part.tokenizer, path / "out", score_mean=0, score_std=1)
    return part, path / "out"


def config_of(path, name="config.json"):
    return json.loads((path / name).read_text())


@pytest.mark.parametrize("rope, scaling", [
    ({"rope_type": "default", "rope_theta": 123456.0}, None),
    ({"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}, {"rope_type": "linear", "factor": 4.0}),
])  # fmt: skip
def test_rotary_positions_are_said_where_transformers_4_looks(tmp_path, rope, scaling):
    _, path = saved_reward(tmp_path, rope=rope)
    config = config_of(path)
    assert config["rope_theta"] == rope["rope_theta"]  # transformers 4 takes 10 000 where it is missing: other scores
    assert config.get("rope_scaling") == scaling
    assert AutoConfig.from_pretrained(path).rope_parameters == rope  # and 5 reads what it has written
    assert verify_reward(path).largest_gap <= 1e-5


def test_positions_by_kind_of_layer_and_without_rotation_are_left_alone(tmp_path):
    nested = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    for_transformers_4(tmp_path)
    assert config_of(tmp_path) == nested
    _, path = saved_reward(tmp_path, kind="GPT2")
    assert "rope_theta" not in config_of(path)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
def test_the_tokenizer_is_one_that_transformers_4_knows(tmp_path, lora):
    part, path = saved_reward(tmp_path, lora=lora)
    policy = build_policy(tmp_path / "base", lora=lora, device=CPU, dtype=F32)
    save_policy(policy.model, policy.tokenizer, tmp_path / "policy")
    folders = [path, tmp_path / "policy"]
    for folder in folders + [folder / "adapter" for folder in folders if lora]:
        settings = config_of(folder, "tokenizer_config.json")
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert settings["model_input_names"] == ["input_ids", "attention_mask"]  # else Llama is given token_type_ids
        assert not isinstance(settings.get("extra_special_tokens"), list)
        again = AutoTokenizer.from_pretrained(folder)
        text = "<|im_start|>user\nHi  there 🙂<|im_end|>\n"
        assert again(text)["input_ids"] == part.tokenizer(text)["input_ids"]
        assert again.special_tokens_map == part.tokenizer.special_tokens_map


@pytest.mark.parametrize("kind, template", [
    ("Llama", CHATML), ("GPT2", CHATML), ("Llama", TWO_AFTER), ("Llama", NO_END), ("Llama", TRIMS), ("Llama", SETS),
])  # fmt: skip
def test_REW_09_what_the_template_prints_ends_with_the_scored_token(tmp_path, kind, template):
    """RewardBench, vLLM and pipelines score what ``apply_chat_template`` prints, at its last token."""
    part, path = saved_reward(tmp_path, kind=kind, template=template)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    prompts = [TURNS[:1], TURNS[:3], [Message("system", "Be brief."), TURNS[0]]]
    found = []
    for prompt in prompts:
        text = render(tokenizer, [*prompt, Message("assistant", "Yes.")], add_generation_prompt=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        expected = prompt_ids(part.tokenizer, prompt) + answer_ids(part.tokenizer, "Yes.")
        assert ids["input_ids"][0].tolist() == expected
        with torch.no_grad():
            found.append(float(model(**ids).logits[0, 0]))
    scores = part.score_texts([tuple(p) for p in prompts], ["Yes."] * 3, micro_batch_tokens=4000)
    assert found == pytest.approx(scores, abs=1e-4) and max(scores) - min(scores) > 1e-3


@pytest.mark.parametrize("template", [CHATML, TWO_AFTER, NO_END, TRIMS, SETS, LAST_BARE])
def test_prompts_and_earlier_turns_are_printed_as_before(template):
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = template
    changed = ending_at_the_score(tokenizer)
    assert tokenizer.chat_template == template and (changed is tokenizer) == (template == LAST_BARE)
    assert ending_at_the_score(changed) is changed
    for last in range(1, len(TURNS) + 1):
        before = render(tokenizer, TURNS[:last], add_generation_prompt=True)
        assert render(changed, TURNS[:last], add_generation_prompt=True) == before
        before = render(tokenizer, TURNS[:last], add_generation_prompt=False)
        after = render(changed, TURNS[:last], add_generation_prompt=False)
        if last % 2:
            assert after == before
        else:
            assert after.endswith("<|im_end|>") and after.removesuffix("<|im_end|>").rstrip("\n") in before


@pytest.mark.parametrize("template", [
    CHATML + "{% if add_generation_prompt %}   \n   {% endif %}\n   \n", "\n\n" + CHATML,
])  # fmt: skip
def test_a_template_whose_blanks_jinja_would_cut_otherwise_is_left_alone(template):
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = template
    assert ending_at_the_score(tokenizer) is tokenizer
