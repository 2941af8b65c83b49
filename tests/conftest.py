"""A toy world for whole runs: a random two-layer model with a byte tokenizer, and a few dozen rows of each kind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

WORDS = ["red", "blue", "green", "gold", "grey", "pink", "teal", "navy", "rose", "lime"]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama of two layers with its tokenizer; dropout is set in its config (PPO-08)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from toy_parts import toy_tokenizer

    path = tmp_path_factory.mktemp("toy") / "model"
    tokenizer = toy_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True, attention_dropout=0.1,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with demonstrations, rankings, prompts and held-out prompts."""
    path = tmp_path_factory.mktemp("toy-data")
    ask = [f"Say {a} {b}" for a in WORDS for b in WORDS if a != b]
    user = [{"role": "user", "content": text} for text in ask]
    write_rows(
        path / "demonstrations.jsonl",
        ({"messages": [u, {"role": "assistant", "content": u["content"][4:]}]} for u in user[:20]),
    )
    write_rows(
        path / "rankings.jsonl",
        (
            {"id": f"r{i}", "prompt": ask[i], "answers": [
                {"text": "ok " * (1 + i % 3), "source": "a", "score": 0.9},
                {"text": f"no {i}", "source": "b", "score": 0.5},
                {"text": "no no no", "source": "c", "score": 0.1}]}
            for i in range(20, 50)
        ),
    )  # fmt: skip
    write_rows(path / "prompts.jsonl", ({"prompt": text} for text in ask[50:70]))
    write_rows(path / "heldout.jsonl", ({"prompt": text} for text in ask[70:82]))
    return path


@pytest.fixture(scope="session")
def toy_recipe(toy_model: Path, toy_data: Path) -> str:
    """A recipe of the whole pipeline that runs in seconds; ``output`` is set by the test."""
    return f"""
name: toy
model: {{name: "{toy_model}", dtype: float32, device: cpu}}
data:
  demonstrations: "{toy_data}/demonstrations.jsonl"
  rankings: "{toy_data}/rankings.jsonl"
  prompts: "{toy_data}/prompts.jsonl"
  heldout_prompts: "{toy_data}/heldout.jsonl"
sft: {{epochs: 1, prompts_per_step: 4, micro_batch_tokens: 256, max_tokens: 128, checkpoint: {{every_steps: 2}}}}
reward: {{epochs: 1, prompts_per_step: 4, micro_batch_tokens: 512, max_tokens: 128, checkpoint: {{every_steps: 2}}}}
ppo:
  steps: 4
  prompts_per_step: 6
  micro_batch_tokens: 256
  epochs: 2
  minibatches: 2
  sampling: {{max_new_tokens: 8}}
  kl: {{coefficient: 0.05, target: 1.0, horizon: 100}}
  optimizer: {{learning_rate: 1e-3}}
  value_optimizer: {{learning_rate: 1e-3}}
  accept_weak_reward: true
  checkpoint: {{every_steps: 1}}
evaluate: {{max_prompts: 12, gold: "heedful.evaluate.panel:utility"}}
"""


@pytest.fixture(scope="session")
def postgresql_folder() -> Iterator[Path]:
    """The socket's folder of a PostgreSQL server; ``toy_project.new_postgresql`` makes databases in it."""
    from toy_project import missing_postgresql, postgresql_server

    if reason := missing_postgresql():
        pytest.skip(reason)
    with postgresql_server() as folder:
        yield folder
