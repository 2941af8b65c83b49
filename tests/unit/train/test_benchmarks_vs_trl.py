"""benchmarks/ppo_vs_trl.py, sft_vs_trl.py and decode_speed.py on a toy model; TRL is not installed here, so its side is
written down."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from heedful.config.section import LoraConfig
from heedful.models.roles import build_policy
from toy_parts import model_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import ceilings  # noqa: E402
import decode_speed  # noqa: E402
import ppo_vs_trl  # noqa: E402
import sft_vs_trl  # noqa: E402
import sides  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("toy") / "model")


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def prompts(tmp_path):
    return written(tmp_path / "prompts.jsonl", [{"id": f"p{n}", "prompt": f"Question {n}" + "?" * n} for n in range(5)])


def figures(text, name):
    return next(row for row in text.splitlines() if row.startswith(name)).removeprefix(name).split()


def run(module, monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
    module.main()
    return capsys.readouterr().out


def test_ppo_by_every_way_to_hold_the_models(model, prompts, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    words = [prompts, "--model", model, "--out", out, "--batch", 2, "--new_tokens", 4, "--full_length", "--warm_up", 1,
             "--updates", 2, "--threads", 1]  # fmt: skip
    whole = run(ppo_vs_trl, monkeypatch, capsys, *words, "--only", "separate")
    assert figures(whole, "tokens per answer") == ["4.0"] and float(figures(whole, "seconds per update")[0]) > 0
    task = sides.read(out, "task")
    assert len(task["prompts"]) == 5 and task["end_id"] is None
    for mode in ("shared", "trunk"):  # in this process
        found = ppo_vs_trl.heedful_side(task, out, mode, {"micro_batch_tokens": 64})
        assert {len(found[name]) for name in ("seconds", "core_seconds", "answer_tokens")} == {3}
        assert set(found["phases"]) == {"rollout", "scoring", "training"}
        for seconds, *phases in zip(found["seconds"], *found["phases"].values()):
            assert 0 < sum(phases) <= seconds
        assert all(0 < share < 1 for share in found["training_share"])


def test_an_answer_ends_at_the_end_token_unless_full_length_is_asked(model, prompts, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(sides, "run", lambda asked, task, names, script: seen.update(task) or {})
    monkeypatch.setattr(sys, "argv", ["x", prompts, "--model", str(model), "--batch", "2", "--max_prompt_tokens", "50"])
    ppo_vs_trl.main()
    assert seen["end_id"] == 2 and seen["prompts"][0]["ids"][0] == 1
    assert seen["pad"] not in ("<|im_end|>", "<|im_start|>")


def test_the_table_of_ppo_compares_updates_after_the_warm_up():
    task = {"warm_up": 1, "batch": 8}
    ours = {"version": "1", "seconds": [90.0, 2.0, 2.0, 5.0], "core_seconds": [90.0, 4.0, 4.0, 4.0],
            "phases": {"rollout": [9.0, 1.0, 1.0, 1.0], "scoring": [9.0, 0.25, 0.5, 0.5], "training": [0.0] * 4},
            "answer_tokens": [0.0, 3.0, 3.0, 3.0], "peak_memory_bytes": 2**30}  # fmt: skip
    trl = {**ours, "seconds": [0.0, 5.0, 5.0, 5.0], "core_seconds": [0.0, 10.0, 10.0, 10.0],
           "phases": {"rollout": [0.0, 2.0, 2.0, 2.0]}, "peak_memory_bytes": 2 * 2**30}  # fmt: skip
    text = ppo_vs_trl.table(task, {"shared": {**ours, "training_share": [0.0, 0.1, 0.2, 0.3]}, "trl": trl})
    assert figures(text, "training's share of the matrix product") == ["20.0%"]
    assert figures(text, "seconds per update") == ["2.00", "5.00"]
    assert figures(text, "of which rollout") == ["1.00", "2.00"] and figures(text, "of which scoring") == ["0.50"]
    assert figures(text, "samples per second") == ["4.000", "1.600"]
    assert figures(text, "times TRL's, seconds of all cores") == ["2.50", "1.00"]
    assert figures(text, "times TRL's, seconds  ") == ["2.50", "1.00"]
    assert figures(text, "times TRL's, peak memory") == ["0.50", "1.00"]


def test_sft_counts_the_tokens_of_packed_samples(model, tmp_path, monkeypatch, capsys):
    rows = [
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "a" * (1 + n % 3)}]}
        for n in range(12)
    ]
    data = written(tmp_path / "demonstrations.jsonl", rows)
    words = [data, "--model", model, "--out", tmp_path / "out", "--prompts_per_step", 4, "--row_tokens", 64,
             "--warm_up", 1, "--updates", 2, "--threads", 1, "--only", "heedful"]  # fmt: skip
    text = run(sft_vs_trl, monkeypatch, capsys, *words)
    task, found = sides.read(tmp_path / "out", "task"), sides.read(tmp_path / "out", "heedful")
    assert task["rows_per_step"] == 1 and sum(map(sum, (row["mask"] for row in task["samples"]))) > 12
    assert len(found["tokens"]) == 3
    assert sum(found["tokens"]) == pytest.approx(sum(len(row["ids"]) for row in task["samples"]), rel=0.2)
    assert float(figures(text, "tokens per second")[0]) > 0
    trl = {"version": "9", "seconds": [1.0, 2.0, 2.0], "tokens": [9.0, 20.0, 20.0], "peak_memory_bytes": 2**30}
    ours = {**trl, "tokens": [1.0, 60.0, 60.0]}
    text = sft_vs_trl.table(task, {"heedful": ours, "trl": trl})
    assert figures(text, "times TRL's, tokens per second") == ["3.00", "1.00"]
    with pytest.raises(SystemExit, match="do not fill a row"):
        run(sft_vs_trl, monkeypatch, capsys, *words, "--row_tokens", 900)


def test_decoding_beside_transformers(model, prompts, monkeypatch, capsys):
    lengths = []
    generate = decode_speed.generate
    monkeypatch.setattr(decode_speed, "generate", lambda *given: lengths.append(given[2]) or generate(*given))
    text = run(decode_speed, monkeypatch, capsys, prompts, "--model", model, "--samples", 6, "--new_tokens", 12,
               "--end_share", 0.1, "--repeats", 1, "--threads", 1)  # fmt: skip
    together, alone = lengths[1], lengths[-1]
    assert len(set(together)) > 1 and alone == [12]  # random lengths, and one of full length
    assert figures(text, "tokens, longest answer")[:2] == [f"{sum(together)},", str(max(together))]
    assert len(figures(text, "share of the bound of every step, transformers")) == 2


def test_the_bounds_of_a_decoding():
    weights = ceilings.Weights(trunk=600, head=400, bytes_each=2)
    speeds = {"bytes_per_second": 1000.0, "flops": 1000.0}
    found = decode_speed.bound_seconds([3, 3], [2, 1], weights, speeds)
    assert found["bandwidth"] == pytest.approx(2 * 2.0)  # two steps read every weight
    prefill = 2 * 4 * 600 / 1000  # the last token of a prompt is read by the first step
    assert found["matrix"] == pytest.approx(prefill + 4.0 + 2.0)  # two rows, then one
    assert found["step by step"] == pytest.approx(prefill + 4.0 + 2.0)


def test_the_operations_of_an_update():
    weights = ceilings.Weights(trunk=600, head=400, bytes_each=2)
    full = ceilings.training_operations(weights, read=10, counted=5, trunks=2, full=True)
    assert full == 6 * (2 * 600 * 10 + 400 * 5)  # forward, and a backward of twice as much
    assert ceilings.training_operations(weights, read=10, counted=5, trunks=1, full=False) == 4 * (600 * 10 + 400 * 5)


@pytest.mark.parametrize("lora", [None, LoraConfig()])
def test_the_numbers_of_weights(model, lora):
    part = build_policy(model, lora=lora, device=torch.device("cpu"), dtype=torch.bfloat16)
    found = ceilings.Weights.of(part)
    attention, mlp = 32 * 32 * 2 + 32 * 16 * 2, 3 * 32 * 64
    assert found.trunk == 2 * (attention + mlp) and found.bytes_each == 2
    assert found.head == 32 * part.base.config.vocab_size
