from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_tiny import CHATML, make_model, make_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from heedful.data.chat import prompt_ids
from heedful.errors import ModelError
from heedful.models.export import save_policy, save_reward
from heedful.models.load import load_causal, load_scalar, load_tokenizer
from heedful.models.lora import add_lora
from heedful.models.parts import ScalarModel
from heedful.models.roles import build_policy, build_scalar
from heedful.models.tokens import ensure_pad
from heedful.records import Message, RewardCard

CPU = torch.device("cpu")
F32 = torch.float32
LORA = SimpleNamespace(rank=4, alpha=8.0, targets="all-linear", dropout=0.0, base="float")
IDS = torch.tensor([[7, 30, 41, 8, 99, 12]])
PROMPT = (Message("user", "Hi?"),)
WORDS = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg", "hh hh", "ii ii ii", "j"]


def move(model: Any) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2", "Gemma2"])
def test_a_policy_loads_in_plain_transformers(
    kind: str, lora: Any, folder: Callable[..., Path], tmp_path: Path
) -> None:
    policy = build_policy(folder(kind), lora=lora, device=CPU, dtype=F32)
    move(policy.model)
    merged = save_policy(policy.model, policy.tokenizer, tmp_path / "out", extra={"heedful.json": {"step": 3}})
    assert (merged > 0) == (lora is not None) == (tmp_path / "out" / "adapter").exists()
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.allclose(loaded(IDS).logits, policy.model(IDS).logits, atol=1e-5)
    assert json.loads((tmp_path / "out" / "heedful.json").read_text()) == {"step": 3}


def test_files_have_the_umasks_mode_and_nothing_is_left_beside(folder: Callable[..., Path], tmp_path: Path) -> None:
    policy = build_policy(folder(), lora=LORA, device=CPU, dtype=F32)
    old = os.umask(0o022)
    try:
        (tmp_path / ".out.dead.partial").mkdir()  # of a save that was killed
        for _ in range(2):  # the second save replaces the first
            save_policy(policy.model, policy.tokenizer, tmp_path / "out")
    finally:
        os.umask(old)
    modes = {p.stat().st_mode & 0o777 for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert modes == {0o644}
    assert {p.name for p in tmp_path.iterdir()} == {"Llama-base", "out"}


def test_a_failed_save_keeps_the_old_folder(
    folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = build_policy(folder(), lora=None, device=CPU, dtype=F32)
    save_policy(policy.model, policy.tokenizer, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(policy.tokenizer, "save_pretrained", fail)
    move(policy.model)
    with pytest.raises(OSError, match="disk full"):
        save_policy(policy.model, policy.tokenizer, tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert {p.name for p in tmp_path.iterdir()} == {"Llama-base", "out"}


def test_small_updates_of_a_bfloat16_base_are_not_rounded_away(folder: Callable[..., Path], tmp_path: Path) -> None:
    policy = build_policy(folder("Qwen2"), lora=LORA, device=CPU, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(1e-5)
    before = load_causal(folder("Qwen2"), dtype=torch.bfloat16, device=CPU).state_dict()
    save_policy(policy.model, policy.tokenizer, tmp_path / "out")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert after[name].dtype == torch.float32
    assert 0 < (after[name] - before[name].float()).abs().max() < 1e-3


def test_EXP_01_reward_scores_survive_saving(folder: Callable[..., Path], tmp_path: Path) -> None:
    part = build_scalar(folder(), lora=None, device=CPU, dtype=F32, new_head=True)
    start = part.model.score.weight.detach().clone()
    optimizer = torch.optim.AdamW(part.trainable_parameters().values(), lr=1e-2)
    ids, ones = IDS.repeat(2, 1), torch.ones(2, 6, dtype=torch.int64)
    ids[1, -1] = 13
    for _ in range(20):
        optimizer.zero_grad()
        first, second = part.scores(ids, ones)
        torch.nn.functional.softplus(second - first).backward()
        optimizer.step()
    in_memory = part.score_texts([PROMPT] * 10, WORDS, micro_batch_tokens=1000)
    save_reward(part.model, part.tokenizer, tmp_path / "reward", score_mean=0.5, score_std=2.0)
    for _ in range(2):
        again = build_scalar(tmp_path / "reward", lora=None, device=CPU, dtype=F32)
        assert again.score_texts([PROMPT] * 10, WORDS, micro_batch_tokens=1000) == pytest.approx(in_memory, abs=1e-5)
        assert not torch.equal(again.model.score.weight, start)


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2", "Gemma2"])
def test_EXP_03_the_stock_classifier_gives_the_same_scores(
    kind: str, lora: Any, folder: Callable[..., Path], tmp_path: Path
) -> None:
    from heedful.data.chat import answer_ids

    part = build_scalar(folder(kind), lora=lora, device=CPU, dtype=F32, new_head=True)
    move(part.model)
    card = RewardCard("out", 0.8, 0.7, 0.9, 10, 60, score_quantiles={"0.5": 0.4})
    save_reward(part.model, part.tokenizer, tmp_path / "out", score_mean=0.5, score_std=2.0, card=card)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [f"{kind}ForSequenceClassification"]
    assert len(config["id2label"]) == 1 and config["problem_type"] == "regression"
    assert config["pad_token_id"] not in (None, part.tokenizer.eos_token_id)
    assert (config["mean"], config["std"]) == (0.5, 2.0)
    norm = json.loads((tmp_path / "out" / "reward_norm.json").read_text())
    assert norm == {"mean": 0.5, "std": 2.0, "quantiles": {"0.5": 0.4}}
    assert RewardCard.from_json(json.loads((tmp_path / "out" / "reward_card.json").read_text())) == card

    stock, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and stock.score.weight.shape[0] == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert CHATML in tokenizer.chat_template
    rows = [prompt_ids(tokenizer, PROMPT) + answer_ids(tokenizer, word) for word in WORDS]
    padded = tokenizer.pad({"input_ids": rows}, return_tensors="pt", padding_side="right")
    own = part.score_texts([PROMPT] * 10, WORDS, micro_batch_tokens=1000)
    with torch.no_grad():
        assert stock(**padded).logits[:, 0].tolist() == pytest.approx(own, abs=1e-4)


def test_EXP_03_a_reward_with_two_outputs_is_not_saved(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(pad="<|endoftext|>")
    model = make_model("Llama", tokenizer, head="ForSequenceClassification")
    with pytest.raises(ModelError, match="one output"):
        save_reward(model, tokenizer, tmp_path / "out", score_mean=0, score_std=1)


def test_a_reward_whose_pad_ends_turns_is_not_saved(tokenizer: Any, tmp_path: Path) -> None:
    model = make_model("Llama", tokenizer, head="ForSequenceClassification", num_labels=1)
    with pytest.raises(ModelError, match="pad token ends turns"):
        save_reward(model, tokenizer, tmp_path / "out", score_mean=0, score_std=1)


def test_EXP_04_embedding_and_head_trained_apart(folder: Callable[..., Path], tmp_path: Path) -> None:
    import peft

    path = folder("Llama")
    tokenizer, model = load_tokenizer(path), load_causal(path, dtype=F32, device=CPU)
    tokenizer.add_tokens(["<one>", "<two>"])
    ensure_pad(tokenizer, model)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], task_type="CAUSAL_LM"
    )
    with pytest.warns(UserWarning, match="tie_word_embeddings"):  # the very trap: config tied, weights apart
        adapted = peft.get_peft_model(model, config)
    move(adapted)
    save_policy(adapted, tokenizer, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[7, len(tokenizer) - 2, len(tokenizer) - 1, 8]])
    assert torch.allclose(loaded(ids).logits, adapted(ids).logits, atol=1e-5)


def test_EXP_04_tied_stays_tied(folder: Callable[..., Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    policy = build_policy(folder("Llama"), lora=LORA, device=CPU, dtype=F32)
    move(policy.model)
    save_policy(policy.model, policy.tokenizer, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_EXP_05_two_new_tokens_load_merged_and_as_adapter(
    kind: str, folder: Callable[..., Path], tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM

    path = folder(kind)
    tokenizer, model = load_tokenizer(path), load_causal(path, dtype=F32, device=CPU)
    tokenizer.add_tokens(["<one>", "<two>"])
    ensure_pad(tokenizer, model)
    adapted = add_lora(model, rank=4, alpha=8, task="causal")
    move(adapted)
    with torch.no_grad():
        model.get_input_embeddings().weight[-2:] = torch.randn(2, 32)  # trained rows of the new tokens
    save_policy(adapted, tokenizer, tmp_path / "out")
    ids = torch.tensor([[7, len(tokenizer) - 2, len(tokenizer) - 1, 8]])
    expected = adapted(ids).logits
    merged = load_causal(tmp_path / "out", dtype=F32, device=CPU)
    adapter = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out" / "adapter")
    rows = model.get_input_embeddings().weight
    for loaded in (merged, adapter):
        assert torch.allclose(loaded(ids).logits, expected, atol=1e-5)
        assert torch.equal(loaded.get_input_embeddings().weight[-2:], rows[-2:])
        assert len(tokenizer) <= len(loaded.get_input_embeddings().weight)


def test_EXP_06_generation_stops_at_the_templates_end_token(folder: Callable[..., Path], tmp_path: Path) -> None:
    """The template ends turns with id 9; the base says 2."""
    special = [f"<s{i}>" for i in range(10)]
    template = (
        "{% for m in messages %}{{ '<s1>' + m['role'] + m['content'] + '<s9>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<s1>assistant' }}{% endif %}"
    )
    tokenizer = make_tokenizer(special, template=template, eos="<s2>", pad="<s2>")
    policy = build_policy(folder("Qwen2", tokenizer=tokenizer), lora=None, device=CPU, dtype=F32)
    save_policy(policy.model, policy.tokenizer, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert saved.eos_token_id == 9
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == [9, 2]
    assert saved.pad_token_id == loaded.config.pad_token_id == loaded.generation_config.pad_token_id
    assert saved.pad_token_id not in (2, 9, None)
    with torch.no_grad():  # make 9 the best token everywhere
        loaded.lm_head.weight.zero_()
        loaded.model.norm.weight.zero_()
        loaded.lm_head.register_forward_hook(lambda m, i, logits: logits.index_fill(-1, torch.tensor([9]), 5.0))
    ids = torch.tensor([[20, 21]])
    out = loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
    assert out.tolist() == [[20, 21, 9]]


def test_EXP_06_ids_agree_even_when_the_live_model_was_never_told(tokenizer: Any, tmp_path: Path) -> None:
    model = make_model("Llama", tokenizer, eos_token_id=0)
    ensure_pad(tokenizer)
    save_policy(model, tokenizer, tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        config = json.loads((tmp_path / "out" / name).read_text())
        assert config["pad_token_id"] == tokenizer.pad_token_id == 4 and config["eos_token_id"] == [2, 0]
    assert model.config.eos_token_id == 0  # and it is left alone


CONVERSATIONS = [
    [("user", "Hi")],
    [("system", "Be brief."), ("user", "Why?")],
    [("user", "a"), ("assistant", "b"), ("user", "c")],
    [("user", "  spaces  and\nlines ")],
    [("user", "Ünïcode 汉字 🙂")],
]


def test_EXP_08_tokenizer_is_the_same_after_every_stage(folder: Callable[..., Path], tmp_path: Path) -> None:
    template = "{# mine #}" + CHATML
    path = folder("Llama", tokenizer=make_tokenizer(template=template))

    def seen(where: Path) -> Any:
        tokenizer = load_tokenizer(where)
        conversations = [[{"role": role, "content": content} for role, content in turns] for turns in CONVERSATIONS]
        texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations]
        flags = {i: (t.content, t.special, t.lstrip, t.rstrip) for i, t in tokenizer.added_tokens_decoder.items()}
        ids = [tokenizer.encode(text) for text in texts]
        own = template in tokenizer.chat_template  # a reward model's prints the same prompts, and one end more exactly
        return texts, ids, flags, tokenizer.special_tokens_map, own, tokenizer.padding_side

    before = seen(path)
    sft, reward, ppo = tmp_path / "sft", tmp_path / "reward", tmp_path / "ppo"
    policy = build_policy(path, lora=LORA, device=CPU, dtype=F32)
    save_policy(policy.model, policy.tokenizer, sft)
    scalar = build_scalar(sft, lora=None, device=CPU, dtype=F32, new_head=True)
    save_reward(scalar.model, scalar.tokenizer, reward, score_mean=0, score_std=1)
    policy = build_policy(sft, lora=None, device=CPU, dtype=F32)
    save_policy(policy.model, policy.tokenizer, ppo)
    for stage in (sft, reward, ppo):
        assert seen(stage) == before
        assert (stage / "tokenizer.json").read_text() == (path / "tokenizer.json").read_text()
    assert all(load_tokenizer(stage).chat_template == template for stage in (sft, ppo))


def test_a_lora_reward_model_keeps_its_adapter_and_head(folder: Callable[..., Path], tmp_path: Path) -> None:
    import peft

    part = build_scalar(folder(), lora=LORA, device=CPU, dtype=F32, new_head=True)
    move(part.model)
    save_reward(part.model, part.tokenizer, tmp_path / "out", score_mean=0, score_std=1)
    base = load_scalar(folder(), dtype=F32, device=CPU, head="new", seed=99)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
    again = ScalarModel(adapted, part.tokenizer, CPU, F32)
    expected = part.score_texts([PROMPT] * 10, WORDS, micro_batch_tokens=1000)
    assert again.score_texts([PROMPT] * 10, WORDS, micro_batch_tokens=1000) == pytest.approx(expected, abs=1e-5)
