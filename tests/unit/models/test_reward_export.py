"""A reward model's folder in other hands: the facts that other tools read, and the same scores by every road."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from heedful.config.section import LoraConfig
from heedful.data.chat import answer_ids, prompt_ids
from heedful.errors import ModelError
from heedful.models.export import save_reward, verify_reward
from heedful.models.heads import new_heads
from heedful.models.load import load_scalar
from heedful.models.parts import ScalarModel
from heedful.models.roles import build_reward, build_scalar
from heedful.models.verify import SELF_TEST, self_test
from heedful.pipeline.scorer import open_scorer
from heedful.records import Completion, Message, Prompt, RewardCard
from heedful.rollout.cache import ScoreCache
from heedful.rollout.server import RewardServer
from heedful.rollout.sources import HTTPReward
from toy_parts import CPU, disturb, model_folder

F32, BF16 = torch.float32, torch.bfloat16
LORA = LoraConfig(rank=4)


def saved(folder, *, lora=None, dtype=F32, kind="Llama", save_dtype=None, scale=0.05):
    """A trained-looking live model and the folder that it was saved in."""
    torch.manual_seed(4)
    model_folder(folder / "base", kind=kind)
    part = build_scalar(folder / "base", lora=lora, device=CPU, dtype=dtype, new_head=True)
    disturb(part, scale=scale)
    card = RewardCard("out", 0.8, 0.7, 0.9, 10, 60, score_quantiles={"0.05": -1.0, "0.5": 0.1})
    save_reward(part.model, part.tokenizer, folder / "out", score_mean=0.5, score_std=2.0, card=card, dtype=save_dtype)
    return part, folder / "out"


def pairs_of(path):
    return json.loads((path / SELF_TEST).read_text())["pairs"]


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_what_other_tools_read_in_the_folder(tmp_path, lora, kind):
    _, path = saved(tmp_path, lora=lora, kind=kind)
    config = json.loads((path / "config.json").read_text())
    # transformers, vLLM (converts by the name of the architecture), RewardBench
    assert config["architectures"] == [f"{kind}ForSequenceClassification"]
    assert list(config["id2label"]) == ["0"] and "num_labels" not in config  # one label
    assert config["problem_type"] == "regression"  # else a sigmoid is applied to one label
    # transformers pools at the last token that is not this one and refuses batches without it
    assert config["pad_token_id"] is not None
    ends = config["eos_token_id"] if isinstance(config["eos_token_id"], list) else [config["eos_token_id"]]
    assert config["pad_token_id"] not in ends
    # OpenRLHF: value_head_prefix "score", mean and std for its normalisation
    weights = load_file(path / "model.safetensors")
    assert weights["score.weight"].shape[0] == 1 and "score.bias" not in weights
    assert not any(name.startswith("lm_head") for name in weights)
    assert (config["mean"], config["std"]) == (0.5, 2.0)
    norm = json.loads((path / "reward_norm.json").read_text())
    assert norm == {"mean": 0.5, "std": 2.0, "quantiles": {"0.05": -1.0, "0.5": 0.1}}
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.chat_template and tokenizer.pad_token_id == config["pad_token_id"]
    assert (path / "adapter" / "adapter_config.json").exists() == (lora is not None)


def test_twenty_texts_with_the_live_scores(tmp_path):
    part, path = saved(tmp_path)
    pairs = pairs_of(path)
    assert len(pairs) == 20 and len({p["text"] for p in pairs}) == 20
    live = part.score_texts(
        [tuple(Message(**m) for m in p["prompt"]) for p in pairs], [p["answer"] for p in pairs], micro_batch_tokens=99
    )
    assert [p["score"] for p in pairs] == pytest.approx(live, abs=1e-4) and max(live) - min(live) > 0.1
    assert verify_reward(path).largest_gap <= 1e-5 and verify_reward(path).num_pairs == 20


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_the_texts_alone_are_enough_for_plain_transformers(tmp_path, lora):
    _, path = saved(tmp_path, lora=lora)
    pairs, tokenizer = pairs_of(path), AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    rows = tokenizer([p["text"] for p in pairs], add_special_tokens=False, return_tensors="pt", padding=True)
    assert rows["attention_mask"].sum(-1).tolist() == [p["num_tokens"] for p in pairs]
    with torch.no_grad():
        found = model(**rows).logits[:, 0].tolist()
    assert found == pytest.approx([p["score"] for p in pairs], abs=1e-4)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    raw = [found["score"] for found in classify([p["text"] for p in pairs[:4]])]
    assert raw == pytest.approx([p["score"] for p in pairs[:4]], abs=1e-4)  # no sigmoid


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_SAV_live_reloaded_merged_apart_served_and_cached_scores_are_equal(tmp_path, lora):
    live, path = saved(tmp_path, lora=lora)
    prompts = [Prompt(f"p{n}", (Message("user", text),)) for n, text in enumerate(["Hi", "Why?", "汉字", "x " * 40])]
    answers, messages = ["", "So.", "two words", "Ünïcode 🙂"], [p.messages for p in prompts]
    expected = live.score_texts(messages, answers, micro_batch_tokens=50)
    assert max(expected) - min(expected) > 0.1

    def equal(found):
        assert found == pytest.approx(expected, abs=1e-4)

    equal(live.score_texts(messages, answers, micro_batch_tokens=5000))
    equal(live.score_texts(messages[::-1], answers[::-1], micro_batch_tokens=50)[::-1])
    equal(build_reward(path, device=CPU, dtype=F32).score_texts(messages, answers, micro_batch_tokens=50))
    for _ in range(2):
        equal(open_scorer(str(path), device="cpu", dtype="float32", cache=ScoreCache(tmp_path / "s"))(prompts, answers))
    if lora:
        import peft

        base = load_scalar(tmp_path / "base", dtype=F32, device=CPU, head="new", seed=99)
        apart = ScalarModel(peft.PeftModel.from_pretrained(base, path / "adapter"), live.tokenizer, CPU, F32)
        equal(apart.score_texts(messages, answers, micro_batch_tokens=50))
    server = RewardServer(build_reward(path, device=CPU, dtype=F32).part, "out")
    thread = threading.Thread(target=server.serve)
    thread.start()
    ids = [(prompt_ids(live.tokenizer, m), answer_ids(live.tokenizer, a)) for m, a in zip(messages, answers)]
    said = [Completion("p", 0, p, a, [], "stop", 0, text) for (p, a), text in zip(ids, answers)]
    try:
        equal(HTTPReward("judge", server.url, live.tokenizer, retries=0)(prompts, said))
    finally:
        server.stop()
        thread.join()


@pytest.mark.parametrize("damage, said", [
    ("head", r"self-test text \d+ scored .* when the model was saved"), ("template", "self-test text"),
    ("no file", "no reward_selftest.json"), ("torn", "is not a self-test"), ("other", "is not a self-test"),
])  # fmt: skip
def test_a_folder_that_is_not_as_it_was_saved_is_refused(tmp_path, damage, said):
    _, path = saved(tmp_path)
    file = path / SELF_TEST
    if damage == "head":
        weights = load_file(path / "model.safetensors")
        weights["score.weight"] *= 1.01
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    elif damage == "template":
        template = path / "chat_template.jinja"
        template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|>:"))
    elif damage == "no file":
        file.unlink()
    else:
        file.write_text(file.read_text()[:-9] if damage == "torn" else '{"dtype": "float33", "pairs": []}')
    with pytest.raises(ModelError, match=said):
        verify_reward(path)


def turned_round(path):
    weights = load_file(path / "model.safetensors")
    weights["score.weight"] = -weights["score.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def test_sixteen_bits_are_checked_more_loosely(tmp_path):
    _, path = saved(tmp_path, save_dtype=BF16)
    assert json.loads((path / SELF_TEST).read_text())["dtype"] == "bfloat16"
    found = verify_reward(path)
    assert found.tolerance > 1e-4 and found.largest_gap <= found.tolerance
    turned_round(path)
    with pytest.raises(ModelError, match="when the model was saved"):
        verify_reward(path)


@pytest.mark.parametrize("scale", [1e-3, 0.05])
def test_adapters_on_a_sixteen_bit_base_are_merged_and_checked_in_float32(tmp_path, scale):
    """However small the update: bfloat16 would swallow it, and its noise is no reason to call a folder damaged."""
    _, path = saved(tmp_path, lora=LORA, dtype=BF16, scale=scale)
    assert json.loads((path / SELF_TEST).read_text())["dtype"] == "float32"
    found = verify_reward(path)
    assert found.tolerance == pytest.approx(1e-4, rel=10) and found.largest_gap <= found.tolerance
    turned_round(path)
    with pytest.raises(ModelError, match="when the model was saved"):
        verify_reward(path)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_merge_that_went_wrong_is_not_saved(tmp_path, monkeypatch, dtype):
    from peft.tuners.lora.layer import Linear

    delta = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, adapter: -delta(self, adapter))
    with pytest.raises(ModelError, match="score up to .* away from the model with its adapters"):
        saved(tmp_path, lora=LORA, dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_texts_that_template_or_positions_refuse_are_left_out(tmp_path):
    part, _ = saved(tmp_path)
    template = part.tokenizer.chat_template
    part.tokenizer.chat_template = "{% if messages[2:] %}{{ raise_exception('one turn') }}{% endif %}" + template
    pairs = self_test(part)["pairs"]
    assert len(pairs) == 18 and all(len(p["prompt"]) == 1 for p in pairs)
    part.base.config.max_position_embeddings = 100
    shorter = self_test(part)["pairs"]
    assert 0 < len(shorter) < 18 and all(p["num_tokens"] <= 100 for p in shorter)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_what_is_saved_is_made_in_main_memory(tmp_path, lora, monkeypatch):
    """Every weight leaves the device as it is merged; on a CPU what no adapter changes is not copied."""
    from heedful.models import export

    made = []
    real = export._plain_model

    def noted(*args, **options):
        made.append(real(*args, **options))
        return made[-1]

    monkeypatch.setattr(export, "_plain_model", noted)
    part, _ = saved(tmp_path, lora=lora)
    (plain,) = made
    assert {x.device.type for x in [*plain.parameters(), *plain.buffers()]} == {"cpu"}
    live = part.base.get_input_embeddings().weight
    assert plain.get_input_embeddings().weight.data_ptr() == live.data_ptr()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["ensemble", None])
def test_a_reward_model_on_a_gpu_is_saved_from_main_memory(tmp_path, kind):
    cuda = torch.device("cuda")
    model_folder(tmp_path / "base")
    part = build_scalar(tmp_path / "base", lora=LORA, device=cuda, dtype=F32, new_head=True)
    heads = None
    if kind is not None:
        heads = replace(new_heads(kind, {"a": 1.0, "b": 1.0}, 32, seed=0, device=cuda), means=(0.0, 0.0),
                        deviations=(1.0, 1.0))  # fmt: skip
        part.set_head(heads.row())
    save_reward(part.model, part.tokenizer, tmp_path / "out", score_mean=0.5, score_std=2.0, heads=heads)
    assert verify_reward(tmp_path / "out", device=cuda)
